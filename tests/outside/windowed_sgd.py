"""Somebody else's algorithm, in a package of its own: one file and one entry point.

An update is whatever has arrived when a window of time is over that its first gradient opened. A
worker gives `gradients` mini-batches together, and computes on while it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.trainer.rounds import RoundsStrategy
from lightning_dsgd.workers.machine import Rule, WorkerMachine
from lightning_dsgd.workers.messages import Contribution, Decision
from lightning_dsgd.workers.policy import RoundsPolicy, round_of


class WindowPolicy(RoundsPolicy):
    """The first gradient opens a window; when it closes, what is there makes the update."""

    def __init__(self, workers: int, window: float, *, version: int, max_lag: int) -> None:
        super().__init__(workers, version=version, max_lag=max_lag)
        self.window = window
        self._waiting: list[Contribution] = []
        self._opened = 0.0

    def _accept(self, event: Contribution, now: float) -> str | None:
        if not self._waiting:
            self._opened = now
        self._waiting.append(event)
        return None

    def deadline(self) -> float | None:
        return self._opened + self.window if self._waiting and self.version < self.last else None

    def _complete(self, now: float) -> bool:
        return bool(self._waiting) and now >= self._opened + self.window

    def _form(self, now: float) -> Sequence[Decision]:
        parts, self._waiting = self._waiting, []
        reason = f"the window of {self.window:g} s is over"
        return [round_of(self.version, parts, k=len(parts), reason=reason)]

    def _awaited(self) -> tuple[int, ...]:
        return tuple(sorted(self.present))


@dataclass(frozen=True)
class PairwiseRule(Rule):
    """So many mini-batches make a contribution, and one of those may be on its way."""

    gradients: int = 2

    def may_begin(self, me: WorkerMachine) -> bool:
        return me.batches < self.gradients

    def should_publish(self, me: WorkerMachine) -> bool:
        return me.batches == self.gradients and not me.outstanding


class WindowedStrategy(RoundsStrategy):
    """Each update is what arrives within a window of time.

    Args:
        window: Its length in seconds.
        gradients: Mini-batches that a worker gives together.
        timeout: Seconds after which a rank that does not come or answer ends the run.
        trace: Directory for a record of all events and decisions.
    """

    paper = "nobody 2026"
    summary = "what arrives within a window of time makes the update"
    strategy_name = "windowed"
    max_staleness = None

    def __init__(
        self,
        window: float = 0.02,
        gradients: int = 2,
        timeout: float = 300.0,
        trace: str | None = None,
    ) -> None:
        if not window > 0:
            raise ConfigurationError(f"window={window} must be a positive number of seconds")
        super().__init__(timeout=timeout, trace=trace)
        self.window = window
        self.gradients = gradients

    def make_policy(self, workers: int, *, version: int = 0) -> WindowPolicy:
        return WindowPolicy(workers, self.window, version=version, max_lag=self.max_lag)

    def make_rule(self, workers: int) -> PairwiseRule:
        return PairwiseRule(gradients=self.gradients)

    @classmethod
    def choices(cls, workers: int, seconds: float) -> list[dict[str, Any]]:
        return [{"window": factor * seconds} for factor in (0.5, 2.0)]
