"""K-sync by whole rounds: the same policy, its arrivals drawn and sorted by NumPy.

When late work is cancelled, every worker begins every round at the same instant. So a round needs
no event heap: draw P times, sort them, and feed them to the policy until it decides. That is what
makes ten thousand workers cheap.
"""

from __future__ import annotations

import numpy as np

from lightning_dsgd.errors import RunError
from lightning_dsgd.simulate.cluster import Cluster
from lightning_dsgd.simulate.result import Result
from lightning_dsgd.simulate.rounds import FOREVER, Progress
from lightning_dsgd.workers.messages import (
    Applied,
    Contribution,
    Decision,
    KChanged,
    Round,
    Segment,
)
from lightning_dsgd.workers.policy import RoundsPolicy

_DRAWN_AT_ONCE = 1_000_000


class SortedArrivals:
    """Synchronous rounds of a policy that uses gradients of the newest version only."""

    def __init__(
        self, policy: RoundsPolicy, cluster: Cluster, result: Result, *, seed: int = 0
    ) -> None:
        self.policy = policy
        self.cluster = cluster
        self.result = result
        self._rng = np.random.default_rng(seed)
        self._told = np.full(cluster.workers, policy.version)
        self._times = cluster.times
        self._now = 0.0

    def run(self, updates: int, progress: Progress | None = None) -> Result:
        """Simulate so many updates."""
        self.policy.handle(Segment(FOREVER), 0.0)
        block = max(1, min(updates, _DRAWN_AT_ONCE // self.cluster.workers))
        for first in range(0, updates, block):
            count = min(block, updates - first)
            times = self._times.sample_ranks(self._rng, self.cluster.workers, count)
            for row in np.ascontiguousarray(times.T):
                self._round(row)
            if progress is not None:
                progress(first + count)
        return self.result

    def _round(self, times: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        order = np.argsort(times, kind="stable")
        fed, decisions = self._feed(order.tolist(), times[order].tolist())
        self._told[order[:fed]] = self.policy.version - 1
        self.result.events += fed
        self.result.computed += fed
        self.result.cancelled += self.cluster.workers - fed
        for decision in decisions:
            if isinstance(decision, Round):
                self._note(decision)
            elif isinstance(decision, KChanged):
                self.result.k = decision.k
        self._tell_laggards()

    def _feed(self, ranks: list[int], seconds: list[float]) -> tuple[int, list[Decision]]:
        """Announce in order of arrival until the policy decides; how many it took, and what."""
        handle = self.policy.handle
        version = self.policy.version
        start = self._now + self.cluster.control
        made: list[Decision] = []
        for count, (rank, took) in enumerate(zip(ranks, seconds, strict=True), start=1):
            decisions = handle(Contribution(rank, version, version), start + took)
            if decisions:
                made.extend(decisions)
                if self.policy.version > version:
                    self._now = start + took
                    return count, made
        raise RunError(f"the simulated run stands still: waits for {self.policy.missing()}")

    def _note(self, decision: Round) -> None:
        kind = "all_reduce" if len(decision.workers) > 1 else "broadcast"
        exchange = self.cluster.exchange(kind) if self.cluster.workers > 1 else 0.0
        there = self._now + self.cluster.control + exchange
        self._now = there + self.cluster.overhead
        self.result.times.append(there)
        self.result.sizes.append(len(decision.workers))
        self.result.ks.append(decision.k)
        self.result.staleness[0] += len(decision.workers)

    def _tell_laggards(self) -> None:
        """A cancelled worker's replica advances too, though nothing it announces says so."""
        version = self.policy.version
        span = max(1, self.policy.max_lag // 2)
        if version % span:
            return
        for rank in np.flatnonzero(self._told < version - span + 1).tolist():
            self.policy.handle(Applied(rank, version), self._now)
        self._told[:] = version
