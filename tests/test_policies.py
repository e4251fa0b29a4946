"""The policies alone: any order of events, no processes, no clock."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dsgd.workers.messages import (
    Again,
    Applied,
    Bound,
    Closed,
    Contribution,
    Dropped,
    Held,
    Joined,
    KChanged,
    Left,
    Passed,
    Round,
    Said,
    Segment,
    Tick,
)
from lightning_dsgd.workers.policy import RoundsPolicy, round_of
from lightning_dsgd_plugins.adasync import AdaSyncPolicy, synchrony
from lightning_dsgd_plugins.cyclic_delay import CyclicPolicy
from lightning_dsgd_plugins.k_family import FirstKPolicy

FAR = 10**9
COUNTED = st.sampled_from(["workers", "batches"])


class Crowd:
    """Workers that behave as real ones do, driven in any order by Hypothesis.

    A worker computes at the version it has, announces, and advances to the newest when told.
    """

    def __init__(self, policy: RoundsPolicy, workers: int, *, several: bool) -> None:
        self.policy, self.several = policy, several
        self.versions = dict.fromkeys(range(workers), policy.version)
        self.seqs: Counter[int] = Counter()
        self.open: set[tuple[int, int]] = set()
        self.events: list[tuple[Any, float]] = []
        self.decisions: list[Any] = []
        self.now = 0.0
        self.feed(Segment(FAR))

    def feed(self, event: Any) -> None:
        self.now += 0.25
        self.events.append((event, self.now))
        for decision in self.policy.handle(event, self.now):
            self.decisions.append(decision)
            if isinstance(decision, Round):
                self.open -= set(zip(decision.workers, decision.seqs, strict=True))
            elif isinstance(decision, Dropped):
                self.open.discard((decision.worker, decision.seq))

    def waits(self, worker: int) -> bool:
        return not self.several and any(owner == worker for owner, _ in self.open)

    def contribute(self, worker: int, loss: float = 1.0) -> None:
        if worker not in self.versions or self.waits(worker):
            return
        self.seqs[worker] += 1
        self.open.add((worker, self.seqs[worker]))
        self.feed(Contribution(worker, self.seqs[worker], self.versions[worker], loss=loss))

    def advance(self, worker: int) -> None:
        if worker in self.versions:
            self.versions[worker] = self.policy.version
            self.feed(Applied(worker, self.policy.version))

    def leave(self, worker: int) -> None:
        if len(self.versions) > 1 and self.versions.pop(worker, None) is not None:
            self.open = {part for part in self.open if part[0] != worker}
            self.feed(Left(worker))

    def rejoin(self, worker: int) -> None:
        if worker not in self.versions:
            self.versions[worker] = self.policy.version
            self.feed(Joined(worker))

    @property
    def rounds(self) -> list[Round]:
        return [d for d in self.decisions if isinstance(d, Round)]


WORKERS = 5
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["contribute"] * 6 + ["advance"] * 4 + ["leave", "rejoin"]),
        st.integers(0, WORKERS - 1),
        st.floats(0.01, 4.0),
    ),
    max_size=150,
)


def play(crowd: Crowd, moves: list[tuple[str, int, float]]) -> None:
    for move, worker, loss in moves:
        if move == "contribute":
            crowd.contribute(worker, loss)
        else:
            getattr(crowd, move)(worker)


def check_rounds(crowd: Crowd, bound: int | None) -> None:
    used = [part for r in crowd.rounds for part in zip(r.workers, r.seqs, strict=True)]
    assert len(used) == len(set(used)), "a contribution counted twice"
    assert [r.number for r in crowd.rounds] == list(range(1, len(crowd.rounds) + 1))
    for round_ in crowd.rounds:
        assert all(age >= 0 for age in round_.staleness()), "a gradient from the future"
        if bound is not None:
            assert max(round_.staleness()) <= bound
    dropped = {(d.worker, d.seq) for d in crowd.decisions if isinstance(d, Dropped)}
    assert not dropped & set(used)
    assert all(d.reason for d in crowd.decisions if not isinstance(d, Held))


def finish(crowd: Crowd) -> int:
    """Everybody present advances and contributes until a round comes: it always must."""
    before = len(crowd.rounds)
    for _ in range(3 * WORKERS):
        for worker in list(crowd.versions):
            crowd.advance(worker)
            crowd.contribute(worker)
    return len(crowd.rounds) - before


@settings(max_examples=150, deadline=None)
@given(MOVES, st.integers(1, WORKERS), COUNTED, st.sampled_from([0, 2, None]))
def test_first_k(moves: Any, k: int, counted: Any, bound: int | None) -> None:
    def policy() -> FirstKPolicy:
        return FirstKPolicy(WORKERS, k, counted=counted, max_staleness=bound)

    several = counted == "batches"
    crowd = Crowd(policy(), WORKERS, several=several)
    play(crowd, moves)
    check_rounds(crowd, bound)
    for round_ in crowd.rounds:
        assert len(round_.workers) == round_.k <= k
        if counted == "workers":
            assert len(set(round_.workers)) == len(round_.workers)
        else:
            assert round_.k == k
    assert finish(crowd) > 0, "deadlock"
    again = policy()
    replayed = [decision for event, now in crowd.events for decision in again.handle(event, now)]
    assert replayed == crowd.decisions


@settings(max_examples=100, deadline=None)
@given(MOVES, st.integers(1, WORKERS), COUNTED, st.sampled_from([0, 3, None]))
def test_adasync(moves: Any, k0: int, counted: Any, bound: int | None) -> None:
    def policy() -> AdaSyncPolicy:
        return AdaSyncPolicy(WORKERS, k0, interval=1.0, counted=counted, max_staleness=bound)

    crowd = Crowd(policy(), WORKERS, several=counted == "batches")
    play(crowd, moves)
    check_rounds(crowd, bound)
    k = k0
    for decision in crowd.decisions:
        if isinstance(decision, Round):
            assert len(decision.workers) == decision.k <= k
        elif isinstance(decision, KChanged):
            assert decision.k != k and 1 <= decision.k <= WORKERS
            k = decision.k
    assert finish(crowd) > 0, "deadlock"
    again = policy()
    assert [d for e, now in crowd.events for d in again.handle(e, now)] == crowd.decisions


@settings(max_examples=100, deadline=None)
@given(MOVES, st.sampled_from([None, 0.6]))
def test_cyclic(moves: Any, skip_after: float | None) -> None:
    crowd = Crowd(CyclicPolicy(WORKERS, skip_after=skip_after), WORKERS, several=False)
    play(crowd, moves)
    check_rounds(crowd, None)
    present, token = set(range(WORKERS)), 0
    moments = iter(crowd.decisions)
    membership = [e for e, _ in crowd.events if isinstance(e, (Left, Joined))]
    if not membership:
        for decision in moments:
            if isinstance(decision, Round):
                assert decision.workers == (token,)
                token = (token + 1) % WORKERS
                assert decision.token == token
            elif isinstance(decision, Passed):
                assert skip_after is not None and decision.worker == token
                token = (token + 1) % WORKERS
    for round_ in crowd.rounds:
        assert round_.token in present
    assert finish(crowd) > 0, "deadlock"


def test_every_gradient_of_a_cycle_is_published_once() -> None:
    crowd = Crowd(CyclicPolicy(4), 4, several=False)
    for worker in (2, 0, 3, 1):
        crowd.contribute(worker)
    assert [r.workers[0] for r in crowd.rounds] == [0, 1, 2, 3]


def test_nobody_is_skipped_in_a_segments_last_cycle() -> None:
    policy = CyclicPolicy(3, skip_after=0.1)
    policy.handle(Segment(6), 0.0)
    for number in range(3):
        policy.handle(Contribution(number, 1, 0), 0.01)
    assert policy.version == 3 and policy.deadline() is None
    assert not policy.handle(Tick(), 99.0)


def test_the_token_passes_a_slow_holder() -> None:
    policy = CyclicPolicy(3, skip_after=0.5)
    policy.handle(Segment(100), 1.0)
    assert policy.deadline() == 1.5
    policy.handle(Contribution(1, 1, 0), 1.2)
    passed, round_ = policy.handle(Tick(), 1.5)
    assert isinstance(passed, Passed) and passed.worker == 0
    assert isinstance(round_, Round) and round_.workers == (1,)


def test_rounds_stop_at_the_segments_end() -> None:
    policy = FirstKPolicy(2, 1, max_staleness=None)
    policy.handle(Segment(1), 0.0)
    assert len(policy.handle(Contribution(0, 1, 0), 0.0)) == 1
    assert not policy.handle(Contribution(1, 1, 0), 0.0)
    assert [type(d) for d in policy.handle(Segment(2), 0.0)] == [Round]


def test_a_segment_that_ends_here_is_the_last_word() -> None:
    """Late gradients may have made rounds beyond the version at which training was stopped."""
    policy = FirstKPolicy(2, 1, max_staleness=None)
    policy.handle(Segment(FAR), 0.0)
    for worker in (0, 1):
        policy.handle(Contribution(worker, 1, 0), 0.0)
    assert policy.handle(Segment(1), 0.0) == [Closed(0), Closed(1)] and policy.version == 2
    assert not policy.handle(Contribution(0, 2, 1), 0.0)


def test_a_laggard_holds_the_round_and_is_named_once() -> None:
    policy = FirstKPolicy(2, 1, max_staleness=None, max_lag=3)
    policy.handle(Segment(FAR), 0.0)
    decisions = [d for n in range(6) for d in policy.handle(Contribution(0, n + 1, min(n, 3)), 0.0)]
    held = [d for d in decisions if isinstance(d, Held)]
    assert [d.worker for d in held] == [1] and "rank 1" in held[0].reason
    assert policy.version == 3
    after = policy.handle(Applied(1, 3), 0.0)
    assert [d.number for d in after if isinstance(d, Round)] == [4, 5, 6]


def test_a_segment_may_bring_another_bound() -> None:
    """Parameters that are freed make gradients larger, so that fewer may wait."""
    policy = FirstKPolicy(2, 1, max_staleness=None, max_lag=64)
    policy.handle(Segment(FAR, Bound(2, 2, "max_lag_mb")), 0.0)
    decisions = [d for n in range(4) for d in policy.handle(Contribution(0, n + 1, min(n, 2)), 0.0)]
    (held,) = (d for d in decisions if isinstance(d, Held))
    assert held.number == 3 and "2 updates behind (max_lag_mb)" in held.reason
    assert not policy.handle(Segment(FAR), 0.0) and policy.max_lag == 2


def test_reasons_say_who_is_missing() -> None:
    policy = FirstKPolicy(4, 3)
    policy.handle(Segment(FAR), 0.0)
    policy.handle(Contribution(1, 1, 0), 0.0)
    assert policy.missing() == (0, 2, 3)
    policy.handle(Contribution(0, 1, 0), 0.0)
    (round_,) = policy.handle(Contribution(3, 1, 0), 0.0)
    assert round_.reason == "3 of 4 workers arrived"
    (dropped,) = policy.handle(Contribution(2, 1, 0), 0.0)
    assert dropped == Dropped(2, 1, "computed 1 update ago, at most 0 allowed")


@pytest.mark.parametrize("k0", [1, 2, 4])
def test_adasync_rules(k0: int) -> None:
    workers = 8
    assert synchrony(4.0, k0, workers, counts_batches=True) == pytest.approx(2 * k0)
    k = synchrony(3.0, k0, workers, counts_batches=False)
    c = k0 * k0 * 3.0 / (workers - k0)
    assert k * k + c * k - c * workers == pytest.approx(0.0, abs=1e-9)
    assert synchrony(1.0, k0, workers, counts_batches=False) == pytest.approx(k0)
    for ratio in (1e9, 1e20, 1e300, float("inf")):
        assert synchrony(ratio, k0, workers, counts_batches=False) == pytest.approx(workers)


def test_adasync_ignores_losses_that_are_no_numbers() -> None:
    policy = AdaSyncPolicy(2, 1, interval=0.1)
    policy.handle(Segment(FAR), 0.0)
    for number, loss in enumerate((math.nan, math.inf, 0.0, -1.0)):
        policy.handle(Contribution(0, number + 1, number, loss=loss), number + 1.0)
    assert policy.version == 4 and policy.k == 1


@pytest.mark.parametrize("counted", ["workers", "batches"])
def test_adasync_stays_synchronous_while_the_loss_vanishes(counted: Any) -> None:
    policy = AdaSyncPolicy(4, 1, interval=0.5, counted=counted, max_staleness=None)
    policy.handle(Segment(FAR), 0.0)
    ks = []
    for number in range(8_000):
        part = Contribution(number % 4, number + 1, policy.version, loss=float(number == 0))
        policy.handle(part, float(number))
        ks.append(policy.k)
    assert set(ks[400:]) == {4}


def test_a_rounds_loss_is_the_mean_of_its_mini_batches() -> None:
    parts = [Contribution(0, 1, 0, 3, 1.0), Contribution(1, 1, 0, 1, 5.0), Contribution(2, 1, 0)]
    assert round_of(1, parts, k=3, reason="all").loss == (3 * 1.0 + 5.0) / 4
    assert round_of(1, parts[2:], k=1, reason="one").loss is None


def test_one_lucky_mini_batch_does_not_set_adasyncs_k() -> None:
    """The first mini-batch's loss is a hundredth of the others': K must rise all the same."""
    policy = AdaSyncPolicy(4, 1, interval=0.5, max_staleness=None)
    policy.handle(Segment(FAR), 0.0)
    for number in range(40):
        loss = 0.01 if number == 0 else 1.0 if number < 4 else 0.01
        policy.handle(
            Contribution(number % 4, number + 1, policy.version, loss=loss), float(number)
        )
    assert policy.first_loss == pytest.approx((0.01 + 3) / 4)
    assert policy.k > 1


def test_adasync_goes_on_measuring_after_a_checkpoint() -> None:
    def give(policy: AdaSyncPolicy, losses: tuple[float, ...]) -> None:
        for loss in losses:
            seq = policy.version + 1
            policy.handle(Contribution(0, seq, policy.version, loss=loss), 0.0)

    whole, half = (AdaSyncPolicy(4, 1, interval=9.0) for _ in range(2))
    for policy in (whole, half):
        policy.handle(Segment(FAR), 0.0)
        give(policy, (1.0, 2.0))
    resumed = AdaSyncPolicy(4, 1, interval=9.0, version=2)
    resumed.restore(half.state())
    resumed.handle(Segment(FAR), 0.0)
    for policy in (whole, resumed):
        give(policy, (3.0, 6.0, 9.0))
    assert whole.state() == resumed.state() and whole.first_loss == 3.0


# ------------------------------------------------------------------------- what is not finite


def bad(worker: int, seq: int, version: int) -> Contribution:
    return Contribution(worker, seq, version, finite=False)


def kinds(decisions: Any) -> list[str]:
    return [type(decision).__name__ for decision in decisions]


def test_a_gradient_that_is_not_finite_is_dropped_and_said_once_per_rank() -> None:
    policy = FirstKPolicy(3, 1, counted="batches", max_staleness=None)
    policy.handle(Segment(FAR), 0.0)
    dropped, said = policy.handle(bad(1, 1, 0), 0.0)
    assert dropped == Dropped(1, 1, "it is not finite")
    assert isinstance(said, Said) and "rank 1" in said.reason and "version 0" in said.reason
    assert kinds(policy.handle(bad(1, 2, 0), 0.0)) == ["Dropped"]


def test_a_round_goes_on_without_who_can_give_nothing_finite() -> None:
    policy = FirstKPolicy(4, 3)
    policy.handle(Segment(FAR), 0.0)
    policy.handle(bad(0, 1, 0), 0.0)
    policy.handle(Contribution(1, 1, 0), 0.0)
    policy.handle(bad(2, 1, 0), 0.0)
    (round_,) = policy.handle(Contribution(3, 1, 0), 0.0)
    assert round_.workers == (1, 3) and round_.k == 2
    for worker in (0, 1):
        assert not policy.handle(Contribution(worker, 2, 1), 0.0), "of the next one all are part"


def test_the_last_one_that_is_refused_completes_the_round_of_the_others() -> None:
    policy = FirstKPolicy(2, 2)
    policy.handle(Segment(FAR), 0.0)
    policy.handle(Contribution(0, 1, 0), 0.0)
    assert kinds(policy.handle(bad(1, 1, 0), 0.0)) == ["Dropped", "Said", "Round"]


def test_all_try_again_where_nobody_has_anything_finite() -> None:
    policy = FirstKPolicy(2, 2)
    policy.handle(Segment(FAR), 0.0)
    policy.handle(bad(0, 1, 0), 0.0)
    *_, said, first, second = policy.handle(bad(1, 1, 0), 0.0)
    assert isinstance(said, Said) and "stands still" in said.reason
    assert (first, second) == (Again(0), Again(1))
    policy.handle(bad(0, 2, 0), 0.0)
    assert kinds(policy.handle(bad(1, 2, 0), 0.0)) == ["Dropped", "Again", "Again"]
    assert not policy.handle(Contribution(0, 3, 0), 0.0)
    assert kinds(policy.handle(Contribution(1, 3, 0), 0.0)) == ["Round"]


def test_nobody_waits_for_one_more_try_of_a_worker_that_has_left() -> None:
    policy = FirstKPolicy(2, 2)
    policy.handle(Segment(FAR), 0.0)
    policy.handle(bad(0, 1, 0), 0.0)
    assert kinds(policy.handle(Left(1), 0.0)) == ["Said", "Again"]
