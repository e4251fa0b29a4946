"""The simulator against theory, against hand-made schedules, and against itself.

Statistical tests have fixed seeds: they are exact repetitions and cannot flicker. What they compare
with is the simulation's own 99 % confidence interval.
"""

from __future__ import annotations

import pytest

from lightning_dsgd.errors import ConfigurationError, RunError
from lightning_dsgd.registry import algorithms
from lightning_dsgd.simulate import (
    Cluster,
    Link,
    Network,
    Quadratic,
    Result,
    simulate,
)
from lightning_dsgd.simulate.algorithms import make_rounds
from lightning_dsgd.simulate.clock import Clock
from lightning_dsgd.simulate.distributions import (
    ComputeTime,
    Constant,
    Exponential,
    Pareto,
    PerRank,
    ShiftedExponential,
)
from lightning_dsgd.simulate.rounds import Recorder, RoundsSimulation
from lightning_dsgd.simulate.runs import run
from lightning_dsgd.simulate.theory import Variant, time_per_update
from lightning_dsgd.trainer.stragglers import Stragglers
from lightning_dsgd.workers.messages import Contribution, Dropped, Held, Round
from lightning_dsgd.workers.policy import RoundsPolicy

VARIANTS: tuple[Variant, ...] = ("k_sync", "k_batch_sync", "k_async", "k_batch_async")
COSTLY = Network(Link(0.02), Link(0.01), Link(0.005))


def _near(result: Result, expected: float, rounding: float = 0.0) -> bool:
    return abs(result.seconds_per_update - expected) <= result.confidence + rounding


# ----------------------------------------------------------------------- against theory

TABLE = [
    (Exponential(1.0), 4, (0.635, 0.500, 0.635, 0.500)),
    (ShiftedExponential(1.0, 1.0), 4, (1.635, 1.63, 1.24, 1.00)),
    (ShiftedExponential(1.0, 1.0), 8, (3.72, 2.67, 3.73, 2.00)),
    (Pareto(2.5, 1.0), 4, (1.30, 1.30, 1.05, 0.833)),
]


@pytest.mark.parametrize(("model", "k", "row"), TABLE, ids=["exp", "shifted", "all", "pareto"])
@pytest.mark.parametrize("column", range(4), ids=VARIANTS)
def test_the_table_of_eight_workers(
    model: ComputeTime, k: int, row: tuple[float, ...], column: int
) -> None:
    variant = VARIANTS[column]
    result = simulate(variant, Cluster(8, model), k=k, updates=10_000, seed=11)
    exact = time_per_update(variant, model, k, 8)
    assert _near(result, row[column], rounding=0.005)
    assert exact is None or _near(result, exact)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("workers", "k"), [(2, 1), (16, 4), (16, 15), (64, 1), (64, 32), (64, 64)])
def test_the_exponential_closed_forms(variant: Variant, workers: int, k: int) -> None:
    cluster = Cluster(workers, Exponential(1.0))
    result = simulate(variant, cluster, k=k, updates=1500, seed=5, max_lag=10_000)
    expected = time_per_update(variant, Exponential(1.0), k, workers)
    assert expected is not None and _near(result, expected)


@pytest.mark.parametrize(
    "model", [ShiftedExponential(0.5, 0.1), Pareto(2.5, 1.0), Constant(0.3)], ids=str
)
@pytest.mark.parametrize(("workers", "k"), [(16, 12), (64, 60)])
def test_general_closed_forms(model: ComputeTime, workers: int, k: int) -> None:
    for variant in ("k_sync", "k_batch_async"):
        result = simulate(variant, Cluster(workers, model), k=k, updates=1500, seed=3)
        expected = time_per_update(variant, model, k, workers)
        assert expected is not None and _near(result, expected, rounding=1e-3), variant


def test_k_async_is_no_slower_than_k_sync_for_ageing_workers() -> None:
    cluster = Cluster(16, ShiftedExponential(1.0, 0.5))
    for k in (2, 8, 14):
        late_counts = simulate("k_async", cluster, k=k, updates=2000)
        late_lost = simulate("k_sync", cluster, k=k, updates=2000)
        assert late_counts.seconds_per_update < late_lost.seconds_per_update


# ------------------------------------------------------------------------- exact schedules


def test_synchronous_rounds_add_up_to_the_slowest_and_the_exchange() -> None:
    cluster = Cluster(
        4, PerRank(Constant(0.1), {3: 10.0}), network=COSTLY, control=0.001, overhead=0.003
    )
    result = simulate("k_sync", cluster, k=4, updates=50)
    assert result.seconds_per_update == pytest.approx(1.0 + 2 * 0.001 + 0.02 + 0.003)
    result = simulate("k_sync", cluster, k=3, updates=50)
    assert result.seconds_per_update == pytest.approx(0.1 + 2 * 0.001 + 0.02 + 0.003)
    assert result.wasted == pytest.approx(0.25)


