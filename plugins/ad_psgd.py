"""AD-PSGD: asynchronous, decentralized, wait-free.

X. Lian, W. Zhang, C. Zhang, J. Liu: "Asynchronous Decentralized Parallel Stochastic Gradient
Descent", arXiv 1710.06952.

Every worker, for ever, on a model of its own:

1. compute a gradient at a snapshot of the model, which may be averaged meanwhile;
2. have the model averaged with that of a random neighbour;
3. apply the gradient to the model as it is by then.

In the paper's Algorithm 1 the average of step 2 is complete before step 3. Here nobody waits for
it: what is not done by then is done with a model that has made the step.

Workers are active or passive; active ones start exchanges, passive ones answer from their
communication thread, and each edge joins one of each kind. The result is the mean of all models.

In the paper workers agree among themselves. Here rank 0's control plane draws the pairs, by
messages of a few bytes; models travel between the two ranks of a pair alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from lightning_dsgd.backends import BackendName, Edge
from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.exchange.finite import NonFinite
from lightning_dsgd.trainer.gossip import GossipStrategy, Resync
from lightning_dsgd.workers.messages import (
    Closed,
    Computed,
    Decision,
    Event,
    Go,
    Joined,
    Left,
    Pair,
    Segment,
)
from lightning_dsgd.workers.policy import NOTHING, Policy
from lightning_dsgd.workers.topology import NAMES, Topology, TopologyName, is_active, make_topology


class GossipPolicy(Policy):
    """Who makes the next gradient, and who averages with whom.

    Rules:

    1. A segment is a number of gradients. At its start every rank holds the right to make one.
    2. An announced gradient earns its rank the right to the next one, until all are given away.
    3. A gradient of an active rank whose last exchange is over makes a pair: the rank, and one of
       its neighbours at random.
    4. When no rank holds a right any more, the segment is closed. A gradient announced before the
       next one is opened belongs to that one, and waits for it.
    """

    def __init__(self, topology: Topology, *, seed: int = 0) -> None:
        self.version = 0
        self.last = 0
        self.pairs = 0
        self.present = set(range(topology.world_size))
        self._topology = topology
        self._random = random.Random(seed)
        self._given = 0
        self._holding: set[int] = set()
        self._early: list[Computed] = []
        self._latest = dict.fromkeys(self.present, 0)

    def handle(self, event: Event, now: float) -> Sequence[Decision]:
        if isinstance(event, Computed):
            return self._computed(event)
        if isinstance(event, Segment):
            return self._open(event.last)
        if isinstance(event, Joined):
            self.present.add(event.worker)
            self._latest[event.worker] = self.version
        elif isinstance(event, Left):
            return self._left(event.worker)
        return NOTHING

    def _open(self, last: int) -> list[Decision]:
        self.last = last
        self._holding = set(self.present)
        self._given = self.version + len(self._holding)
        early, self._early = self._early, []
        return [decision for event in early for decision in self._computed(event)]

    def _computed(self, event: Computed) -> Sequence[Decision]:
        worker = event.worker
        if worker not in self._holding:
            self._early.append(event)
            return NOTHING
        self.version += 1
        self._latest[worker] = self.version
        more = self._given < self.last
        self._given += more
        decisions: list[Decision] = [Go(worker, more)]
        if event.starts:
            decisions.extend(self._pair(worker))
        return decisions if more else [*decisions, *self._done(worker)]

    def _pair(self, worker: int) -> Iterable[Decision]:
        partners = [p for p in self._topology.neighbours(worker) if p in self.present]
        if not partners:
            return NOTHING
        partner = self._random.choice(partners)
        self.pairs += 1
        return (
            Pair(worker, partner, self.pairs, True, self.version - self._latest[partner]),
            Pair(partner, worker, self.pairs, False, self.version - self._latest[worker]),
        )

    def _done(self, worker: int) -> Iterable[Decision]:
        self._holding.discard(worker)
        return NOTHING if self._holding else [Closed(rank) for rank in sorted(self.present)]

    def _left(self, worker: int) -> Sequence[Decision]:
        """Its right goes to whoever asks next; if nobody is left to ask, the segment ends short."""
        self.present.discard(worker)
        self._early = [event for event in self._early if event.worker != worker]
        if worker not in self._holding:
            return NOTHING
        self._given -= 1
        return list(self._done(worker))

    def missing(self) -> tuple[int, ...]:
        return tuple(sorted(self._holding))


class ADPSGDStrategy(GossipStrategy):
    """Every worker trains a model of its own and keeps averaging it with random neighbours' models.

    Nobody waits for a slow worker: a pair's exchange runs in the communication threads of its two
    ranks while both compute. Ranks make unequal numbers of steps; an epoch is a total over all of
    them, at the end of which the module holds the mean of all models.

    Args:
        topology: Who averages with whom. 'ring': the ranks before and after. 'exponential': those
            1, 3, 5, 9, ... away. 'bipartite': every active (even) rank with every passive (odd)
            one.
        resync_every: When training goes on from the mean of all models instead of the own one:
            'never', after each 'epoch', or after so many steps (a number n means n gradients per
            rank on average, then all ranks wait for each other).
        gradients_per_epoch: Gradients per epoch, over all ranks. Default: as many as use the data
            once.
        seed: Of the random choice of neighbours.
        backend: Collectives: 'horovod', 'torch', or 'auto' for what the launcher implies.
        timeout: Seconds after which a rank that does not come or answer ends the run.
        nonfinite: When a rank's gradient holds a NaN or an infinity: 'raise' ends the run on all
            ranks, by name; 'drop' has the rank make no step with it; 'ignore' looks for none.
    """

    paper = "Lian et al. 2018, arXiv 1710.06952"
    strategy_name = "ad_psgd"
    plainness = 8
    summary = "own models, averaged in random pairs while all workers compute; nobody waits"

    def __init__(
        self,
        topology: TopologyName = "ring",
        resync_every: Resync | int = "never",
        gradients_per_epoch: int | None = None,
        seed: int = 0,
        backend: BackendName = "auto",
        timeout: float = 300.0,
        nonfinite: NonFinite = "raise",
    ) -> None:
        if topology not in NAMES:
            raise ConfigurationError(f"topology={topology!r} is unknown; choose {', '.join(NAMES)}")
        super().__init__(
            resync_every=resync_every,
            gradients_per_epoch=gradients_per_epoch,
            backend=backend,
            timeout=timeout,
            nonfinite=nonfinite,
        )
        self.topology = topology
        self.seed = seed

    def edges(self) -> Sequence[Edge]:
        return make_topology(self.topology, self.world_size).edges

    def make_policy(self, workers: int, *, version: int = 0) -> GossipPolicy:
        return GossipPolicy(make_topology(self.topology, workers), seed=self.seed)

    def is_active(self, rank: int) -> bool:
        return is_active(rank)

    def check_workers(self, workers: int) -> None:
        make_topology(self.topology, workers)

    @classmethod
    def choices(cls, workers: int, seconds: float) -> list[dict[str, Any]]:
        return [{}] if workers > 1 else []
