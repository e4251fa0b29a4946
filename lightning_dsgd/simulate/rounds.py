"""The rounds exchange in simulated time, around the very policy that decides in training.

A worker here does what the training thread does:

- At a mini-batch boundary it first takes every update that is there or under way; then it begins.
- A finished gradient is announced; the coordinator hears of it one control-plane latency later and
  feeds it to the policy; a decision is with the workers another latency later.
- A decided round's exchange begins when the one before it is over.

What differs between algorithms is `Behaviour`: when a worker may begin its next gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from lightning_dsgd.errors import RunError
from lightning_dsgd.policy import RoundsPolicy
from lightning_dsgd.protocol import (
    Applied,
    Contribution,
    Decision,
    Dropped,
    Event,
    Held,
    KChanged,
    Passed,
    Round,
    Segment,
    Tick,
)
from lightning_dsgd.simulate.clock import Clock
from lightning_dsgd.simulate.cluster import Cluster, Draws
from lightning_dsgd.simulate.learning import Learner, Vector
from lightning_dsgd.simulate.result import Result

Progress = Callable[[int], None]
FOREVER = 2**62


@dataclass(frozen=True)
class Behaviour:
    """When a worker that has announced a gradient begins the next.

    `waits`: "version" until it has an update newer than that gradient; "taken" until the gradient
    is used or dropped; "never" at once. `cancels`: a gradient at an old version is abandoned as
    soon as the next update is decided. `turns`: gradients are accumulated until the token comes,
    `delay` of them exactly, or as many as there is time for.
    """

    waits: Literal["version", "taken", "never"]
    cancels: bool = False
    turns: bool = False
    delay: int | None = None


@dataclass
class Worker:
    """One simulated training thread."""

    rank: int
    version: int
    parameters: Vector | None = None
    attempt: int = 0
    """Counts begun gradients, so that an abandoned one is known when its time comes."""
    computing: bool = False
    seq: int = 0
    outstanding: int = 0
    given: int = -1
    """Version of the last gradient it announced."""
    told: int = 0
    """The newest version of this replica that the policy knows of."""
    batches: int = 0
    oldest: int = 0
    spent: tuple[float, ...] = ()
    passed: bool = False
    loss: float | None = None
    gradients: list[Vector] = field(default_factory=list)


class Recorder:
    """Keeps what went into the policy and what came out, as a trace would."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Event]] = []
        self.decisions: list[tuple[float, Decision]] = []