@pytest.mark.parametrize("k", [1, 3, 4])
def test_sorting_whole_rounds_equals_the_event_heap(k: int) -> None:
    cluster = Cluster(
        4, PerRank(Constant(0.1), {1: 1.5, 2: 2.0, 3: 10.0}), COSTLY, control=0.001, overhead=0.003
    )
    algorithm = make_rounds("k_sync", 4, {"k": k})
    fast = run(algorithm, cluster, 200)
    policy, result = algorithm.make_policy(4), Result("k_sync", 4)
    heap = RoundsSimulation(algorithm, policy, cluster, result).run(200)
    assert fast.times == pytest.approx(heap.times)
    assert (fast.sizes, fast.staleness, fast.ks) == (heap.sizes, heap.staleness, heap.ks)
    # a segment's first gradient is finished, however late; and the last round's were under way
    assert fast.cancelled == pytest.approx(heap.cancelled, abs=12)


def test_one_contributor_costs_a_broadcast_and_one_worker_costs_nothing() -> None:
    network = Network(all_reduce=Link(9.0), broadcast=Link(0.5))
    alone = simulate("k_sync", Cluster(4, Constant(1.0), network), k=1, updates=10)
    assert alone.seconds_per_update == pytest.approx(1.5)
    single = simulate("k_sync", Cluster(1, Constant(1.0), network), k=1, updates=10)
    assert single.seconds_per_update == pytest.approx(1.0)


def test_bandwidth_counts_by_the_byte() -> None:
    cluster = Cluster(2, Constant(1.0), Network(Link(0.1, 1e6)), size=2e6)
    assert simulate("k_sync", cluster, k=2, updates=5).seconds_per_update == pytest.approx(3.1)


def test_a_late_worker_that_finishes_is_dropped_and_goes_on_from_the_newest() -> None:
    recorder = Recorder()
    cluster = Cluster(2, PerRank(Constant(1.0), {1: 2.4}))
    result = simulate("k_sync", cluster, k=1, updates=10, cancel_late=False, recorder=recorder)
    late = [event for _, event in recorder.events if _of(event, 1)]
    assert [event.version for event in late] == [0, 2, 4, 7]
    assert all(isinstance(d, (Round, Dropped)) for _, d in recorder.decisions)
    assert result.dropped == len(late) and result.times[:3] == [1.0, 2.0, 3.0]


def _of(event: object, worker: int) -> bool:
    return isinstance(event, Contribution) and event.worker == worker


def test_k_batch_sync_lets_a_fast_worker_give_twice() -> None:
    recorder = Recorder()
    cluster = Cluster(2, PerRank(Constant(1.0), {1: 2.5}))
    result = simulate("k_batch_sync", cluster, k=3, updates=4, recorder=recorder)
    rounds = [decision for _, decision in recorder.decisions if isinstance(decision, Round)]
    assert rounds[0].workers == (0, 0, 1)
    assert result.times == [2.5, 5.0, 7.5, 10.0]


def test_k_async_uses_late_work_and_its_worker_waits_for_it() -> None:
    recorder = Recorder()
    cluster = Cluster(2, PerRank(Constant(1.0), {1: 2.5}))
    result = simulate("k_async", cluster, k=1, updates=6, recorder=recorder)
    rounds = [decision for _, decision in recorder.decisions if isinstance(decision, Round)]
    assert [r.workers[0] for r in rounds[:6]] == [0, 0, 1, 0, 0, 1]
    assert rounds[2].staleness() == (2,)
    assert result.dropped == result.cancelled == 0


def test_a_replica_far_behind_holds_the_rounds() -> None:
    recorder = Recorder()
    cluster = Cluster(2, PerRank(Constant(1.0), {1: 50.5}))
    free = simulate("k_async", cluster, k=1, updates=60, max_lag=64)
    held = simulate("k_async", cluster, k=1, updates=60, max_lag=8, recorder=recorder)
    assert free.held == 0 and free.seconds < 60.0
    assert held.held > 0 and held.seconds >= 2 * 50.5
    assert held.max_staleness <= 8 + 1, "what waited in the held round goes first"
    said = [decision for _, decision in recorder.decisions if isinstance(decision, Held)]
    assert said and {decision.worker for decision in said} == {1}


def test_replicas_that_keep_up_are_never_held_for() -> None:
    for variant in VARIANTS:
        result = simulate(variant, Cluster(8, Exponential(1.0)), k=1, updates=500, seed=2)
        assert result.held == 0, variant


def test_cyclic_turns_go_round_and_accumulate_by_speed() -> None:
    recorder = Recorder()
    cluster = Cluster(3, PerRank(Constant(1.0), {2: 4.0}))
    simulate("cyclic_delay", cluster, updates=60, recorder=recorder)
    rounds = [decision for _, decision in recorder.decisions if isinstance(decision, Round)]
    assert [r.workers[0] for r in rounds] == [r % 3 for r in range(len(rounds))]
    settled = rounds[9:]
    slow = {r.batches[0] for r in settled if r.workers == (2,)}
    fast = {r.batches[0] for r in settled if r.workers == (0,)}
    assert slow == {1} and min(fast) >= 3


