"""Whichever copy of Lightning a script imports, that copy's code runs, beside the other and alone.

Scenarios import `pytorch_lightning` unless they are told otherwise; here they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import asked
from tests.launching import launch, results
from tests.test_trainer_features import (
    test_a_reduction_in_every_step_needs_every_rank_in_it,
    test_a_step_that_leaves_the_strategy_out_is_refused,
    test_bf16_several_groups_and_unused_parameters,
    test_buffers_and_metrics_agree,
    test_collectives_of_the_trainer,
    test_copies_and_pickles_of_a_trainer_train_themselves,
    test_data_without_length_and_data_that_starts_over,
    test_early_stopping_checkpoints_and_synchronised_logs,
    test_loaders_in_a_structure_and_kept_workers,
    test_ranks_train_on_their_own_shards,
)

__all__ = [
    "test_a_reduction_in_every_step_needs_every_rank_in_it",
    "test_a_step_that_leaves_the_strategy_out_is_refused",
    "test_bf16_several_groups_and_unused_parameters",
    "test_buffers_and_metrics_agree",
    "test_collectives_of_the_trainer",
    "test_copies_and_pickles_of_a_trainer_train_themselves",
    "test_data_without_length_and_data_that_starts_over",
    "test_early_stopping_checkpoints_and_synchronised_logs",
    "test_loaders_in_a_structure_and_kept_workers",
    "test_ranks_train_on_their_own_shards",
]

REPEATED = {"launched": ("lightning", "lightning alone", "pytorch_lightning alone")}

TOLD = [
    "copies.schedules",
    "copies.kept_in_the_background",
    "copies.caught",
    "copies.whose",
    "features.logs_in_step",
    "features.bf16_and_groups",
    "features.callbacks_and_logs",
    "features.copied_and_pickled",
    "features.iterable_data",
    "features.loader_processes",
    "features.predictions_and_gathers",
    "features.shaped_loaders",
    "features.shards_and_buffers",
    "features.ways_to_step",
]


@pytest.fixture(scope="session")
def copies(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Path]]]:
    """A launch for each that is asked for, two at a time."""
    count = request.config.getoption("repetitions")
    places = [f"{number}/{name}" for number in range(count) for name in TOLD]

    def run(copy: str, out: Path) -> Path:
        done = launch("torchrun", places, out, timeout=600.0 * count, DSGD_TEST_COPY=copy)
        assert done.returncode == 0, done.stdout[-6000:]
        return out

    names = dict.fromkeys(copy for copy, _ in asked(request.session, "launched"))
    with ThreadPoolExecutor(2) as pool:
        yield {
            copy: pool.submit(run, copy, tmp_path_factory.mktemp(copy.replace(" ", "-")))
            for copy in names
            if copy in REPEATED["launched"]
        }


@pytest.fixture(scope="session")
def launched(request: pytest.FixtureRequest, copies: dict[str, Future[Path]]) -> Path:
    """The directory with the outcome of one repetition, by the copy of Lightning imported."""
    copy, number = request.param
    return copies[copy].result() / str(number)


def test_the_trainers_own_copy_runs(launched: Path) -> None:
    alone = "alone" in launched.parent.name
    for found in results(launched, "copies.whose"):
        assert found["modules"] == {found["expected"]}
        assert found["type"] and found["other"] is not alone


def test_schedules_of_ones_own_and_by_plateau(launched: Path) -> None:
    for found in results(launched, "copies.schedules"):
        assert found == {"_OwnSchedule": 1 / 8, "_Plateau": 1 / 4}


def test_a_plugin_that_wraps_the_strategys_own(launched: Path) -> None:
    for found in results(launched, "copies.kept_in_the_background"):
        assert found == {"same": True, "read": 1}


def test_errors_are_of_the_copy_that_the_script_imports(launched: Path) -> None:
    assert all("monitor" in found["caught"] for found in results(launched, "copies.caught"))