class RoundsSimulation:
    """One run of one policy on one cluster."""

    def __init__(
        self,
        policy: RoundsPolicy,
        cluster: Cluster,
        behaviour: Behaviour,
        *,
        seed: int = 0,
        learner: Learner | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.policy = policy
        self.cluster = cluster
        self.behaviour = behaviour
        self.clock = Clock()
        self.result = Result("", cluster.workers)
        self._learner = learner
        self._recorder = recorder
        self._draws = Draws(cluster.times, cluster.workers, np.random.default_rng(seed))
        self._workers = [Worker(rank, policy.version) for rank in range(cluster.workers)]
        self._idle: dict[int, None] = {}
        self._decided = self._newest = policy.version
        self._parts: dict[tuple[int, int], list[Vector]] = {}
        self._network_free = 0.0
        self._last_exchange = 0.0
        self._held = False
        self._token: int | None = getattr(policy, "token", None)
        self._ticks = type(policy).deadline is not RoundsPolicy.deadline
        self._tick_at: float | None = None

    def run(self, updates: int, progress: Progress | None = None) -> Result:
        """Simulate until so many updates are there."""
        self._feed(Segment(FOREVER))
        for worker in self._workers:
            self._begin(worker)
        shown = 0
        while self.result.updates < updates:
            if not self.clock.step():
                raise RunError(f"the simulated run stands still: waits for {self.policy.missing()}")
            if progress is not None and self.result.updates != shown:
                shown = self.result.updates
                progress(shown)
        self.result.events = self.clock.events
        return self.result

    # ------------------------------------------------------------------- training threads

    def _boundary(self, worker: Worker) -> None:
        """Take what there is to take, then begin, wait for an update, or wait for the turn."""
        behind = self._newest - worker.version
        if behind:
            self._later(self.cluster.overhead * behind, self._replayed, worker, self._newest)
        elif self._decided > self._newest:
            self._idle[worker.rank] = None
        elif not self._may_begin(worker):
            self._wait(worker)
        else:
            self._begin(worker)

    def _wait(self, worker: Worker) -> None:
        """Nothing more to compute: what is due goes out, then an update or the turn must come."""
        self._idle[worker.rank] = None
        if self.behaviour.turns and worker.batches and self._should_publish(worker):
            self._publish(worker)
            self._wake(worker)

    def _replayed(self, worker: Worker, version: int) -> None:
        worker.version = version
        if self._held or version - worker.told >= 8:
            self._tell(worker)
        self._boundary(worker)

    def _may_begin(self, worker: Worker) -> bool:
        behaviour = self.behaviour
        if behaviour.turns:
            return behaviour.delay is None or worker.batches < behaviour.delay
        if behaviour.waits == "version":
            return worker.version > worker.given
        return behaviour.waits == "never" or not worker.outstanding

    def _begin(self, worker: Worker) -> None:
        worker.attempt += 1
        worker.computing = True
        if self._learner is not None:
            worker.parameters = self._learner.parameters
        seconds = self._draws.next(worker.rank)
        self.clock.at(self.clock.now + seconds, self._computed, worker, worker.attempt, seconds)

    def _computed(self, worker: Worker, attempt: int, seconds: float) -> None:
        if attempt != worker.attempt:
            return  # it was cancelled
        worker.computing = False
        self.result.computed += 1
        if not worker.batches:
            worker.oldest = worker.version
            worker.spent = ()
        worker.batches += 1
        worker.spent += (seconds,)
        if self._learner is not None:
            worker.loss, gradient = self._learner.gradient(worker.rank, worker.parameters)
            worker.gradients.append(gradient)
        if self._should_publish(worker):
            self._publish(worker)
        self._boundary(worker)

    def _should_publish(self, worker: Worker) -> bool:
        """Whether what has been accumulated goes out now; always, where there are no turns."""
        behaviour = self.behaviour
        if not behaviour.turns:
            return True
        enough = behaviour.delay is None or worker.batches >= behaviour.delay
        turn = self._token == worker.rank or worker.passed
        return enough and turn and not worker.outstanding

    def _publish(self, worker: Worker) -> None:
        worker.seq += 1
        worker.outstanding += 1
        worker.given = worker.oldest
        worker.passed = False
        event = Contribution(
            worker.rank,
            worker.seq,
            worker.oldest,
            worker.batches,
            worker.loss,
            worker.spent,
            self._last_exchange,
        )
        if self._learner is not None:
            self._parts[worker.rank, worker.seq] = worker.gradients
            worker.gradients = []
        worker.batches = 0
        worker.told = max(worker.told, worker.oldest)
        self._later(self.cluster.control, self._feed, event)

    # ------------------------------------------------------------------------ coordinator

    def _feed(self, event: Event) -> None:
        now = self.clock.now
        decisions = self.policy.handle(event, now)
        if self._recorder is not None:
            self._recorder.events.append((now, event))
            self._recorder.decisions.extend((now, decision) for decision in decisions)
        for decision in decisions:
            self._decide(decision)
        if self._ticks:
            self._plan_tick()

    def _plan_tick(self) -> None:
        wanted = self.policy.deadline()
        if wanted is not None and wanted != self._tick_at:
            self._tick_at = wanted
            self.clock.at(max(wanted, self.clock.now), self._tick, wanted)

    def _tick(self, planned: float) -> None:
        if planned == self._tick_at:
            self._tick_at = None
            self._feed(Tick())

    def _decide(self, decision: Decision) -> None:
        if isinstance(decision, Round):
            self._held = False
            self._later(self.cluster.control, self._round_known, decision)
        elif isinstance(decision, Dropped):
            self.result.dropped += 1
            self._later(self.cluster.control, self._drop_known, decision)
        elif isinstance(decision, Held):
            self._hold()
        elif isinstance(decision, Passed):
            self._later(self.cluster.control, self._pass_known, decision)
        elif isinstance(decision, KChanged):
            self.result.k = decision.k

    def _hold(self) -> None:
        """Tell the policy how far replicas really are; what then still waits is truly held."""
        self._held = True
        for worker in self._workers:
            if self._held and worker.version > worker.told:
                self._tell(worker)
        self.result.held += self._held

    def _tell(self, worker: Worker) -> None:
        worker.told = worker.version
        self._feed(Applied(worker.rank, worker.version))

    # ---------------------------------------------------------------- what workers hear of

    def _round_known(self, decision: Round) -> None:
        self._decided = decision.number
        for rank in decision.workers:
            self._workers[rank].outstanding -= 1
        kind = "all_reduce" if len(set(decision.workers)) > 1 else "broadcast"
        seconds = self.cluster.exchange(kind) if self.cluster.workers > 1 else 0.0
        self._network_free = max(self.clock.now, self._network_free) + seconds
        self.clock.at(self._network_free, self._arrive, decision, seconds)
        if self.behaviour.cancels:
            self._cancel_late()
        if decision.token is not None:
            self._move_token(decision.token)

    def _cancel_late(self) -> None:
        for worker in self._workers:
            if worker.computing:
                worker.attempt += 1
                worker.computing = False
                self.result.cancelled += 1
                self._boundary(worker)

    def _drop_known(self, decision: Dropped) -> None:
        worker = self._workers[decision.worker]
        worker.outstanding -= 1
        self._parts.pop((decision.worker, decision.seq), None)
        self._wake(worker)

    def _pass_known(self, decision: Passed) -> None:
        self._workers[decision.worker].passed = True
        self._move_token(decision.token)

    def _move_token(self, token: int) -> None:
        """A worker that has computed all it may has waited for this."""
        self._token = token
        self._wake(self._workers[token])

    def _arrive(self, decision: Round, seconds: float) -> None:
        """The exchange is over: the update is there for every replica to take."""
        self._newest = decision.number
        self._last_exchange = seconds
        self._note(decision)
        waiting, self._idle = self._idle, {}
        for rank in waiting:
            self._boundary(self._workers[rank])

    def _note(self, decision: Round) -> None:
        result = self.result
        result.times.append(self.clock.now)
        result.sizes.append(sum(decision.batches))
        result.ks.append(decision.k)
        ages = decision.staleness()
        for age, batches in zip(ages, decision.batches, strict=True):
            result.staleness[age] += batches
        if self._learner is not None:
            keys = zip(decision.workers, decision.seqs, strict=True)
            self._learner.update([self._parts.pop(key) for key in keys], ages)
            result.losses.append((self.clock.now, self._learner.error()))

    def _wake(self, worker: Worker) -> None:
        if worker.rank in self._idle:
            del self._idle[worker.rank]
            self._boundary(worker)

    def _later(self, delay: float, action: Callable[..., None], *arguments: object) -> None:
        """At once where there is no delay: the heap is for things that take time."""
        if delay > 0.0:
            self.clock.at(self.clock.now + delay, action, *arguments)
        else:
            action(*arguments)
