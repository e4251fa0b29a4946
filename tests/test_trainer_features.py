"""What people use of the Trainer, on four ranks and both backends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.launching import KINDS, launch, results

REPEATED = {"launched": KINDS}
SCENARIOS = [
    "features.logs_in_step",
    "epochs.freed_within_an_epoch",
    "epochs.late_for_the_epoch",
    "epochs.long_validation",
    "epochs.short_cycles",
    "epochs.short_epochs_that_log",
    "epochs.after_a_failure",
    "resuming.saved_on_failure",
    "features.ways_to_step",
    "epochs.stopped_alone",
    "features.shaped_loaders",
    "epochs.epoch_schedule",
    "features.bf16_and_groups",
    "features.copied_and_pickled",
    "features.callbacks_and_logs",
    "features.predictions_and_gathers",
    "features.shards_and_buffers",
    "epochs.limits",
    "epochs.stopped_midway",
    "features.iterable_data",
    "features.loader_processes",
    "features.other_import_name",
    "resuming.resume",
    "resuming.resume_state",
]


def test_epoch_schedules_follow_the_version(launched: Path) -> None:
    for rank in results(launched, "epochs.epoch_schedule"):
        assert rank["steps"] == 15
        assert rank["lr"] == pytest.approx(0.1 * 0.5**3)


def test_bf16_several_groups_and_unused_parameters(launched: Path) -> None:
    ranks = results(launched, "features.bf16_and_groups")
    assert {rank["steps"] for rank in ranks} == {6}
    assert len({rank["digest"] for rank in ranks}) == 1
    assert np.isfinite(ranks[0]["end"]).all()


def test_early_stopping_checkpoints_and_synchronised_logs(launched: Path) -> None:
    ranks = results(launched, "features.callbacks_and_logs")
    assert {rank["epochs"] for rank in ranks} == {3}
    for rank in ranks:
        assert rank["metrics"]["rank"] == pytest.approx(1.5)
        assert rank["metrics"]["worst"] == 3.0
        assert rank["metrics"] == ranks[0]["metrics"]
        assert rank["validated"] == pytest.approx(rank["metrics"]["val_loss"], rel=1e-9)
    assert Path(ranks[0]["best"]).exists()
    logged = next(Path(launched, "features", "csv").rglob("metrics.csv")).read_text()
    assert "dsgd/k" in logged and "dsgd/staleness" in logged


def test_a_reduction_in_every_step_needs_every_rank_in_it(launched: Path) -> None:
    for found in results(launched, "features.logs_in_step"):
        assert found["backup_workers 0"] == 1.5
        assert "on_step=False" in found["k_async"]
        assert "on_step=False" in found["backup_workers 1"]


def test_layers_are_freed_between_epochs_only(launched: Path) -> None:
    for found in results(launched, "epochs.freed_within_an_epoch"):
        assert "on_train_epoch_start" in found["message"]


def test_a_rank_that_missed_a_whole_epoch_has_logged_too(launched: Path) -> None:
    ranks = results(launched, "epochs.late_for_the_epoch")
    for rank in ranks:  # rank 3 has one batch in the mean, the others have three
        assert rank == {"steps": 6, "rank": pytest.approx((0 * 3 + 1 * 3 + 2 * 3 + 3) / 10)}


def test_validation_may_last_longer_than_the_timeout(launched: Path) -> None:
    assert {rank["steps"] for rank in results(launched, "epochs.long_validation")} == {3}


def test_an_epoch_may_be_shorter_than_a_cycle(launched: Path) -> None:
    assert all(rank["steps"] == [1, 6] for rank in results(launched, "epochs.short_cycles"))


def test_every_rank_logs_in_every_epoch(launched: Path) -> None:
    ranks = results(launched, "epochs.short_epochs_that_log")
    assert all(rank == ranks[0] for rank in ranks)
    for name, (seen, _) in ranks[0].items():
        assert seen["seen"] >= 4, name
    assert ranks[0]["k_sync 8"][0]["kept"] >= 4


def test_training_goes_on_after_a_failure(launched: Path) -> None:
    ranks = results(launched, "epochs.after_a_failure")
    for name, (_, _, digest) in ranks[0].items():
        for rank in ranks:
            assert "oops" in rank[name][0] and "new Trainer" in rank[name][1]
            assert rank[name][2] == digest, name


def test_a_step_that_leaves_the_strategy_out_is_refused(launched: Path) -> None:
    ranks = results(launched, "features.ways_to_step")
    for name in ("backup_workers", "dc_s3gd"):
        assert len({rank[f"{name} by closure"] for rank in ranks}) == 1
        for rank in ranks:
            assert "several times per step" in rank[f"{name} twice"]
            for way in ("around", "before", "not"):
                assert "optimizer.step(closure=optimizer_closure)" in rank[f"{name} {way}"]


def test_a_rank_that_stops_alone_is_named(launched: Path) -> None:
    for rank in results(launched, "epochs.stopped_alone"):
        assert rank["message"].startswith("rank 3 has left its epoch after update 2, and others")
        assert "reduce_boolean_decision" in rank["message"]


def test_loaders_in_a_structure_and_kept_workers(launched: Path) -> None:
    ranks = results(launched, "features.shaped_loaders")
    assert all(rank == ranks[0] for rank in ranks)


def test_collectives_of_the_trainer(launched: Path) -> None:
    for rank, found in enumerate(results(launched, "features.predictions_and_gathers")):
        assert found["test_loss"] == pytest.approx(1.5)
        assert found["gathered"] == [0, 1, 2, 3]
        assert found["predicted"] == 16
        assert found["gradient"] == pytest.approx(4 * 2 * (rank + 1))
        assert found["reduced"] == [1.5, 6.0, 0.0, 3.0]
        assert found["broadcast"] == {"from": 2}
        assert found["any"] is True and found["all"] is False


def test_copies_and_pickles_of_a_trainer_train_themselves(launched: Path) -> None:
    for rank in results(launched, "features.copied_and_pickled"):
        for found in rank.values():
            assert found["own"] == [True, True] and found["means"] == [1.5, 1.5]
            assert found["epochs"] == [1, 2]
            assert "while it trains" in found["said"]


def test_ranks_train_on_their_own_shards(launched: Path) -> None:
    ranks = results(launched, "features.shards_and_buffers")
    seen = [set(rank["seen"]) for rank in ranks]
    assert sum(len(part) for part in seen) == len(set.union(*seen)) == 256


def test_buffers_and_metrics_agree(launched: Path) -> None:
    ranks = results(launched, "features.shards_and_buffers")
    assert all(rank["statistics"] == ranks[0]["statistics"] for rank in ranks)
    assert all(rank["mean_rank"] == pytest.approx(1.5) for rank in ranks)


def test_limits_end_every_rank_at_the_same_update(launched: Path) -> None:
    ranks = results(launched, "epochs.limits")
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0]["max_steps"] == 7
    assert ranks[0]["max_time"] > 1
    assert ranks[0]["fast_dev_run"] == 1


def test_a_stop_in_mid_epoch_leaves_nothing_under_way(launched: Path) -> None:
    for rank in results(launched, "epochs.stopped_midway"):
        assert rank == {"steps": [7, 7], "left": []}


def test_data_without_length_and_data_that_starts_over(launched: Path) -> None:
    assert [rank["steps"] for rank in results(launched, "features.iterable_data")] == [10] * 4
    # 64 rows over 4 ranks in batches of 4: 4 batches each, 16 gradients, one per update
    assert [rank["steps"] for rank in results(launched, "features.loader_processes")] == [32] * 4


def test_both_import_names_work_in_one_process(launched: Path) -> None:
    ranks = results(launched, "features.other_import_name")
    assert all(rank["steps"] == [5, 5, 5] for rank in ranks)
    assert len({rank["digest"] for rank in ranks}) == 1


def test_resuming_equals_not_stopping(launched: Path) -> None:
    for rank in results(launched, "resuming.resume"):
        np.testing.assert_array_equal(rank["resumed"], rank["whole"])
        assert not np.array_equal(rank["half"], rank["whole"])
    assert [rank["written"] for rank in results(launched, "resuming.resume")] == [3, 0, 0, 0]


def test_resuming_restores_the_policy(launched: Path) -> None:
    found = results(launched, "resuming.resume_state")[0]
    assert found["adasync"]["steps"] == found["cyclic"]["steps"] == 15
    assert found["cyclic"]["saved"]["policy"] == {"token": 1}  # 9 updates, 4 workers
    assert found["cyclic"]["after"] == {"token": 3}
    saved, after = found["adasync"]["saved"]["policy"], found["adasync"]["after"]
    assert saved["first_loss"] is not None
    assert after["first_loss"] == saved["first_loss"]


def test_a_checkpoint_of_a_failure_is_there_on_all_ranks(launched: Path) -> None:
    for found in results(launched, "resuming.saved_on_failure"):
        assert found == {"backup_workers": ("KeyError", True), "dc_s3gd": ("KeyError", True)}


def test_resuming_on_another_number_of_ranks(launched: Path) -> None:
    if launched.parent.name.startswith("horovodrun"):
        pytest.skip("a checkpoint is the same whoever wrote it: one launch is enough")
    launch("torchrun", ["resuming.resume_on_fewer"], launched, ranks=2)
    ranks = results(launched, "resuming.resume_on_fewer", ranks=2)
    half = results(launched, "resuming.resume")[0]["half"]
    for rank in ranks:
        np.testing.assert_array_equal(rank["start"], half)
        assert rank["epochs"] == 5
        assert rank["first"] == 2 * 16 + 1  # two epochs of four ranks with 16 batches each
        assert rank["workers"] == {1}  # this run's backups, not those of the checkpoint
    assert len({rank["digest"] for rank in ranks}) == 1 and ranks[0]["finite"]
