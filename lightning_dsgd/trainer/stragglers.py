"""Slow workers on demand: a callback for demos, tests and benchmarks."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

from lightning_dsgd.backends.streams import Moment, Streams, happened, look_until
from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.simulate.delays import Delays
from lightning_dsgd.trainer.worlds import Callback, LightningModule, Trainer

_REMEMBERED = 15
"""A factor multiplies the median time of so many mini-batches: the first one warms up."""


class Stragglers(Delays, Callback):
    """Pauses chosen ranks during each mini-batch. Rules add up; the order of calls does not matter.

    Args:
        rules: The rules as mappings, each with `kind` and that method's arguments, for example
            `{kind: slow, rank: 3, factor: 10}`.
        seed: Makes the pauses the same in every run.
    """

    def __init__(self, rules: list[dict[str, Any]] | None = None, seed: int = 0) -> None:
        super().__init__(rules, seed)
        self._step = 0
        self._streams: Streams | None = None
        self._began: Moment | None = None
        self._forward: Moment | None = None
        self._under_way: deque[tuple[Moment, ...]] = deque()
        """Of each mini-batch: began, before and after the pause, ended."""
        self._computed: deque[float] = deque(maxlen=_REMEMBERED)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A rule for a rank that is not there would silently do nothing."""
        world = trainer.world_size
        chosen = {*self.factors, *(rank for ranks, _ in self.delays for rank in ranks or ())}
        for rank in sorted(chosen):
            if not -world <= rank < world:
                raise ConfigurationError(
                    f"Stragglers: there is no rank {rank} among {world} workers; choose 0 to "
                    f"{world - 1}, or -1 for the last"
                )
        self._streams = Streams(trainer.strategy.root_device)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What is of a device alone goes; a callback can be copied."""
        self._streams = self._began = self._forward = None
        self._under_way.clear()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.on_minibatch_start(trainer, pl_module)

    def on_minibatch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called by our strategies for every mini-batch, also where an iteration has several."""
        if self._streams is not None:
            self._began = self._streams.moment()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        if self._began is None or self._streams is None:
            return
        self._forward = self._streams.moment()
        seconds = self.pause(trainer.global_rank, trainer.world_size, self._step, self._usual())
        self._step += 1
        if seconds > 0:
            look_until(self._forward.mark, time.sleep)  # a host's sleep slows no device behind it
            getattr(trainer.strategy, "sleep", time.sleep)(seconds)
        self._under_way.append((self._began, self._forward, self._streams.moment()))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._began is not None and self._streams is not None:
            self._under_way[-1] += (self._streams.moment(),)
            self._began = None

    def _usual(self) -> float:
        """What a mini-batch takes without its pause; guessed from its forward while unknown."""
        while self._under_way and happened(self._under_way[0][-1].mark):
            began, forward, *rest = self._under_way.popleft()
            if len(rest) == 2:  # it was not cancelled
                self._computed.append(began.seconds_until(forward) + rest[0].seconds_until(rest[1]))
        if self._computed:
            return statistics.median(self._computed)
        assert self._began is not None and self._forward is not None
        look_until(self._forward.mark, time.sleep)
        return 3 * self._began.seconds_until(self._forward)
