"""The rounds exchange in simulated time, around the two halves that decide in training.

Each worker is the very machine that steers a training thread; what takes time is done here:

- A finished gradient is announced; the coordinator hears of it one control-plane latency later and
  feeds it to the policy; a decision is with the workers another latency later.
- A decided round's exchange begins when the one before it is over.
- A worker that is to take updates takes all that have arrived, at the cost of `overhead` each.

A machine that computes, and would not stop for it, hears of others' rounds when it has finished:
that changes nothing for it, and makes thousands of workers cheap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_dsgd.errors import RunError
from lightning_dsgd.simulate.clock import Clock
from lightning_dsgd.simulate.cluster import Cluster, Draws
from lightning_dsgd.simulate.learning import Learner, Vector
from lightning_dsgd.simulate.result import Result
from lightning_dsgd.workers.algorithm import RoundsAlgorithm
from lightning_dsgd.workers.machine import (
    REPLAYING,
    Action,
    Cancel,
    Compute,
    Decided,
    Finished,
    GaveUp,
    Input,
    Publish,
    Replay,
    Tell,
    Took,
    Wait,
    WorkerMachine,
)
from lightning_dsgd.workers.messages import (
    Again,
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
from lightning_dsgd.workers.policy import RoundsPolicy

Progress = Callable[[int], None]
FOREVER = 2**62


@dataclass(slots=True)
class Worker:
    """One simulated training thread."""

    machine: WorkerMachine
    parameters: Vector | None = None
    began: float = 0.0
    attempt: int = 0
    """Counts begun gradients, so that an abandoned one is known when its time comes."""
    gradients: list[Vector] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.machine.rank


class Recorder:
    """Keeps what went into the policy and what came out, as a trace would; and each machine's."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Event]] = []
        self.decisions: list[tuple[float, Decision]] = []
        self.inputs: list[tuple[int, Input]] = []
        self.actions: list[tuple[int, Action]] = []


