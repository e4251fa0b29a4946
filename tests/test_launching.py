"""Every documented way to start a training, as a user would type it."""

from __future__ import annotations

import importlib
import subprocess
import textwrap
from pathlib import Path
from typing import Any

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
        [*TORCHRUN, "examples/train.py"],
        [PYTHON, "examples/train.py", "--devices", "2"],
    ],
    ids=["horovodrun", "torchrun", "python"],
)
def test_the_example_runs_as_documented(line: list[str]) -> None:
    output = check(run(*line, "--epochs", "1"))
    assert "accuracy 0." in output and "s/gradient" in output


def test_lightning_cli_by_horovodrun() -> None:
    check(run(*HOROVODRUN, *CONFIG, *SHORT, "--trainer.strategy.cancel_late=true"))


def test_lightning_cli_by_torchrun() -> None:
    other = ["--trainer.strategy=lightning_dsgd.KAsyncStrategy", "--trainer.strategy.k=1"]
    check(run(*TORCHRUN, *CONFIG, *SHORT, "--trainer.devices=2", *other))


CONFIGURED = {
    "config": dsgd.BackupWorkersStrategy,
    "config --trainer.strategy=lightning_dsgd.KSyncStrategy": dsgd.KSyncStrategy,
    "config --trainer.strategy=k_batch_async": dsgd.KBatchAsyncStrategy,
    "adasync": dsgd.AdaSyncStrategy,
    "cyclic_delay": dsgd.CyclicDelayStrategy,
    "dc_s3gd": dsgd.DCS3GDStrategy,
    "ad_psgd": dsgd.ADPSGDStrategy,
}


def configured(name: str, *overrides: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The Trainer, parsed and built as the command does it, without training."""
    config = str(ROOT / "examples" / f"{name}.yaml")
    monkeypatch.setattr("sys.argv", ["cli.py", "--config", config, *overrides])
    return LightningCLI(Classifier, Digits, run=False).trainer


@pytest.mark.parametrize("line", CONFIGURED)
def test_every_example_and_form_is_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = configured(*line.split(), monkeypatch=monkeypatch)
    assert type(trainer.strategy) is CONFIGURED[line]


EVERY_RULE = """
- {kind: slow, rank: 0, factor: 2, seconds: 0.1}
- {kind: exponential, mean: 0.1}
- {kind: pareto, alpha: 2.5, minimum: 0.01, ranks: [0]}
- {kind: random_pair, seconds: 0.2}
- {kind: recorded, seconds: [0.1, 0.3]}
"""


@pytest.mark.parametrize("copy", ["pytorch_lightning", "lightning.pytorch"])
@pytest.mark.parametrize(
    "strategy",
    ["k_sync", "{class_path: lightning_dsgd.KSyncStrategy, init_args: {k: 0.5, timeout: 7}}"],
    ids=["name", "class"],
)
def test_yaml_of_ones_own(
    copy: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = textwrap.indent(EVERY_RULE, " " * 10)
    (tmp_path / "own.yaml").write_text(
        f"trainer:\n  accelerator: cpu\n  devices: 2\n  logger: false\n  strategy: {strategy}\n"
        "  callbacks:\n    - class_path: lightning_dsgd.Stragglers\n      init_args:\n"
        f"        seed: 3\n        rules:\n{rules}"
    )
    cli = importlib.import_module(f"{copy}.cli")
    boring = importlib.import_module(f"{copy}.demos.boring_classes")
    monkeypatch.setattr("sys.argv", ["cli.py", "--config", str(tmp_path / "own.yaml")])
    trainer = cli.LightningCLI(boring.BoringModel, run=False).trainer
    assert type(trainer.strategy) is dsgd.KSyncStrategy
    if "init_args" in strategy:
        assert (trainer.strategy.k, trainer.strategy.timeout) == (0.5, 7.0)
    (slow,) = [one for one in trainer.callbacks if isinstance(one, dsgd.Stragglers)]
    assert (slow.seed, slow.factors, slow.pairs, len(slow.delays)) == (3, {0: 2}, [0.2], 4)


def test_every_example_is_tried() -> None:
    files = {file.stem for file in (ROOT / "examples").glob("*.yaml")}
    assert files == {line.split()[0] for line in CONFIGURED}


def test_a_bad_value_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = ["--trainer.strategy=lightning_dsgd.KSyncStrategy", "--trainer.strategy.k=zero"]
    with pytest.raises(SystemExit) as ended:
        configured("config", *bad, monkeypatch=monkeypatch)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "key='k'" in said and "zero" in said


def test_slurm() -> None:
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
