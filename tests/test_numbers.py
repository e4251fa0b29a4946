"""Losses, logs and gradients say what they should, on four ranks and both backends."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from tests.launching import results

SCENARIOS = [
    "numbers.accumulated_losses",
    "numbers.narrow_sums",
    "numbers.logged_steps",
    "numbers.broken_runs_end",
    "numbers.broken_gradients_dropped",
    "numbers.broken_statistics",
    "numbers.one_bit_wrong",
    "numbers.never_used",
    "numbers.trace_on_a_full_disk",
]


def needs(launched: Path, case: str) -> None:
    if case == "ad_psgd" and launched.parent.name.startswith("horovodrun"):
        pytest.skip("on Horovod AD-PSGD must be a process's first strategy")


# ----------------------------------------------------------------------- losses and sums


def test_an_updates_loss_is_that_of_all_its_mini_batches(launched: Path) -> None:
    ranks = results(launched, "numbers.accumulated_losses")
    groups = [np.mean([rank["losses"][first : first + 3] for rank in ranks]) for first in (0, 3, 6)]
    for rank in ranks:
        assert list(rank["rounds"].values()) == pytest.approx(groups, rel=1e-12)


def test_a_mean_that_fits_into_16_bits_is_found_there(launched: Path) -> None:
    for rank in results(launched, "numbers.narrow_sums"):
        for weights in rank.values():
            assert weights == pytest.approx([-2 * 30_000 / 1024] * 2, rel=1e-2)


# ---------------------------------------------------------------------------------- logs


def test_our_values_are_logged_with_lightnings_own_of_the_same_batch(launched: Path) -> None:
    for name, calls in results(launched, "numbers.logged_steps")[0].items():
        steps = [step for step, _ in calls]
        assert steps == sorted(steps), name
        ours = [(step, values) for step, values in calls if any("dsgd/" in key for key in values)]
        own = [(step, values["epoch"]) for step, values in calls if "own" in values]
        assert [(step, values["epoch"]) for step, values in ours] == own, name
        assert len(own) == len(set(own)) >= 2, name


def test_the_csv_file_has_one_row_per_step(launched: Path) -> None:
    file = next((launched / "numbers" / "backup_workers").rglob("metrics.csv"))
    rows = list(csv.DictReader(file.open()))
    assert [int(row["step"]) for row in rows if row["dsgd/loss"]] == list(range(6))
    assert [int(row["step"]) for row in rows] == sorted(int(row["step"]) for row in rows)
    assert [int(row["epoch"]) for row in rows if row["dsgd/loss"]] == [0, 0, 0, 1, 1, 1]


# ----------------------------------------------------------------------- what is not finite


@pytest.mark.parametrize(
    "case", ["k_async", "k_batch_sync", "cyclic_delay", "dc_s3gd", "ad_psgd", "accumulated"]
)
def test_a_gradient_that_is_not_finite_ends_the_run_by_name(launched: Path, case: str) -> None:
    needs(launched, case)
    for rank, found in enumerate(results(launched, "numbers.broken_runs_end")):
        end = found[case]["end"] if case == "accumulated" else found[case]
        own = "rank 1: its gradient for update "
        assert end.startswith(f"NonFiniteError: {own}" if rank == 1 else "PeerFailedError: rank 1")
        assert own in end and "is not finite (loss " in end and "nonfinite='drop'" in end


def test_nobody_who_has_anything_finite_is_said_and_ends_with_the_timeout(launched: Path) -> None:
    ranks = [found["never finite"] for found in results(launched, "numbers.broken_runs_end")]
    assert all(rank["end"].startswith("RoundTimeoutError: update 1 has waited") for rank in ranks)
    assert [line for line in ranks[0]["said"] if "training stands still" in line]
    assert not ranks[0]["tally"]["rounds"] and ranks[0]["tally"]["workers"][3]["nonfinite"] > 3


def test_nobody_looks_where_it_is_to_be_ignored(launched: Path) -> None:
    for found in results(launched, "numbers.broken_runs_end"):
        assert found["ignored"]["end"] is None
        assert np.isnan(found["ignored"]["weights"]).all()


@pytest.mark.parametrize(
    "case", ["backup_workers", "k_async", "k_batch_sync", "cyclic_delay", "dc_s3gd", "ad_psgd"]
)
def test_what_is_not_finite_can_be_dropped(launched: Path, case: str) -> None:
    needs(launched, case)
    ranks = [found[case] for found in results(launched, "numbers.broken_gradients_dropped")]
    assert [rank["end"] for rank in ranks] == [None] * 4
    assert all(np.isfinite(rank["weights"]).all() for rank in ranks)
    said = [line for rank in ranks for line in rank["said"] if "not finite" in line]
    assert len(said) == 1 and "rank 1" in said[0], "once"
    counts = ranks[0]["tally"]["workers"]
    kind = "dropped" if case == "ad_psgd" else "nonfinite"
    assert ranks[1]["broken"] == 2
    assert [counts[rank][kind] for rank in range(4)] == [0, 2, 0, 0]
    if case not in ("dc_s3gd", "ad_psgd"):
        assert counts[1]["dropped"] >= 2 and "not finite" in ranks[0]["table"]
        assert all(rank["digests"] == ranks[0]["digests"] for rank in ranks)
    assert len({rank["weights"].tobytes() for rank in ranks}) == 1


def test_all_make_another_gradient_where_none_is_finite(launched: Path) -> None:
    ranks = [found["all"] for found in results(launched, "numbers.broken_gradients_dropped")]
    assert all(rank["digests"] == ranks[0]["digests"] for rank in ranks)
    assert [w["used"] for w in ranks[0]["tally"]["workers"]] == [12] * 4
    assert [w["nonfinite"] for w in ranks[0]["tally"]["workers"]] == [2] * 4
    assert len([line for line in ranks[0]["said"] if "stands still" in line]) == 1


@pytest.mark.parametrize("case", ["backup_workers", "dc_s3gd", "ad_psgd"])
def test_statistics_that_are_not_finite_spread_to_nobody(launched: Path, case: str) -> None:
    needs(launched, case)
    ranks = [found[case] for found in results(launched, "numbers.broken_statistics")]
    assert [(end, broken) for end, broken, _ in ranks] == [(None, int(n == 1)) for n in range(4)]
    first = ranks[0][2]
    for _, _, statistics in ranks:
        assert all(np.isfinite(values).all() for values in statistics)
        assert all(np.array_equal(a, b) for a, b in zip(statistics, first, strict=True))


# ------------------------------------------------------------------- replicas that differ


@pytest.mark.parametrize(
    ("case", "update"),
    [
        ("in an epoch", 10),
        ("asynchronous", 10),
        ("after an epoch", 8),
        ("in the end", 7),
        ("after a drain", 8),
    ],
)
def test_one_bit_on_one_rank_ends_the_run_by_name(launched: Path, case: str, update: int) -> None:
    for found in results(launched, "numbers.one_bit_wrong"):
        assert found[case]["end"].startswith(
            f"ReplicasDifferError: after update {update} the replicas are no longer the same: "
            "rank 2 differs from the other 3"
        )


def test_replicas_need_not_be_compared(launched: Path) -> None:
    for found in results(launched, "numbers.one_bit_wrong"):
        assert found["never"]["end"] is None and found["never"]["steps"] == 20


# --------------------------------------------------------------- data that is never learnt


def test_a_rank_whose_data_is_never_learnt_says_so_once(launched: Path) -> None:
    ranks = results(launched, "numbers.never_used")
    said = {case: [rank[case]["said"] for rank in ranks] for case in ranks[0]}
    for case in ("kept", "finished"):
        (line,) = said[case][3]
        assert "no gradient of rank 3 was used in a whole epoch" in line and "shuffle" in line
        assert said[case][:3] == [[]] * 3
    assert said["shuffled"] == said["used"] == [[]] * 4


# ------------------------------------------------------------------------- a full disk


def test_a_full_disk_ends_the_trace_and_not_the_training(launched: Path) -> None:
    first, *others = results(launched, "numbers.trace_on_a_full_disk")
    assert all(rank["end"] is None and rank["steps"] == 60 for rank in (first, *others))
    (line,) = first["said"]
    assert "full/rounds.jsonl cannot be written (No space left on device)" in line
    assert "training goes on" in line and not any(rank["said"] for rank in others)
