"""Mistakes get an answer that names the argument and the remedy."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_dsgd as dsgd
from tests.launching import environment, read
from tests.ranks.refusals import EMPTY, EXPECTED, NEED_A_GROUP
from tests.ranks.toy import Toy, loader, trainer_for

SCENARIOS = [f"refusals.{name}" for name in (*NEED_A_GROUP, *EMPTY, *EXPECTED)]
SCENARIOS.append("features.bf16_and_groups")  # a training that succeeds, after those that fail


@pytest.mark.parametrize("name", EXPECTED)
def test_refused_on_every_rank(launched: Path, name: str) -> None:
    for outcome in read(launched / "refusals", name):
        assert outcome.get("error") == "ConfigurationError", outcome
        assert EXPECTED[name] in outcome["message"]


@pytest.mark.parametrize("name", NEED_A_GROUP)
def test_what_needs_torchs_default_group_is_told_what_to_use(launched: Path, name: str) -> None:
    for outcome in read(launched / "refusals", name):
        assert "Default process group has not been initialized" in outcome["message"], outcome
        for instead in ("global_rank", "distributed_sampler_kwargs", "strategy.all_gather"):
            assert outcome["message"].count(instead) == 1


@pytest.mark.parametrize("name", EMPTY)
def test_one_ranks_empty_batch_is_explained_on_all(launched: Path, name: str) -> None:
    outcomes = read(launched / "refusals", name)
    assert outcomes[1]["error"] == "ConfigurationError"
    assert all("yielded None instead of a batch" in o["message"] for o in outcomes)


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (dsgd.BackupWorkersStrategy, {"backups": -1}, "backups=-1"),
    (dsgd.BackupWorkersStrategy, {"backups": "two"}, "backups='two'"),
    (dsgd.BackupWorkersStrategy, {"timeout": 0}, "timeout=0"),
    (dsgd.BackupWorkersStrategy, {"timeout": float("inf")}, "timeout=inf"),
    (dsgd.BackupWorkersStrategy, {"timeout": float("nan")}, "timeout=nan"),
    (dsgd.BackupWorkersStrategy, {"max_lag": 0}, "max_lag=0"),
    (dsgd.BackupWorkersStrategy, {"rounds_per_epoch": 0}, "rounds_per_epoch=0"),
    (dsgd.BackupWorkersStrategy, {"backend": "mpi"}, "backend='mpi'"),
    (dsgd.BackupWorkersStrategy, {"backend": "horovod"}, "horovodrun"),
    (dsgd.KSyncStrategy, {"k": 0}, "k=0"),
    (dsgd.KSyncStrategy, {"k": -3}, "k=-3"),
    (dsgd.KBatchSyncStrategy, {"k": 1.5}, "k=1.5"),
    (dsgd.KAsyncStrategy, {"k": "many"}, "k='many'"),
    (dsgd.KAsyncStrategy, {"k": True}, "k=True"),
    (dsgd.KAsyncStrategy, {"max_staleness": -1}, "max_staleness=-1"),
    (dsgd.KAsyncStrategy, {"damping": "soft"}, "damping='soft'"),
    (dsgd.KAsyncStrategy, {"damping": "distance"}, "max_staleness"),
    (dsgd.AdaSyncStrategy, {"variant": "k"}, "variant='k'"),
    (dsgd.AdaSyncStrategy, {"interval": 0.0}, "interval=0.0"),
    (dsgd.AdaSyncStrategy, {"k0": 0.5}, "k0=0.5"),
    (dsgd.CyclicDelayStrategy, {"delay": 0}, "delay=0"),
    (dsgd.CyclicDelayStrategy, {"delay": "static"}, "delay='static'"),
    (dsgd.CyclicDelayStrategy, {"combine": "max"}, "combine='max'"),
    (dsgd.CyclicDelayStrategy, {"skip_after": -1.0}, "skip_after=-1.0"),
    (dsgd.CyclicDelayStrategy, {"max_accumulation": 0}, "max_accumulation=0"),
]


@pytest.mark.parametrize(("cls", "arguments", "text"), BAD)
def test_refused_at_construction(cls: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(dsgd.ConfigurationError) as error:
        cls(**arguments)
    assert text in str(error.value)


def test_a_backend_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "horovod" else find(name)
    )
    with pytest.raises(dsgd.BackendError, match="lightning-dsgd install-horovod"):
        dsgd.BackupWorkersStrategy(backend="horovod")


def test_one_worker_is_not_enough() -> None:
    with pytest.raises(dsgd.ConfigurationError, match="at least 2 workers"):
        trainer_for("backup_workers", devices=1, max_epochs=1).fit(Toy(), loader())


def test_a_mistake_is_shown_without_our_own_frames() -> None:
    mistake = "from tests.ranks.toy import *; trainer_for('k_sync', devices=1).fit(Toy(), loader())"
    line = [sys.executable, "-c", mistake]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    *_, way, error = done.stderr.strip().splitlines()
    assert way == '  File "<string>", line 1, in <module>'
    assert error.startswith("lightning_dsgd.errors.ConfigurationError: KSyncStrategy needs")


def test_ranks_cannot_meet_at_port_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `torchrun --master-port 0` sets it."""
    given = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "2"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in {**given, "LOCAL_WORLD_SIZE": "2", **meeting}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(dsgd.ConfigurationError, match="--standalone"):
        trainer_for("backup_workers", devices=2, max_epochs=1).fit(Toy(), loader())


def test_a_horovod_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "horovod" / "torch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN5torch')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    with pytest.raises(dsgd.BackendError, match=r"undefined symbol.*install-horovod --force"):
        trainer_for("backup_workers", max_epochs=1).fit(Toy(), loader())


def test_under_horovodrun_without_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dsgd.backends.horovod_installed", lambda: False)
    monkeypatch.setattr("lightning_dsgd.trainer.collective.horovod_installed", lambda: False)
    for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    with pytest.raises(dsgd.BackendError, match="install-horovod"):
        dsgd.BackupWorkersStrategy()


def test_an_unknown_name_is_answered_by_lightning() -> None:
    with pytest.raises(ValueError, match=r"invalid strategy name.*bakup_workers"):
        trainer_for("bakup_workers", devices=1)


def test_an_unknown_algorithm_is_answered_with_the_choices() -> None:
    from lightning_dsgd.registry import load

    with pytest.raises(dsgd.ConfigurationError, match=r"installed: .*backup_workers, cyclic_delay"):
        load("bakup_workers")


def test_errors_are_one_tree() -> None:
    assert issubclass(dsgd.ConfigurationError, ValueError)
    for name in ("BackendError", "PeerLostError", "PeerFailedError", "RoundTimeoutError"):
        assert issubclass(getattr(dsgd, name), dsgd.DSGDError)
    assert "HOROVOD_RANK" not in os.environ
