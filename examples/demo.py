"""Four workers, one of them ten times slower: with and without a backup worker.

    python -m examples.demo

Starts itself twice under `horovodrun` (or `torchrun`, where Horovod is not installed) and prints
one table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS = 4
SLOW_RANK = 3
COMPUTE_SECONDS = 0.05
"""A mini-batch here is tiny; this pause stands for the work of a real one."""
EXPECTED_GAIN = 5.0
"""Ten times slower, less what the exchange itself costs on a busy machine."""


def launcher() -> list[str]:
    """The command that starts the ranks."""
    here = Path(sys.executable).parent
    if importlib.util.find_spec("horovod") is not None:
        return [str(here / "horovodrun"), "-np", str(RANKS), sys.executable]
    return [str(here / "torchrun"), f"--nproc-per-node={RANKS}", "--standalone"]


def train(backups: int, updates: int, out: str) -> None:
    """One rank of one run."""
    import pytorch_lightning as pl

    from examples.digits import Classifier, Digits
    from lightning_dsgd import BackupWorkersStrategy, Stragglers

    class Pace(pl.Callback):
        """When each update was applied; the first few warm up."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_batch_end(self, *arguments: Any) -> None:
            self.times.append(time.perf_counter())

        def seconds_per_update(self) -> float:
            return (self.times[-1] - self.times[4]) / (len(self.times) - 5)

    pace = Pace()
    strategy = BackupWorkersStrategy(backups=backups)
    slow = Stragglers()
    for rank in range(RANKS):
        slow.slow(rank, seconds=COMPUTE_SECONDS * (10 if rank == SLOW_RANK else 1))
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=strategy,
        callbacks=[slow, pace],
        max_steps=updates,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    module, data = Classifier(), Digits()
    began = time.perf_counter()
    trainer.fit(module, data)
    seconds = time.perf_counter() - began
    trainer.limit_val_batches = 1.0
    (metrics,) = trainer.validate(module, data, verbose=False)
    if trainer.is_global_zero:
        assert strategy.tally is not None
        report = {
            "seconds": seconds,
            "per_update": pace.seconds_per_update(),
            "updates": trainer.global_step,
            "accuracy": metrics["val_accuracy"],
            "workers": strategy.tally.as_dict()["workers"],
        }
        Path(out).write_text(json.dumps(report))


def run(backups: int, updates: int) -> dict[str, Any]:
    """All ranks of one run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "report.json")
        arguments = ["--backups", str(backups), "--updates", str(updates), "--out", str(out)]
        done = subprocess.run(
            [*launcher(), "-m", "examples.demo", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode != 0:
            sys.exit(done.stdout[-4000:] + done.stderr[-4000:])
        report: dict[str, Any] = json.loads(out.read_text())
        return report


def row(name: str, cells: list[str]) -> str:
    return f"{name:<28}" + "".join(f"{cell:>16}" for cell in cells)


def table(reports: list[dict[str, Any]]) -> str:
    """Both runs side by side."""

    def per_rank(key: str) -> list[str]:
        return [" ".join(str(worker[key]) for worker in r["workers"]) for r in reports]

    pace = [r["per_update"] for r in reports]
    lines = [
        row("", ["backups=0", "backups=1"]),
        row("seconds per update", [f"{value:.4f}" for value in pace]),
        row("gradients used, rank 0-3", per_rank("used")),
        row("gradients dropped, rank 0-3", per_rank("dropped")),
        row("accuracy", [f"{r['accuracy']:.3f}" for r in reports]),
        row("seconds in total", [f"{r['seconds']:.1f}" for r in reports]),
        "",
        f"{gain(reports):.1f} times faster per update with one backup worker",
    ]
    return "\n".join(lines)


def gain(reports: list[dict[str, Any]]) -> float:
    """How many times shorter an update is in the second run."""
    without, with_one = (report["per_update"] for report in reports)
    return float(without / with_one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=50, help="updates per run")
    parser.add_argument("--backups", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out:
        train(arguments.backups, arguments.updates, arguments.out)
        return
    print(f"{RANKS} workers, rank {SLOW_RANK} ten times slower, {arguments.updates} updates each")
    reports = [run(backups, arguments.updates) for backups in (0, 1)]
    print(table(reports))
    if gain(reports) < EXPECTED_GAIN:
        sys.exit(f"less than {EXPECTED_GAIN:g} times: is this machine busy with something else?")


if __name__ == "__main__":
    main()
