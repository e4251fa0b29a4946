"""What the ranks computed, against independent re-computations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dsgd.control.trace import read_trace
from lightning_dsgd.exchange.damping import damping_factor
from lightning_dsgd.simulate.replay import recorded_halves
from lightning_dsgd.workers.messages import Round
from tests.launching import KINDS, launch, results
from tests.ranks.numerics import FAMILIES
from tests.ranks.toy import LR, MOMENTUM, fine_tune

REPEATED = {"launched": KINDS}
SCENARIOS = [
    *(f"numerics.{name}" for name in FAMILIES),
    "numerics.distance_damping",
    "numerics.backups_0",
    "numerics.backups_1_scheduled",
    "numerics.fine_tuning",
    "numerics.fine_tuning_in_little_memory",
    "numerics.unusual_memory",
    "numerics.steps_with_a_backward",
]


@pytest.fixture
def trained(launched: Path) -> Path:
    return launched / "numerics"


@pytest.fixture(scope="session")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lightning's own DDP on the same problem; it would not leave a process as it was."""
    out = tmp_path_factory.mktemp("ddp")
    launch("python", ["numerics.lightning_ddp", "numerics.lightning_ddp_unusual"], out)
    return out / "numerics"


def gradient_of(round_: Round, ranks: list[Any], *, mean: bool, weight: Any) -> np.ndarray:
    """The update's gradient, from what each rank says it published."""
    parts = zip(round_.workers, round_.seqs, round_.staleness(), strict=True)
    total = sum(weight(age) * ranks[worker]["published"][seq] for worker, seq, age in parts)
    return total / sum(round_.batches) if mean else total


def replayed(ranks: list[Any], *, mean: bool = True, weight: Any = lambda age: 1.0) -> np.ndarray:
    """SGD with momentum over the recorded contributions, in NumPy."""
    parameters = ranks[0]["start"].copy()
    momentum = np.zeros_like(parameters)
    for round_ in ranks[0]["rounds"]:
        gradient = gradient_of(round_, ranks, mean=mean, weight=weight)
        momentum = MOMENTUM * momentum + gradient
        parameters -= LR * momentum
    return parameters


