"""Every documented way to start a training, as a user would type it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from pytorch_lightning.cli import LightningCLI

import lightning_dsgd as dsgd
from examples.digits import Classifier, Digits
from tests.launching import BIN, ROOT, environment

PYTHON = str(BIN / "python")
HOROVODRUN = [str(BIN / "horovodrun"), "-np", "2", PYTHON]
TORCHRUN = [str(BIN / "torchrun"), "--nproc-per-node=2", "--standalone"]
CONFIG = ["examples/cli.py", "fit", "--config", "examples/config.yaml", "--trainer.max_epochs=1"]
SHORT = ["--trainer.limit_train_batches=4", "--trainer.limit_val_batches=1"]


def run(*line: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line, cwd=ROOT, env=environment(**extra), capture_output=True, text=True, timeout=240
    )


def check(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "line",
    [
        [*HOROVODRUN, "examples/train.py"],
        [PYTHON, "examples/train.py", "--devices", "2"],
    ],
    ids=["horovodrun", "python"],
)
def test_the_example_runs_as_documented(line: list[str]) -> None:
    output = check(run(*line, "--epochs", "1"))
    assert "accuracy 0." in output and "s/gradient" in output


FORMS = {
    "yaml": ["--trainer.strategy.cancel_late=true"],
    "another class": ["--trainer.strategy=lightning_dsgd.KAsyncStrategy", "--trainer.strategy.k=1"],
    "dotted name alone": ["--trainer.strategy=lightning_dsgd.KSyncStrategy"],
    "registered name": ["--trainer.strategy=k_batch_async"],
}


@pytest.mark.parametrize("form", FORMS)
def test_lightning_cli(form: str) -> None:
    launcher = HOROVODRUN if form in ("yaml", "registered name") else TORCHRUN
    devices = [] if launcher is HOROVODRUN else ["--trainer.devices=2"]
    check(run(*launcher, *CONFIG, *SHORT, *devices, *FORMS[form]))


STRATEGIES = {
    "ad_psgd": dsgd.ADPSGDStrategy,
    "adasync": dsgd.AdaSyncStrategy,
    "config": dsgd.BackupWorkersStrategy,
    "cyclic_delay": dsgd.CyclicDelayStrategy,
    "dc_s3gd": dsgd.DCS3GDStrategy,
}


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda f: f.stem)
def test_every_example_in_yaml_is_understood(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["cli.py", "--config", str(file)])
    trainer = LightningCLI(Classifier, Digits, run=False).trainer
    assert type(trainer.strategy) is STRATEGIES[file.stem]


def test_a_bad_value_in_yaml_is_refused_by_name() -> None:
    bad = ["--trainer.strategy=lightning_dsgd.KSyncStrategy", "--trainer.strategy.k=zero"]
    done = run(PYTHON, *CONFIG, *SHORT, "--trainer.devices=2", *bad)
    assert done.returncode != 0
    assert "k" in done.stderr and "zero" in done.stderr


def test_slurm(tmp_path: Path) -> None:
    """Two tasks as `srun` would start them."""
    common = {
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "4711",
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODELIST": "localhost",
    }
    tasks = []
    for rank in range(2):
        own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        tasks.append(
            subprocess.Popen(
                [PYTHON, "examples/train.py", "--devices", "2", "--epochs", "1"],
                cwd=ROOT,
                env=environment(**common, **own),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [task.communicate(timeout=240)[0] for task in tasks]
    assert all(task.returncode == 0 for task in tasks), outputs
    assert "accuracy 0." in outputs[0]
