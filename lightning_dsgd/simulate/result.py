"""What a simulation has measured."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_BATCHES = 30
_T_99 = 2.756
"""Student's t for 99 % two-sided and 29 degrees of freedom."""


@dataclass
class Result:
    """One simulated run: when its updates came and what they were made of."""

    strategy: str
    workers: int
    k: int | None = None
    times: list[float] = field(default_factory=list)
    """When each update was there."""
    sizes: list[int] = field(default_factory=list)
    """Mini-batches in each update."""
    staleness: Counter[int] = field(default_factory=Counter)
    """How many gradients were so many updates old."""
    ks: list[int] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    """(time, error), where the simulation trained."""
    computed: int = 0
    dropped: int = 0
    cancelled: int = 0
    held: int = 0
    events: int = 0

    @property
    def updates(self) -> int:
        return len(self.times)

    @property
    def seconds(self) -> float:
        """Simulated time from the start to the last update."""
        return self.times[-1] if self.times else 0.0

    def _intervals(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Times between updates once the start has worn off: the last nine tenths."""
        return np.diff(np.asarray(self.times))[len(self.times) // 10 :]

    @property
    def seconds_per_update(self) -> float:
        intervals = self._intervals()
        return float(intervals.mean()) if len(intervals) else self.seconds / max(1, self.updates)

    @property
    def confidence(self) -> float:
        """Half the width of the 99 % interval of `seconds_per_update`, by batch means.

        Neighbouring intervals depend on each other where gradients are stale; means of long
        batches hardly do.
        """
        intervals = self._intervals()
        length = len(intervals) // _BATCHES
        if length < 1:
            return math.inf
        means = intervals[: length * _BATCHES].reshape(_BATCHES, length).mean(axis=1)
        return float(_T_99 * means.std(ddof=1) / math.sqrt(_BATCHES))

    @property
    def gradients_per_update(self) -> float:
        return sum(self.sizes) / max(1, self.updates)

    @property
    def gradients_per_second(self) -> float:
        """Gradients that updates used, per simulated second."""
        return self.gradients_per_update / self.seconds_per_update

    @property
    def mean_staleness(self) -> float:
        total = sum(self.staleness.values())
        return sum(age * count for age, count in self.staleness.items()) / max(1, total)

    @property
    def max_staleness(self) -> int:
        return max(self.staleness, default=0)

    @property
    def fresh(self) -> float:
        """The share of used gradients that were not stale."""
        return self.staleness[0] / max(1, sum(self.staleness.values()))

    @property
    def wasted(self) -> float:
        """The share of started gradients that no update used."""
        lost = self.dropped + self.cancelled
        return lost / max(1, sum(self.sizes) + lost)

    def time_to(self, target: float) -> float:
        """When the error was first at the target; infinite if it never was."""
        return next((time for time, error in self.losses if error <= target), math.inf)

    def summary(self) -> dict[str, Any]:
        """The figures, ready for JSON."""
        return {
            "strategy": self.strategy,
            "workers": self.workers,
            "k": self.k,
            "updates": self.updates,
            "seconds": self.seconds,
            "seconds_per_update": self.seconds_per_update,
            "confidence_99": self.confidence if math.isfinite(self.confidence) else None,
            "gradients_per_update": self.gradients_per_update,
            "gradients_per_second": self.gradients_per_second,
            "mean_staleness": self.mean_staleness,
            "max_staleness": self.max_staleness,
            "fresh_share": self.fresh,
            "wasted_share": self.wasted,
            "held": self.held,
            "events": self.events,
        }
