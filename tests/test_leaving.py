"""A rank that leaves an epoch alone is named on all ranks at once; together they may leave it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import results
from tests.ranks.leaving import LONER, STEP

SCENARIOS = [
    f"leaving.{name}" for name in ("in_the_step", "by_skipping", "with_the_data", "together")
]
SOON = 20.0
"""Seconds; the `timeout` is 60."""


def test_a_bare_next_in_the_step_is_the_ranks_own_mistake(launched: Path) -> None:
    for rank, found in enumerate(results(launched, "leaving.in_the_step")):
        for name, run in found.items():
            assert run["seconds"] < SOON, (name, run)
            assert "training_step has raised StopIteration" in run["end"], (name, run)
            kind = "RuntimeError" if rank == LONER else f"PeerFailedError: rank {LONER} failed"
            assert run["end"].startswith(kind), (name, run)


@pytest.mark.parametrize("scenario", ["by_skipping", "with_the_data"])
def test_a_rank_that_leaves_an_epoch_alone_is_named(launched: Path, scenario: str) -> None:
    for found in results(launched, f"leaving.{scenario}"):
        for name, run in found.items():
            assert run["seconds"] < SOON, (name, run)
            text = f"EpochLeftError: rank {LONER} has left its epoch after update {STEP}, and"
            assert run["end"].startswith(text), (name, run)
            assert "on_train_batch_start" in run["end"] and "StopIteration" in run["end"]


def test_ranks_may_leave_an_epoch_together(launched: Path) -> None:
    ranks = results(launched, "leaving.together")
    for name in ranks[0]:
        assert {run[name]["end"] for run in ranks} == {"finished"}, (name, ranks)
        steps, weights = ({run[name][what] for run in ranks} for what in ("steps", "weights"))
        assert len(steps) == len(weights) == 1 and steps.pop() > STEP, (name, ranks)
