"""AD-PSGD's timing: pairs average while everybody computes, and nobody waits for the slowest.

Even ranks are active: a gradient of theirs starts an exchange with a random odd neighbour while
they compute on; an exchange needs both partners' communication to be free. A gradient that is done
before its worker's last exchange is over starts none and is applied as it is. Odd ranks answer.

An *update* here is P gradients applied, wherever: one pass of work of the whole cluster.
"""

from __future__ import annotations

import numpy as np

from lightning_dsgd.simulate.clock import Clock
from lightning_dsgd.simulate.cluster import Cluster, Draws
from lightning_dsgd.simulate.result import Result
from lightning_dsgd.simulate.rounds import Progress
from lightning_dsgd.topology import TopologyName, is_active, make_topology


class GossipSimulation:
    """One run of pairwise averaging."""

    def __init__(self, cluster: Cluster, *, topology: TopologyName = "ring", seed: int = 0) -> None:
        self.cluster = cluster
        self.clock = Clock()
        self.result = Result("ad_psgd", cluster.workers, cluster.workers)
        self._rng = np.random.default_rng(seed)
        self._draws = Draws(cluster.times, cluster.workers, self._rng)
        self._topology = make_topology(topology, cluster.workers)
        self._pair = cluster.exchange("pair")
        self._free = [0.0] * cluster.workers
        self._own_over = [0.0] * cluster.workers
        self._averaged = [0] * cluster.workers
        self._applied = 0

    def run(self, updates: int, progress: Progress | None = None) -> Result:
        """Simulate until P times so many gradients are applied."""
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
        if is_active(rank) and self._own_over[rank] <= self.clock.now:
            self._exchange(rank, snapshot)
        else:
            self._apply(rank, snapshot)
        self._begin(rank)

    def _exchange(self, rank: int, snapshot: int) -> None:
        partners = self._topology.neighbours(rank)
        partner = partners[int(self._rng.integers(len(partners)))]
        start = max(self.clock.now, self._free[rank], self._free[partner])
        over = start + self._pair
        self._free[rank] = self._free[partner] = self._own_over[rank] = over
        self.clock.at(over, self._averaging_done, rank, partner, snapshot)

    def _averaging_done(self, rank: int, partner: int, snapshot: int) -> None:
        """Average first, then update."""
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