class RoundsSimulation:
    """One run of one algorithm on one cluster."""

    def __init__(
        self,
        algorithm: RoundsAlgorithm,
        policy: RoundsPolicy,
        cluster: Cluster,
        result: Result,
        *,
        seed: int = 0,
        learner: Learner | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        workers = cluster.workers
        self.policy = policy
        self.cluster = cluster
        self.clock = Clock()
        self.result = result
        self._cancels = algorithm.make_rule(workers).cancels
        self._learner = learner
        self._recorder = recorder
        self._draws = Draws(cluster.times, workers, np.random.default_rng(seed))
        self._workers = [
            Worker(algorithm.make_machine(rank, workers, policy)) for rank in range(workers)
        ]
        self._idle: dict[int, None] = {}
        """Whose machine waits, or waits to take an update that is under way."""
        self._decided = self._newest = policy.version
        self._token = policy.token
        self._parts: dict[tuple[int, int], list[Vector]] = {}
        self._network_free = 0.0
        self._last_exchange = 0.0
        self._ticks = type(policy).deadline is not RoundsPolicy.deadline
        self._tick_at: float | None = None
        self._soon: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()

    def run(self, updates: int, progress: Progress | None = None) -> Result:
        """Simulate until so many updates are there."""
        self._feed(Segment(FOREVER))
        for worker in self._workers:
            self._tell(worker, Segment(FOREVER))
        self._finish_instant()
        shown = 0
        while self.result.updates < updates:
            if not self.clock.step():
                raise RunError(f"the simulated run stands still: waits for {self.policy.missing()}")
            self._finish_instant()
            if progress is not None and self.result.updates != shown:
                shown = self.result.updates
                progress(shown)
        self.result.events = self.clock.events
        return self.result

    # ------------------------------------------------------------------- training threads

    def _tell(self, worker: Worker, event: Input) -> None:
        actions = worker.machine.handle(event)
        if self._recorder is not None:
            self._recorder.inputs.append((worker.rank, event))
            self._recorder.actions.extend((worker.rank, action) for action in actions)
        for action in actions:
            _CARRY_OUT[type(action)](self, worker, action)

    def _begin(self, worker: Worker, action: Compute) -> None:
        self._idle.pop(worker.rank, None)
        worker.attempt += 1
        worker.began = self.clock.now
        if self._learner is not None:
            worker.parameters = self._learner.parameters
        seconds = self._draws.next(worker.rank)
        self.clock.at(self.clock.now + seconds, self._computed, worker, worker.attempt, seconds)

    def _computed(self, worker: Worker, attempt: int, seconds: float) -> None:
        if attempt != worker.attempt:
            return  # it was cancelled
        self.result.computed += 1
        loss = None
        if self._learner is not None:
            loss, gradient = self._learner.gradient(worker.rank, worker.parameters)
            worker.gradients.append(gradient)
        self._catch_up(worker)
        self._tell(worker, Finished(seconds, loss))

    def _catch_up(self, worker: Worker) -> None:
        """What it has not been told yet, because it made no difference."""
        if worker.machine.decided < self._decided:
            self._tell(worker, Decided(self._decided, (), self._token))

    def _cancel(self, worker: Worker, action: Action) -> None:
        worker.attempt += 1
        worker.gradients.clear()
        self.result.cancelled += 1
        self._tell(worker, GaveUp(self.clock.now - worker.began))

    def _replay(self, worker: Worker, action: Replay) -> None:
        """Take what has arrived; what is under way comes by itself."""
        self._idle[worker.rank] = None
        behind = self._newest - worker.machine.version
        if behind:
            del self._idle[worker.rank]
            self._later(self.cluster.overhead * behind, self._took, worker, self._newest)

    def _took(self, worker: Worker, version: int) -> None:
        self._catch_up(worker)
        self._tell(worker, Took(version))

    def _wait(self, worker: Worker, action: Action) -> None:
        self._idle[worker.rank] = None

    def _publish(self, worker: Worker, action: Publish) -> None:
        event = action.contribution
        if self._learner is not None:
            self._parts[worker.rank, event.seq] = worker.gradients
            worker.gradients = []
        self._later(self.cluster.control, self._announce, event, self._last_exchange)

    def _announce(self, event: Contribution, exchange: float) -> None:
        rank, seq, version = event.worker, event.seq, event.version
        rest = (event.batches, event.loss, event.seconds, exchange, event.finite)
        self._feed(Contribution(rank, seq, version, *rest))

    def _say(self, worker: Worker, action: Tell) -> None:
        self._later(self.cluster.control, self._feed, action.applied)

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
            self._later(self.cluster.control, self._round_known, decision)
        elif isinstance(decision, Dropped):
            self.result.dropped += 1
            self._later(self.cluster.control, self._drop_known, decision)
        elif isinstance(decision, Again):
            worker = self._workers[decision.worker]
            self._later(self.cluster.control, self._tell, worker, decision)
        elif isinstance(decision, Held):
            self.result.held += 1
        elif isinstance(decision, Passed):
            self._later(self.cluster.control, self._pass_known, decision)
        elif isinstance(decision, KChanged):
            self.result.k = decision.k

    # ---------------------------------------------------------------- what workers hear of

    def _round_known(self, decision: Round) -> None:
        self._decided, self._token = decision.number, decision.token
        kind = "all_reduce" if len(set(decision.workers)) > 1 else "broadcast"
        seconds = self.cluster.exchange(kind) if self.cluster.workers > 1 else 0.0
        self._network_free = max(self.clock.now, self._network_free) + seconds
        self.clock.at(self._network_free, self._arrive, decision, seconds)
        own = _by_worker(decision)
        for worker in self._listeners(own):
            seqs = own.get(worker.rank, ())
            self._tell(worker, Decided(decision.number, seqs, decision.token))

    def _listeners(self, own: Mapping[int, object]) -> list[Worker]:
        """For whom a round makes a difference now: its own, and who waits or would stop."""
        if self._cancels:
            return self._workers
        ranks = [*own, *(rank for rank in self._idle if rank not in own)]
        return [self._workers[rank] for rank in ranks]

    def _drop_known(self, decision: Dropped) -> None:
        self._parts.pop((decision.worker, decision.seq), None)
        self._tell(self._workers[decision.worker], decision)

    def _pass_known(self, decision: Passed) -> None:
        self._token = decision.token
        for worker in self._workers:
            self._tell(worker, decision)

    def _arrive(self, decision: Round, seconds: float) -> None:
        """The exchange is over: the update is there for every replica to take."""
        self._newest = decision.number
        self._last_exchange = seconds
        self._note(decision)
        for rank in list(self._idle):
            worker = self._workers[rank]
            if worker.machine.state is REPLAYING:
                self._replay(worker, Replay(decision.number))

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

    def _later(self, delay: float, action: Callable[..., None], *arguments: object) -> None:
        """Without a delay, right after the present event: the heap is for what takes time."""
        if delay > 0.0:
            self.clock.at(self.clock.now + delay, action, *arguments)
        else:
            self._soon.append((action, arguments))

    def _finish_instant(self) -> None:
        while self._soon:
            action, arguments = self._soon.popleft()
            action(*arguments)


_CARRY_OUT: dict[type[Action], Callable[[RoundsSimulation, Worker, Any], None]] = {
    Compute: RoundsSimulation._begin,
    Publish: RoundsSimulation._publish,
    Cancel: RoundsSimulation._cancel,
    Replay: RoundsSimulation._replay,
    Tell: RoundsSimulation._say,
    Wait: RoundsSimulation._wait,
}


def _by_worker(decision: Round) -> dict[int, tuple[int, ...]]:
    """Each contributor's own part in a round."""
    own: dict[int, tuple[int, ...]] = {}
    for rank, seq in zip(decision.workers, decision.seqs, strict=True):
        own[rank] = (*own.get(rank, ()), seq)
    return own
