"""Slow workers as rules: what the callback `Stragglers` does in training and the simulator alike.

    Stragglers(seed=1).slow(rank=3, factor=10)        # rank=-1: the last
    Stragglers().exponential(0.1)                     # every rank, every mini-batch
    Stragglers().pareto(alpha=2.5, minimum=0.01, ranks=[2, 3])
    Stragglers().random_pair(seconds=0.2)             # two ranks at random in each step
    Stragglers().recorded([0.1, 0.3, 0.1])            # these pauses, over and over

From YAML the same rules are given as a list of mappings under `rules`. A slow worker is modelled
by a sleep, so that several ranks on one machine do not slow each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.simulate.distributions import (
    ComputeTime,
    Constant,
    Empirical,
    Exponential,
    Pareto,
)

if TYPE_CHECKING:  # in typing itself from Python 3.11 on
    from typing_extensions import Self

_KINDS = ("slow", "exponential", "pareto", "random_pair", "recorded")


def _check_ranks(ranks: Sequence[int]) -> None:
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise ConfigurationError(f"Stragglers: rank={rank!r} is no whole number")


class Delays:
    """Pauses chosen ranks during each mini-batch. Rules add up; the order of calls does not matter.

    Args:
        rules: The rules as mappings, each with `kind` and that method's arguments, for example
            `{kind: slow, rank: 3, factor: 10}`.
        seed: Makes the pauses the same in every run.
    """

    def __init__(self, rules: list[dict[str, Any]] | None = None, seed: int = 0) -> None:
        self.seed = seed
        self.factors: dict[int, float] = {}
        self.delays: list[tuple[tuple[int, ...] | None, ComputeTime]] = []
        self.pairs: list[float] = []
        self._generators: dict[int, np.random.Generator] = {}
        for rule in rules or []:
            self._add(rule)

    # ----------------------------------------------------------------------- rules

    def slow(self, rank: int, factor: float = 1.0, seconds: float = 0.0) -> Self:
        """This rank takes `factor` times as long, and `seconds` more; -1 is the last rank."""
        if factor < 1.0 or seconds < 0.0:
            raise ConfigurationError(
                f"slow(factor={factor}, seconds={seconds}): a factor below 1 or a negative time "
                "cannot be slept"
            )
        _check_ranks([rank])
        self.factors[rank] = self.factors.get(rank, 1.0) * factor
        return self._delay([rank], Constant(seconds)) if seconds else self

    def exponential(self, mean: float, ranks: Sequence[int] | None = None) -> Self:
        """An exponential pause of this mean."""
        return self._delay(ranks, Exponential(mean))

    def pareto(self, alpha: float, minimum: float, ranks: Sequence[int] | None = None) -> Self:
        """A heavy-tailed pause."""
        return self._delay(ranks, Pareto(alpha, minimum))

    def random_pair(self, seconds: float) -> Self:
        """Two ranks, drawn anew for every mini-batch number, pause that long."""
        if not seconds >= 0.0:
            raise ConfigurationError(f"random_pair(seconds={seconds}): a negative time")
        self.pairs.append(seconds)
        return self

    def recorded(self, seconds: Sequence[float], ranks: Sequence[int] | None = None) -> Self:
        """These pauses, one after the other, then again from the first."""
        if not len(seconds):
            raise ConfigurationError("recorded() needs at least one pause")
        return self._delay(ranks, Empirical(tuple(float(value) for value in seconds)))

    def _delay(self, ranks: Sequence[int] | None, model: ComputeTime) -> Self:
        _check_ranks(ranks or ())
        self.delays.append((None if ranks is None else tuple(ranks), model))
        return self

    def _add(self, rule: dict[str, Any]) -> None:
        if not isinstance(rule, Mapping):
            raise ConfigurationError(
                f"Stragglers: rule {rule!r} is no mapping; write it like "
                "{kind: slow, rank: 3, factor: 10}"
            )
        arguments = dict(rule)
        kind = arguments.pop("kind", None)
        if kind not in _KINDS:
            raise ConfigurationError(
                f"Stragglers: kind={kind!r} is unknown; use {', '.join(_KINDS)}"
            )
        try:
            getattr(self, kind)(**arguments)
        except ConfigurationError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"Stragglers: rule {kind}: {error}") from None

    # ----------------------------------------------------------------- what they do

    def pause(self, rank: int, world_size: int, step: int, computed: float) -> float:
        """Seconds this rank sleeps in mini-batch `step`, given what computing alone takes."""
        rng = self._generator(rank)
        pause = (self.factor_of(rank, world_size) - 1.0) * computed
        for model in self.delays_of(rank, world_size):
            pause += self._one(model, rng, step)
        for seconds in self.pairs:
            if rank in self.pair(step, world_size):
                pause += seconds
        return pause

    def factor_of(self, rank: int, world_size: int) -> float:
        """How many times as long as without us this rank's computing takes."""
        return math.prod(self.factors.get(name, 1.0) for name in (rank, rank - world_size))

    def delays_of(self, rank: int, world_size: int) -> list[ComputeTime]:
        """The pauses of this rank in every mini-batch."""
        names = {rank, rank - world_size}
        return [m for ranks, m in self.delays if ranks is None or not names.isdisjoint(ranks)]

    def pair(self, step: int, world_size: int) -> tuple[int, ...]:
        """The two ranks of that step: every rank draws the same."""
        rng = np.random.default_rng([self.seed, 1_000_003, step])
        return tuple(int(r) for r in rng.choice(world_size, min(2, world_size), replace=False))

    @staticmethod
    def _one(model: ComputeTime, rng: np.random.Generator, step: int) -> float:
        if isinstance(model, Empirical):
            return float(model.seconds[step % len(model.seconds)])
        return model.draw(rng)

    def _generator(self, rank: int) -> np.random.Generator:
        if rank not in self._generators:
            self._generators[rank] = np.random.default_rng([self.seed, rank])
        return self._generators[rank]
