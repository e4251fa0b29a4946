"""The gossip exchange in simulated time: pairs average while everybody computes.

The policy that draws the pairs in training draws them here. A pair's exchange begins when both its
ranks are through with the pairs decided before; nobody's computing waits for it. A gradient that
started none is applied as it is, one that did after its averaging.

An *update* here is P gradients applied, wherever: one pass of work of the whole cluster.
"""

from __future__ import annotations

import numpy as np

from lightning_dsgd.simulate.clock import Clock
from lightning_dsgd.simulate.cluster import Cluster, Draws
from lightning_dsgd.simulate.result import Result
from lightning_dsgd.simulate.rounds import FOREVER, Progress
from lightning_dsgd.workers.algorithm import GossipAlgorithm
from lightning_dsgd.workers.messages import Computed, Decision, Go, Pair, Segment


class GossipSimulation:
    """One run of pairwise averaging."""

    def __init__(self, algorithm: GossipAlgorithm, cluster: Cluster, *, seed: int = 0) -> None:
        workers = cluster.workers
        self.cluster = cluster
        self.clock = Clock()
        self.result = Result(algorithm.strategy_name, workers, workers)
        self.policy = algorithm.make_policy(workers)
        self._is_active = algorithm.is_active
        self._draws = Draws(cluster.times, workers, np.random.default_rng(seed))
        self._pair_seconds = cluster.exchange("pair")
        self._free = [0.0] * workers
        """When each rank's communication thread is through with what was decided so far."""
        self._starting = [False] * workers
        self._averaged = [0] * workers
        self._applied = 0

    def run(self, updates: int, progress: Progress | None = None) -> Result:
        """Simulate until P times so many gradients are applied."""
        self.policy.handle(Segment(FOREVER), 0.0)
        for rank in range(self.cluster.workers):
            self._begin(rank)
        shown = 0
        while self.result.updates < updates:
            self.clock.step()
            if progress is not None and self.result.updates != shown:
                shown = self.result.updates
                progress(shown)
        self.result.events = self.clock.events
        return self.result

    def _begin(self, rank: int) -> None:
        done = self.clock.now + self.cluster.overhead + self._draws.next(rank)
        self.clock.at(done, self._computed, rank, self._averaged[rank])

    def _computed(self, rank: int, snapshot: int) -> None:
        self.result.computed += 1
        starts = self._is_active(rank) and not self._starting[rank]
        decisions = self.policy.handle(Computed(rank, starts), self.clock.now)
        if not any(self._heed(decision, snapshot) for decision in decisions):
            self._apply(rank, snapshot)
        if Go(rank, True) in decisions:
            self._begin(rank)

    def _heed(self, decision: Decision, snapshot: int) -> bool:
        """Carry a pair out; its other half is the same exchange."""
        if not isinstance(decision, Pair) or not decision.starts:
            return False
        rank, partner = decision.worker, decision.partner
        start = max(self.clock.now, self._free[rank], self._free[partner])
        self._free[rank] = self._free[partner] = over = start + self._pair_seconds
        self._starting[rank] = True
        self.clock.at(over, self._averaging_done, rank, partner, snapshot)
        return True

    def _averaging_done(self, rank: int, partner: int, snapshot: int) -> None:
        """Average first, then update."""
        self._starting[rank] = False
        self._apply(rank, snapshot)
        self._averaged[rank] += 1
        self._averaged[partner] += 1

    def _apply(self, rank: int, snapshot: int) -> None:
        """Count one gradient; its age is the averagings its replica has seen meanwhile."""
        self.result.staleness[self._averaged[rank] - snapshot] += 1
        self._applied += 1
        if self._applied % self.cluster.workers == 0:
            self.result.times.append(self.clock.now)
            self.result.sizes.append(self.cluster.workers)
            self.result.ks.append(self.cluster.workers)


def simulate_gossip(
    algorithm: GossipAlgorithm,
    cluster: Cluster,
    updates: int,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Result:
    """Time per update of the gossip exchange."""
    return GossipSimulation(algorithm, cluster, seed=seed).run(updates, progress)