@pytest.mark.parametrize("name", FAMILIES)
def test_replicas_are_bit_identical_at_every_version(trained: Path, name: str) -> None:
    ranks = results(trained, name)
    assert [rank["steps"] for rank in ranks] == [40] * 4
    for rank in ranks[1:]:
        assert rank["digests"] == ranks[0]["digests"]
        assert rank["rounds"] == ranks[0]["rounds"]
    assert len(set(ranks[0]["digests"].values())) == 40


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_equal_a_numpy_recomputation_from_contributions(trained: Path, name: str) -> None:
    ranks = results(trained, name)
    arguments = FAMILIES[name][1]
    damped = arguments.get("damping") == "inverse"
    expected = replayed(
        ranks,
        mean=arguments.get("combine") != "sum",
        weight=(lambda age: 1 / (1 + age)) if damped else (lambda age: 1.0),
    )
    np.testing.assert_allclose(ranks[0]["end"], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_events_give_the_same_decisions_again(trained: Path, name: str) -> None:
    trace = read_trace(trained / f"trace-{name}")
    _, policy = recorded_halves(trace)
    again = [decision for t, event in trace.events for decision in policy.handle(event, t)]
    assert again == [decision for _, decision in trace.decisions]


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_inputs_give_every_worker_the_same_actions_again(trained: Path, name: str) -> None:
    """The machine is made here as the simulator makes it, and fed what Lightning's hooks fed it."""
    algorithm, policy = recorded_halves(read_trace(trained / f"trace-{name}"))
    for rank, result in enumerate(results(trained, name)):
        machine = algorithm.make_machine(rank, 4, policy)
        again = [action for event in result["inputs"] for action in machine.handle(event)]
        assert again == result["actions"] and len(again) > 40


@pytest.mark.parametrize("name", FAMILIES)
def test_every_contribution_is_used_at_most_once(trained: Path, name: str) -> None:
    rounds = results(trained, name)[0]["rounds"]
    used = [part for r in rounds for part in zip(r.workers, r.seqs, strict=True)]
    assert len(used) == len(set(used))


def test_synchronous_rounds_hold_k_fresh_gradients_of_different_workers(trained: Path) -> None:
    for name, k in (("backups_1", 3), ("backups_1_cancel", 3), ("k_sync", 2)):
        for round_ in results(trained, name)[0]["rounds"]:
            assert len(set(round_.workers)) == len(round_.workers) == k
            assert set(round_.staleness()) == {0}


def test_what_late_workers_gave_up_is_counted(trained: Path) -> None:
    """Each rank counts its own and tells; only where late work is cancelled is there any."""
    for name, some in (("backups_1", False), ("backups_1_cancel", True), ("k_async", False)):
        tally = results(trained, name)[0]["tally"]
        assert any(worker["cancelled"] for worker in tally["workers"]) == some, name


def test_batch_variants_hold_k_mini_batches(trained: Path) -> None:
    for name, k in (("k_batch_sync", 4), ("k_batch_async", 3)):
        assert {len(r.seqs) for r in results(trained, name)[0]["rounds"]} == {k}


def test_staleness_stays_within_its_bound(trained: Path) -> None:
    for name, bound in (("k_async_bounded", 2), ("k_batch_async", 8), ("k_batch_sync", 0)):
        ages = [age for r in results(trained, name)[0]["rounds"] for age in r.staleness()]
        assert max(ages) <= bound, name


def test_asynchronous_rounds_really_are_stale(trained: Path) -> None:
    ages = [age for r in results(trained, "k_async")[0]["rounds"] for age in r.staleness()]
    assert max(ages) > 0


def test_cyclic_rounds_take_turns(trained: Path) -> None:
    for name in ("cyclic", "cyclic_sum_bounded", "cyclic_fixed"):
        workers = [r.workers for r in results(trained, name)[0]["rounds"]]
        assert workers == [(number % 4,) for number in range(40)], name


def test_cyclic_accumulation_follows_its_rule(trained: Path) -> None:
    counts = {
        name: {r.batches[0] for r in results(trained, name)[0]["rounds"]}
        for name in ("cyclic", "cyclic_sum_bounded", "cyclic_fixed")
    }
    assert counts["cyclic_fixed"] == {2}
    assert max(counts["cyclic_sum_bounded"]) <= 2
    assert max(counts["cyclic"]) > 1


def test_cyclic_publishes_every_gradient(trained: Path) -> None:
    """Nothing accumulated is left over at the end: every published buffer is in an update."""
    for name in ("cyclic", "cyclic_fixed"):
        ranks = results(trained, name)
        used = {part for r in ranks[0]["rounds"] for part in zip(r.workers, r.seqs, strict=True)}
        published = {(rank, seq) for rank in range(4) for seq in ranks[rank]["published"]}
        assert used == published, name


def test_adasync_changed_k(trained: Path) -> None:
    ks = {r.k for r in results(trained, "adasync")[0]["rounds"]}
    assert 1 in ks and all(1 <= k <= 4 for k in ks)


def test_distance_damping_shrinks_far_updates(trained: Path) -> None:
    ranks = results(trained, "distance_damping")
    history = [ranks[0]["start"].copy()]
    momentum = np.zeros_like(history[0])
    factors = []
    for round_ in ranks[0]["rounds"]:
        gradient = gradient_of(round_, ranks, mean=True, weight=lambda age: 1.0)
        square = max(float(((history[-1] - history[v]) ** 2).sum()) for v in round_.versions)
        factors.append(float(damping_factor(torch.tensor(square, dtype=torch.float64), 1e-4, LR)))
        momentum = MOMENTUM * momentum + gradient * factors[-1]
        history.append(history[-1] - LR * momentum)
    assert min(factors) < 1.0
    np.testing.assert_allclose(ranks[0]["end"], history[-1], rtol=0, atol=1e-10)
    assert len({rank["digests"][40] for rank in ranks}) == 1


def test_clipping_accumulation_and_schedule_follow_the_version(trained: Path) -> None:
    """Also on ranks that missed updates; the weights against NumPy, with clipping and decay."""
    ranks = results(trained, "backups_1_scheduled")
    parameters = ranks[0]["start"].copy()
    momentum = np.zeros_like(parameters)
    rounds = ranks[0]["rounds"][1::2]  # an update is made with every second batch
    for number, round_ in enumerate(rounds):
        gradient = gradient_of(round_, ranks, mean=True, weight=lambda age: 1.0)
        gradient *= min(1.0, 0.3 / (np.linalg.norm(gradient) + 1e-6))
        momentum = MOMENTUM * momentum + gradient + 0.01 * parameters
        parameters -= LR * 0.8 ** (number // 7) * momentum
    np.testing.assert_allclose(ranks[0]["end"], parameters, rtol=0, atol=1e-9)
    for rank in ranks:
        assert rank["digests"] == ranks[0]["digests"]
        np.testing.assert_allclose(rank["rates"], [LR * 0.8 ** (n // 7) for n in range(40)])
    assert sum(3 not in round_.workers for round_ in rounds) > 20


def test_no_backups_equals_lightning_ddp(trained: Path, ddp: Path) -> None:
    """Clipping, accumulation over two batches and a step-wise schedule, fifty updates."""
    expected = results(ddp, "lightning_ddp", ranks=1)[0]["end"]
    for rank in results(trained, "backups_0"):
        assert rank["steps"] == 50
        np.testing.assert_allclose(rank["end"], expected, rtol=0, atol=1e-6)


def test_unusual_memory_equals_lightning_ddp(trained: Path, ddp: Path) -> None:
    """Channels-last weights under a fused optimizer; replaced gradients; a partial accumulation."""
    (expected,) = results(ddp, "lightning_ddp_unusual", ranks=1)
    for number, rank in enumerate(results(trained, "unusual_memory")):
        assert rank["synchronous"]["steps"] == 6
        np.testing.assert_allclose(rank["synchronous"]["end"], expected["end"], rtol=0, atol=1e-6)
        assert rank["backups"]["extra"] == [float(number)] * rank["backups"]["steps"]


def test_a_backward_within_the_step_changes_nothing_published(trained: Path) -> None:
    ranks = results(trained, "steps_with_a_backward")
    for name in ranks[0]:
        found = [rank[name] for rank in ranks]
        assert all(rank["digests"] == found[0]["digests"] for rank in found), name
        np.testing.assert_allclose(found[0]["end"], replayed(found), rtol=0, atol=1e-10)


def test_fine_tuning_equals_one_process_on_all_rows(trained: Path) -> None:
    """The ranks' batches of an update are the rows of one batch four times as large."""
    expected = fine_tune("auto", devices=1)
    for rank in results(trained, "fine_tuning"):
        np.testing.assert_allclose(rank["synchronous"], expected, rtol=0, atol=1e-12)


def test_the_bound_follows_the_layers_that_are_trained(trained: Path) -> None:
    """27 parameters, then 83, then 56, of 8 bytes: what fits into 5,000, and never less than 4."""
    first, *others = results(trained, "fine_tuning_in_little_memory")
    assert first["decided"] == [23, 7, 11, 11]
    for rank in (first, *others):
        assert rank["heeded"] == [23, 7, 11, 11]
        assert all(map(np.array_equal, rank["ends"], first["ends"]))


def test_fine_tuning_keeps_replicas_identical(trained: Path) -> None:
    first, *others = results(trained, "fine_tuning")
    for name, ends in first.items():
        assert all(np.array_equal(rank[name], ends) for rank in others), name
        start, one, two, three, _ = (end.reshape(-1) for end in ends)
        early, late = slice(0, 56), slice(56, 83)  # the first layer's weights, and the last one's
        moved = [(a != b).any() for a, b in ((start[early], one[early]), (one[early], two[early]))]
        assert moved == [False, True], name
        assert (one[late] != two[late]).all() and (two[late] == three[late]).all(), name
