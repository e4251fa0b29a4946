"""A recorded run: fed to a fresh policy, or turned into a cluster to simulate.

`replay` asks whether the policy still decides what it decided; `predict` asks how long an update
takes on workers as fast as the recorded ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from lightning_dsgd.control.trace import Trace, TraceError
from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.simulate.algorithms import make_rounds
from lightning_dsgd.simulate.cluster import Cluster, Link, Network
from lightning_dsgd.simulate.distributions import ComputeTime, Empirical, PerRank
from lightning_dsgd.simulate.learning import Vector
from lightning_dsgd.simulate.result import Result
from lightning_dsgd.simulate.runs import run
from lightning_dsgd.workers.algorithm import RoundsAlgorithm
from lightning_dsgd.workers.messages import Applied, Contribution, Decision, Round
from lightning_dsgd.workers.policy import RoundsPolicy

_QUANTILES = 1000
_ENOUGH = 10
"""Exchanges of one kind from which its duration can be told."""
NEVER_SEEN = 10.0
"""A rank that never delivered in time counts as so many times slower than the slowest delivery."""


@dataclass(frozen=True)
class Difference:
    """The first decision that came out otherwise."""

    index: int
    recorded: Decision | None
    replayed: Decision | None

    def __str__(self) -> str:
        return (
            f"decision {self.index}: recorded {self.recorded or 'nothing'}, "
            f"replayed {self.replayed or 'nothing'}"
        )


def replay(trace: Trace) -> Difference | None:
    """Feed the recorded events to a fresh policy; None if it decides the same again."""
    _, policy = recorded_halves(trace)
    replayed: list[Decision] = []
    for now, event in trace.events:
        replayed.extend(policy.handle(event, now))
    recorded = [decision for _, decision in trace.decisions]
    for index in range(max(len(recorded), len(replayed))):
        before = recorded[index] if index < len(recorded) else None
        after = replayed[index] if index < len(replayed) else None
        if before != after:
            return Difference(index, before, after)
    return None


# ---------------------------------------------------------------------- what it measured


def compute_times(trace: Trace) -> PerRank:
    """Each rank's own measured times per mini-batch.

    Of a cancelled gradient only a lower bound is known, see `uncensored`. A rank whose every
    gradient was cancelled has told nothing but that it is slow.
    """
    ranks = range(trace.header.workers)
    finished: dict[int, list[float]] = {rank: [] for rank in ranks}
    cancelled: dict[int, list[float]] = {rank: [] for rank in ranks}
    for _, event in trace.events:
        if isinstance(event, Contribution):
            finished[event.worker].extend(event.seconds)
        elif isinstance(event, Applied):
            cancelled[event.worker].extend(event.cancelled)
    if not any(finished.values()):
        raise TraceError("the trace holds no compute times; was it recorded by an older version?")
    seen = {r: uncensored(finished[r], cancelled[r]) for r in ranks if finished[r]}
    everything = Empirical(tuple(second for times in seen.values() for second in times))
    unseen = Empirical((NEVER_SEEN * max(everything.seconds),))
    models: dict[int, ComputeTime] = {
        rank: Empirical(tuple(seen[rank])) if rank in seen else unseen for rank in ranks
    }
    return PerRank(everything, models=models)


def uncensored(finished: list[float], cancelled: list[float]) -> list[float]:
    """Equally likely times, from finished gradients and from some that were given up.

    The Kaplan-Meier estimate: whoever gave up would have taken as long as one of those that lasted
    longer. The longest of all counts as finished.
    """
    if not cancelled:
        return finished
    times = np.array(finished + cancelled)
    ended = np.arange(len(times)) < len(finished)
    order = np.lexsort((~ended, times))
    at_risk = len(times) - np.arange(len(times))
    survival = np.cumprod(np.where(ended[order], 1.0 - 1.0 / at_risk, 1.0))
    survival[-1] = 0.0
    wanted = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    quantiles: list[float] = times[order][np.searchsorted(1.0 - survival, wanted)].tolist()
    return quantiles


def exchange_time(trace: Trace) -> float:
    """The mean duration of a collective, without the first ones, which connect."""
    return _settled([part.exchange for part in _contributions(trace) if part.exchange > 0.0])


def overhead_time(trace: Trace) -> float:
    """What passes between an update and the beginning of the next gradient, beyond computing.

    A worker can have begun no earlier than its own announcement before and the arrival of the
    update it computed at; what is left until this announcement, computing apart, is overhead.
    """
    there = _arrivals(trace)
    before: dict[int, float] = {}
    gaps = []
    for now, event in trace.events:
        if not isinstance(event, Contribution):
            continue
        began = max(there.get(event.version, -1.0), before.get(event.worker, -1.0))
        if event.version in there and began >= 0.0 and event.batches == 1:
            gaps.append(max(0.0, now - sum(event.seconds) - began))
        before[event.worker] = now
    return median(gaps) if gaps else 0.0


def _network(trace: Trace) -> Network:
    """What each kind of exchange took; a kind that the run did not use is derived.

    An all-reduce is a reduction and a broadcast, so a broadcast takes half of it.
    """
    alone = {decision.number: len(set(decision.workers)) == 1 for decision in _rounds(trace)}
    took: dict[bool, list[float]] = {True: [], False: []}
    for part in _contributions(trace):
        if part.exchange > 0.0 and part.version in alone:
            took[alone[part.version]].append(part.exchange)
    broadcast, reduce = (
        _settled(took[kind]) if len(took[kind]) >= _ENOUGH else None for kind in (True, False)
    )
    if broadcast is None:
        broadcast = reduce / 2 if reduce is not None else exchange_time(trace)
    return Network(Link(reduce or 2 * broadcast), Link(broadcast), Link(broadcast))


def _settled(durations: list[float]) -> float:
    """Their mean without the first tenth, which connects."""
    settled = durations[len(durations) // 10 :]
    return fmean(settled) if settled else 0.0


def _arrivals(trace: Trace) -> dict[int, float]:
    """When each update was there: exchanges follow one another, each after its decision."""
    exchange, over = exchange_time(trace), 0.0
    there = {}
    for now, decision in trace.decisions:
        if isinstance(decision, Round):
            over = max(now, over) + exchange
            there[decision.number] = over
    return there


def measured_seconds_per_update(trace: Trace) -> float:
    """The recorded run's own mean, without its first tenth."""
    times = [now for now, decision in trace.decisions if isinstance(decision, Round)]
    if len(times) < 2:
        raise TraceError(f"the trace holds {len(times)} updates; two at least are needed")
    start = (len(times) - 1) // 10
    return (times[-1] - times[start]) / (len(times) - 1 - start)


