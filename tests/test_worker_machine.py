"""The worker machine: its rules one by one, and under every order in which inputs can come."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dsgd.simulate import Cluster, Exponential, Link, Network, Quadratic, simulate
from lightning_dsgd.simulate.algorithms import make_rounds
from lightning_dsgd.simulate.rounds import Recorder
from lightning_dsgd.workers.machine import (
    Action,
    Cancel,
    Compute,
    Decided,
    Ended,
    Finished,
    GaveUp,
    Input,
    Publish,
    Replay,
    Rule,
    State,
    Tell,
    Took,
    UnexpectedInput,
    Wait,
    WorkerMachine,
)
from lightning_dsgd.workers.messages import (
    Again,
    Bound,
    Contribution,
    Decision,
    Dropped,
    Passed,
    Round,
    Segment,
    Tick,
)
from lightning_dsgd_plugins.k_family import OnAndOnRule

ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "synchronous": ("backup_workers", {"backups": 0}),
    "backups": ("backup_workers", {"backups": 1}),
    "backups_cancel": ("backup_workers", {"backups": 1, "cancel_late": True}),
    "k_sync": ("k_sync", {"k": 1}),
    "k_batch_sync": ("k_batch_sync", {"k": 4}),
    "k_async": ("k_async", {"k": 2}),
    "k_async_bounded": ("k_async", {"k": 1, "max_staleness": 1}),
    "k_batch_async": ("k_batch_async", {"k": 5, "max_lag": 2}),
    "adasync": ("adasync", {"variant": "k_batch_sync", "interval": 0.01}),
    "cyclic": ("cyclic_delay", {}),
    "cyclic_bounded": ("cyclic_delay", {"max_accumulation": 2}),
    "cyclic_fixed": ("cyclic_delay", {"delay": 2}),
    "cyclic_skip": ("cyclic_delay", {"skip_after": 0.5, "max_lag": 4}),
    "cyclic_skip_bounded": ("cyclic_delay", {"skip_after": 0.5, "max_accumulation": 1}),
}


def machine(rule: Rule | None = None, **options: Any) -> WorkerMachine:
    """Worker 0 of 2, in an open segment of 100 updates, making its first gradient."""
    made = WorkerMachine(rule or Rule(), 0, 2, **options)
    assert made.handle(Segment(100)) == (Compute(0),)
    return made


# ------------------------------------------------------------------------------ rule by rule


def test_a_gradient_is_published_and_then_the_update_awaited() -> None:
    worker = machine()
    published, wait = worker.handle(Finished(0.5, 2.0))
    assert published == Publish(Contribution(0, 1, 0, 1, 2.0, (0.5,))) and wait == Wait()
    assert worker.handle(Decided(1, (1,))) == (Replay(1),)
    assert worker.handle(Took(1)) == (Compute(1),)


def test_a_late_worker_finishes_unless_its_rule_cancels() -> None:
    worker = machine()
    worker.handle(Finished())
    worker.handle(Decided(1, (1,)))
    worker.handle(Took(1))
    assert worker.handle(Decided(2)) == (), "it computes on"
    assert worker.handle(Finished())[1] == Replay(2)
    worker = machine(Rule(cancels=True))
    worker.handle(Finished())
    worker.handle(Decided(1, (1,)))
    worker.handle(Took(1))
    assert worker.handle(Decided(2)) == (Cancel(),)
    assert worker.handle(Decided(3)) == (), "once is enough"
    assert worker.handle(GaveUp(0.1)) == (Replay(3),)


def test_what_was_done_before_the_cancelling_arrived_is_published() -> None:
    worker = machine(Rule(cancels=True))
    worker.handle(Finished())
    worker.handle(Decided(1, (1,)))
    worker.handle(Took(1))
    worker.handle(Decided(2))
    assert [type(action) for action in worker.handle(Finished())] == [Publish, Replay]


def test_a_segments_first_gradient_is_made_however_late() -> None:
    worker = WorkerMachine(Rule(cancels=True), 0, 2)
    worker.handle(Decided(1))
    worker.handle(Decided(2))
    assert worker.handle(Segment(5)) == (Compute(0),)
    assert worker.handle(Decided(3)) == (), "and never cancelled"
    assert worker.handle(Finished())[1] == Replay(3)


def test_several_updates_may_be_taken_at_once_or_one_by_one() -> None:
    worker = machine()
    worker.handle(Decided(1))
    worker.handle(Decided(2))
    worker.handle(Finished())
    one_by_one = copy.deepcopy(worker)
    assert worker.handle(Took(2)) == (Compute(2),)
    assert one_by_one.handle(Took(1)) == (Replay(2),)
    assert one_by_one.handle(Took(2)) == (Compute(2),)


def test_a_worker_that_gives_nothing_tells_how_far_it_is() -> None:
    worker = machine(Rule(cancels=True), max_lag=16)
    worker.handle(Finished())
    told = []
    for number in range(1, 7):
        worker.handle(Decided(number, (1,) if number == 1 else ()))
        if worker.state is State.CANCELLING:
            worker.handle(GaveUp(0.25))
        told += [a.applied for a in worker.handle(Took(number)) if isinstance(a, Tell)]
    assert [(applied.version, applied.cancelled) for applied in told] == [
        (2, (0.25,)), (4, (0.25, 0.25)), (6, (0.25, 0.25)),
    ]  # fmt: skip


def test_a_segment_may_bring_another_bound() -> None:
    worker = WorkerMachine(OnAndOnRule(enough=9), 0, 2, max_lag=64)
    worker.handle(Segment(9, Bound(8, 2)))
    assert [type(action) for action in worker.handle(Finished())] == [Publish, Compute]
    assert [type(action) for action in worker.handle(Finished())] == [Publish, Wait]
    assert [type(action) for action in worker.handle(Decided(1, (1,)))] == [Replay]
    assert [type(action) for action in worker.handle(Took(1))] == [Tell, Compute]


def test_the_segments_end_stops_it_and_is_told() -> None:
    worker = WorkerMachine(Rule(), 0, 2)
    worker.handle(Segment(1))
    worker.handle(Finished())
    worker.handle(Decided(1, (1,)))
    assert [type(action) for action in worker.handle(Took(1))] == [Tell, Wait]
    assert worker.state is State.BETWEEN
    assert worker.handle(Segment(2)) == (Compute(1),)


def test_a_segment_may_end_early_whatever_the_worker_does() -> None:
    for inputs in ([], [Finished()], [Finished(), Decided(1, (1,))]):
        worker = machine()
        for event in inputs:
            worker.handle(event)
        worker.handle(Ended(worker.decided))
        assert worker.state is State.BETWEEN
        assert worker.handle(Segment(7)) == (Compute(worker.decided),)


def test_losses_of_one_contribution_are_averaged() -> None:
    worker = make_rounds("cyclic_delay", 2, {"delay": 2}).make_machine(
        0, 2, make_rounds("cyclic_delay", 2, {}).make_policy(2)
    )
    worker.handle(Segment(9))
    assert worker.handle(Finished(0.1, 1.0)) == (Compute(0),)
    published = worker.handle(Finished(0.2, 3.0))[0]
    assert published == Publish(Contribution(0, 1, 0, 2, 2.0, (0.1, 0.2)))


def test_the_token_finds_a_worker_that_waits_for_it() -> None:
    rule = make_rounds("cyclic_delay", 2, {"max_accumulation": 1}).make_rule(2)
    worker = WorkerMachine(rule, 1, 2, token=0)
    worker.handle(Segment(50))
    assert worker.handle(Finished()) == (Wait(),)
    actions = worker.handle(Passed(0, 1, "slow"))
    assert [type(action) for action in actions] == [Publish, Compute]


def test_a_wrong_input_is_refused_by_name_and_changes_nothing() -> None:
    worker = machine()
    with pytest.raises(UnexpectedInput, match=r"worker 0 is computing at version 0.*Took"):
        worker.handle(Took(1))
    with pytest.raises(UnexpectedInput, match="cannot come here"):
        worker.handle(Dropped(0, 7, "never announced"))
    assert worker.handle(Finished()) == (Publish(Contribution(0, 1, 0, seconds=(0.0,))), Wait())


def test_what_is_not_finite_is_announced_at_once_and_nothing_is_added_to_it() -> None:
    algorithm = make_rounds("cyclic_delay", 2, {"delay": 3})
    worker = algorithm.make_machine(1, 2, algorithm.make_policy(2))
    worker.handle(Segment(9))
    worker.handle(Finished(0.1, 1.0))
    published, compute = worker.handle(Finished(0.2, 3.0, finite=False))
    assert published == Publish(Contribution(1, 1, 0, 2, 2.0, (0.1, 0.2), finite=False))
    assert compute == Compute(0) and worker.batches == 0
    assert worker.handle(Finished(0.1, 1.0)) == (Compute(0),), "what follows is clean again"


def test_a_worker_makes_another_gradient_of_a_version_when_told_to() -> None:
    worker = machine()
    worker.handle(Finished(finite=False))
    assert worker.handle(Dropped(0, 1, "it is not finite")) == (Wait(),)
    assert worker.handle(Again(0)) == (Compute(0),)
    assert worker.handle(Again(0)) == (), "one is enough"


# --------------------------------------------------------------------- any input at any time

small = st.integers(0, 4)
anything: st.SearchStrategy[Input] = st.one_of(
    st.builds(Segment, small),
    st.builds(Finished, finite=st.booleans()),
    st.builds(GaveUp),
    st.builds(Decided, small, st.lists(small, max_size=2).map(tuple), st.none() | small),
    st.builds(Dropped, st.just(0), small, st.just("why")),
    st.builds(Passed, small, small, st.just("why")),
    st.builds(Again, st.just(0)),
    st.builds(Took, small),
    st.builds(Ended, small),
)


def facts(worker: WorkerMachine) -> list[Any]:
    return [copy.copy(getattr(worker, name)) for name in WorkerMachine.__slots__]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(ALGORITHMS)), st.lists(anything, max_size=30))
def test_whatever_comes_is_accepted_or_refused_without_a_trace(
    name: str, inputs: list[Input]
) -> None:
    strategy, arguments = ALGORITHMS[name]
    algorithm = make_rounds(strategy, 3, arguments)
    worker = algorithm.make_machine(0, 3, algorithm.make_policy(3))
    for event in inputs:
        before = facts(worker)
        try:
            worker.handle(event)
        except UnexpectedInput:
            assert facts(worker) == before
        assert worker.version <= worker.decided


# ------------------------------------------------------- two halves over a link, in any order


class Run:
    """A policy and its workers, joined by links that Hypothesis moves along."""

    def __init__(self, name: str, workers: int) -> None:
        strategy, arguments = ALGORITHMS[name]
        algorithm = make_rounds(strategy, workers, arguments)
        self.policy = algorithm.make_policy(workers)
        self.machines = [algorithm.make_machine(r, workers, self.policy) for r in range(workers)]
        self.up: list[deque[Any]] = [deque() for _ in range(workers)]
        self.down: list[deque[Decision]] = [deque() for _ in range(workers)]
        self.now = 0.0
        self.busy: list[Action | None] = [None] * workers
        self.published: set[tuple[int, int]] = set()
        self.used: set[tuple[int, int]] = set()
        self.spoilt: set[tuple[int, int]] = set()
        self.spoils_left = 0
        """Gradients that may yet turn out not finite: not all for ever."""

    # what can happen next, and does

    def open(self, length: int) -> None:
        last = self.policy.version + length
        self._decide(self.policy.handle(Segment(last), self.now))
        for rank in range(len(self.machines)):
            self._tell(rank, Segment(last))

    def moves(self) -> list[tuple[Any, ...]]:
        ranks = range(len(self.machines))
        moves: list[tuple[Any, ...]] = [(self._arrive, r) for r in ranks if self.up[r]]
        moves += [(self._hear, r) for r in ranks if self.down[r]]
        moves += [(self._finish, r) for r in ranks if isinstance(self.busy[r], Compute)]
        if self.spoils_left:
            moves += [
                (self._spoil, r) for r in ranks if isinstance(self.busy[r], (Compute, Cancel))
            ]
        moves += [(self._give_up, r) for r in ranks if isinstance(self.busy[r], Cancel)]
        moves += [(self._finish, r) for r in ranks if isinstance(self.busy[r], Cancel)]
        moves += [(self._take, r) for r in ranks if isinstance(self.busy[r], Replay)]
        if self.policy.deadline() is not None:
            moves.append((self._tick,))
        return moves

    def done(self) -> bool:
        return all(m.state is State.BETWEEN for m in self.machines) and not any(self.down)

    def _arrive(self, rank: int) -> None:
        self._decide(self.policy.handle(self.up[rank].popleft(), self.now))

    def _tick(self) -> None:
        self.now += 0.3
        self._decide(self.policy.handle(Tick(), self.now))

    def _finish(self, rank: int) -> None:
        self.now += 0.01
        self.busy[rank] = None
        self._tell(rank, Finished(0.01, 1.0))

    def _spoil(self, rank: int) -> None:
        self.spoils_left -= 1
        self.busy[rank] = None
        self._tell(rank, Finished(0.01, 1.0, finite=False))

    def _give_up(self, rank: int) -> None:
        self.busy[rank] = None
        self._tell(rank, GaveUp(0.01))

    def _take(self, rank: int) -> None:
        self.busy[rank] = None
        self._tell(rank, Took(self.machines[rank].version + 1))

    def _hear(self, rank: int) -> None:
        decision = self.down[rank].popleft()
        if isinstance(decision, Round):
            pairs = zip(decision.workers, decision.seqs, strict=True)
            seqs = tuple(seq for worker, seq in pairs if worker == rank)
            self._tell(rank, Decided(decision.number, seqs, decision.token))
        else:
            assert isinstance(decision, (Dropped, Passed, Again))
            self._tell(rank, decision)

    def _decide(self, decisions: Any) -> None:
        for decision in decisions:
            if isinstance(decision, Round):
                parts = list(zip(decision.workers, decision.seqs, strict=True))
                assert len(set(parts)) == len(parts) and self.used.isdisjoint(parts)
                assert self.published.issuperset(parts) and self.spoilt.isdisjoint(parts)
                self.used.update(parts)
            if isinstance(decision, (Round, Passed)):
                for link in self.down:
                    link.append(decision)
            elif isinstance(decision, (Dropped, Again)):
                self.down[decision.worker].append(decision)

    def _tell(self, rank: int, event: Input) -> None:
        for action in self.machines[rank].handle(event):
            if isinstance(action, Publish):
                part = (rank, action.contribution.seq)
                assert part not in self.published, "no gradient is published twice"
                self.published.add(part)
                if not action.contribution.finite:
                    self.spoilt.add(part)
                self.up[rank].append(action.contribution)
            elif isinstance(action, Tell):
                self.up[rank].append(action.applied)
            elif isinstance(action, Cancel):
                assert isinstance(self.busy[rank], Compute)
                self.busy[rank] = action
            elif isinstance(action, (Compute, Replay)):
                assert self.busy[rank] is None, "replay and compute are never at once"
                self.busy[rank] = action


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), workers=st.integers(2, 4), lengths=st.lists(st.integers(0, 9), max_size=3))
def test_every_order_of_events_ends_the_segment_on_every_worker(
    name: str, data: st.DataObject, workers: int, lengths: list[int]
) -> None:
    run = Run(name, workers)
    for length in lengths:
        run.open(length)
        run.spoils_left = data.draw(st.integers(0, 30))
        # a few choices by Hypothesis, then round and round: a worker may be slow, not dead
        choices = data.draw(st.lists(st.integers(0, 10**6), max_size=60))
        for step in range(20_000):
            if run.done():
                break
            moves = run.moves()
            assert moves, f"dead end: {[(m.state, m.version) for m in run.machines]}"
            choice = choices[step] if step < len(choices) else step
            move, *arguments = moves[choice % len(moves)]
            move(*arguments)
        assert run.done()
        assert {m.version for m in run.machines} == {run.policy.version} == {run.policy.last}


# ------------------------------------------------------------------------- recorded inputs


@pytest.mark.parametrize("name", ALGORITHMS)
def test_simulated_workers_do_the_same_again(name: str) -> None:
    """A machine that is fed what a simulated one was fed does what that one did."""
    strategy, arguments = ALGORITHMS[name]
    recorder = Recorder()
    cluster = Cluster(4, Exponential(1.0), Network(Link(0.1), Link(0.05)), control=0.01)
    simulate(strategy, cluster, updates=80, recorder=recorder, learner=Quadratic(), **arguments)
    algorithm = make_rounds(strategy, 4, arguments)
    policy = algorithm.make_policy(4)
    for rank in range(4):
        fresh = algorithm.make_machine(rank, 4, policy)
        inputs = [event for owner, event in recorder.inputs if owner == rank]
        again = [action for event in inputs for action in fresh.handle(event)]
        assert again == [action for owner, action in recorder.actions if owner == rank]
        assert len(again) > 50
