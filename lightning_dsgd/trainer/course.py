"""Where in a Lightning iteration a rank is, and which hook may come there.

============  =================================  ============================================
place         entered by                         left by
============  =================================  ============================================
`OUTSIDE`     the end of a batch                 `step`
`STEPPING`    the strategy's `optimizer_step`    `exchange`: exactly one, in the backward
`EXCHANGED`   the gradient's exchange            the end of `optimizer_step`
`DONE`        the end of `optimizer_step`        `end_batch`
`USER`        the module's own `training_step`   its end, to where it was called
`BACKWARD`    our own backward                   likewise
============  =================================  ============================================
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator

from lightning_dsgd.errors import ConfigurationError


class Place(enum.Enum):
    """The module's table says what each means."""

    OUTSIDE = enum.auto()
    STEPPING = enum.auto()
    EXCHANGED = enum.auto()
    DONE = enum.auto()
    USER = enum.auto()
    BACKWARD = enum.auto()


class Course:
    """One rank's way through the hooks of its iterations; refuses the wrong one."""

    def __init__(self, strategy: str) -> None:
        self.place = Place.OUTSIDE
        self._strategy = strategy

    @property
    def stepping(self) -> bool:
        """A backward now belongs to the optimizer's step."""
        return self.place in (Place.STEPPING, Place.EXCHANGED)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The optimizer steps; what `backward` does within it is this step's exchange."""
        self.place = Place.STEPPING
        try:
            yield
        except BaseException:
            self.place = Place.OUTSIDE
            raise
        if self.place is not Place.EXCHANGED:
            raise self._no_exchange()
        self.place = Place.DONE

    @contextlib.contextmanager
    def within(self, place: Place) -> Iterator[None]:
        """The user's own code runs, or our backward."""
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    def exchange(self) -> None:
        """The step's gradient is complete and exchanged: that happens once."""
        if self.place is Place.EXCHANGED:
            raise ConfigurationError(
                "the optimizer evaluates the loss several times per step, and "
                f"{self._strategy} exchanges one gradient per step; use another optimizer"
            )
        self.place = Place.EXCHANGED

    def end_batch(self) -> None:
        """After a batch that ends with a step: a gradient of its own would part the ranks."""
        if self.place is not Place.DONE:
            raise self._no_exchange()
        self.place = Place.OUTSIDE

    def _no_exchange(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self._strategy} exchanges gradients while the optimizer steps, and here it has "
            "not: let the module's `optimizer_step` call "
            "`optimizer.step(closure=optimizer_closure)`, for every batch"
        )