def test_cyclic_with_a_fixed_delay_publishes_exactly_that_many() -> None:
    cluster = Cluster(3, ShiftedExponential(0.5, 0.5), COSTLY, control=0.001, overhead=0.01)
    result = simulate("cyclic_delay", cluster, updates=200, delay=2)
    assert set(result.sizes) == {2} and result.mean_staleness <= 3.0


def test_the_pipeline_hides_the_exchange_behind_the_gradient() -> None:
    slow_network = Cluster(4, Constant(1.0), Network(Link(3.0)))
    assert simulate("dc_s3gd", slow_network, updates=20).seconds_per_update == pytest.approx(3.0)
    hidden = Cluster(4, PerRank(Constant(1.0), {0: 2.0}), Network(Link(0.9)), overhead=0.1)
    assert simulate("dc_s3gd", hidden, updates=20).seconds_per_update == pytest.approx(2.1)


def test_gossip_does_not_wait_for_a_slow_worker() -> None:
    even = simulate("ad_psgd", Cluster(8, Constant(1.0), COSTLY), updates=200)
    slow = Cluster(8, PerRank(Constant(1.0), {3: 100.0}), COSTLY)
    result = simulate("ad_psgd", slow, updates=200)
    assert even.seconds_per_update == pytest.approx(1.0, rel=0.02)
    assert result.gradients_per_second == pytest.approx(7.0, rel=0.03)


def test_gossip_waits_for_no_exchange_either() -> None:
    slow = Cluster(2, Constant(1.0), Network(pair=Link(5.0)))
    result = simulate("ad_psgd", slow, updates=100)
    assert result.gradients_per_second == pytest.approx(2.0, rel=0.03)
    averaged = simulate("ad_psgd", slow, updates=100)
    assert averaged.mean_staleness < 0.5, "five gradients to one averaging"


def test_the_stragglers_callback_slows_simulated_workers_alike() -> None:
    rules = Stragglers().slow(rank=1, factor=10, seconds=0.5).exponential(0.2, ranks=[0])
    cluster = Cluster(3, Constant(0.1), stragglers=rules)
    assert [cluster.times.for_rank(rank).mean for rank in range(3)] == pytest.approx(
        [0.3, 1.5, 0.1]
    )
    assert simulate("k_sync", cluster, k=1, updates=20).seconds_per_update == pytest.approx(0.1)
    paired = Cluster(4, Constant(0.1), stragglers=Stragglers().random_pair(1.0))
    assert paired.times.for_rank(2).mean == pytest.approx(0.1 + 2 / 4)
    assert paired.with_workers(8).times.for_rank(7).mean == pytest.approx(0.1 + 2 / 8)


# ------------------------------------------------------------------------------ determinism


@pytest.mark.parametrize("strategy", algorithms())
def test_a_seed_decides_everything(strategy: str) -> None:
    cluster = Cluster(4, Exponential(1.0), COSTLY, control=0.01)
    first, again, other = (
        simulate(strategy, cluster, updates=100, seed=seed).times for seed in (7, 7, 8)
    )
    assert first == again and first != other


def test_ties_happen_in_the_order_they_were_scheduled() -> None:
    clock, seen = Clock(), list[int]()
    for item in range(50):
        clock.at(1.0, seen.append, item)
    while clock.step():
        pass
    assert seen == list(range(50)) and clock.now == 1.0


# --------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("strategy", "k", "message"),
    [
        ("k_sink", 1, "unknown algorithm 'k_sink'; installed: ad_psgd, adasync"),
        ("k_sync", 5, "more than the 4 workers"),
        ("k_async", 0, "at least 1"),
        ("dc_s3gd", 2, "no argument 'k'"),
    ],
)
def test_the_impossible_is_refused(strategy: str, k: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        simulate(strategy, Cluster(4, Constant(1.0)), k=k)


def test_more_batches_than_workers_are_possible() -> None:
    result = simulate("k_batch_async", Cluster(2, Constant(1.0)), k=6, updates=20)
    assert result.seconds_per_update == pytest.approx(3.0)


def test_no_workers_is_no_cluster() -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        Cluster(0, Constant(1.0))


def test_pipeline_and_gossip_do_not_train() -> None:
    with pytest.raises(ConfigurationError, match="only its timing"):
        simulate("dc_s3gd", Cluster(2, Constant(1.0)), learner=Quadratic())


class _Deaf(RoundsPolicy):
    """Never makes a round."""

    def _accept(self, event: Contribution, now: float) -> str | None:
        return None

    def _complete(self, now: float) -> bool:
        return False

    def _form(self, now: float) -> list[Round]:
        return []

    def _awaited(self) -> tuple[int, ...]:
        return (3,)


def test_a_run_that_cannot_go_on_says_whom_it_waits_for() -> None:
    for cancel_late in (False, True):
        algorithm = make_rounds("k_sync", 2, {"cancel_late": cancel_late})
        with pytest.raises(RunError, match=r"stands still.*3"):
            run(algorithm, Cluster(2, Constant(1.0)), 1, policy=_Deaf(2))