def recorded_cluster(trace: Trace) -> Cluster:
    """A cluster like the one that was recorded."""
    return Cluster(
        workers=trace.header.workers,
        compute=compute_times(trace),
        network=_network(trace),
        overhead=overhead_time(trace),
    )


class RecordedLoss:
    """A learner that learns what was learned: each update's loss is the recorded one."""

    def __init__(self, trace: Trace) -> None:
        self._losses = [part.loss for part in _rounds(trace) if part.loss is not None]
        if not self._losses:
            raise TraceError("the trace holds no losses, and its policy decides by them")
        self._update = 0

    def __len__(self) -> int:
        return len(self._losses)

    @property
    def parameters(self) -> None:
        return None

    def gradient(self, worker: int, parameters: Vector) -> tuple[float, Vector]:
        return self.error(), None

    def update(self, parts: Sequence[Sequence[Vector]], ages: Sequence[int]) -> None:
        self._update += 1

    def error(self) -> float:
        return self._losses[min(self._update, len(self._losses) - 1)]


def predict(
    trace: Trace, *, updates: int = 2000, seed: int = 0, cluster: Cluster | None = None
) -> Result:
    """Simulate the recorded strategy on the recorded cluster, or another.

    See `.seconds_per_update` of what it returns. A policy that heeds the loss is told the recorded
    one, for as many updates as were recorded at most.
    """
    algorithm, policy = recorded_halves(trace)
    learner = RecordedLoss(trace) if policy.heeds_loss else None
    return run(
        algorithm,
        recorded_cluster(trace) if cluster is None else cluster,
        updates if learner is None else min(updates, len(learner)),
        policy=policy,
        seed=seed,
        learner=learner,
    )


def recorded_halves(trace: Trace) -> tuple[RoundsAlgorithm, RoundsPolicy]:
    """The algorithm that was recorded, and its policy as it was when the run began."""
    header = trace.header
    try:
        algorithm = make_rounds(header.strategy, header.workers, header.arguments)
    except (ConfigurationError, TypeError) as error:
        raise TraceError(f"the trace's strategy cannot be made again: {error}") from None
    return algorithm, algorithm.restored_policy(
        header.workers, header.start, header.state, header.bytes
    )


def _contributions(trace: Trace) -> list[Contribution]:
    return [event for _, event in trace.events if isinstance(event, Contribution)]


def _rounds(trace: Trace) -> list[Round]:
    return [decision for _, decision in trace.decisions if isinstance(decision, Round)]
