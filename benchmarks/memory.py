"""Peak memory of a rank under DC-S3GD, beyond plain training, in units of the model's size.

python -m benchmarks.memory --report
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import ROOT, report, table

WIDTH, LAYERS = 2048, 8
BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
KINDS = {
    "plain training": None,
    "dc_s3gd": {},
    "dc_s3gd, lambda0=0": {"lambda0": 0.0},
    "dc_s3gd, wire='fp16'": {"wire": "fp16"},
}


class Stack(pl.LightningModule):
    """Large layers, small batches: nearly all memory is parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out: Tensor = self.network(batch[0])
        return out.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def train(kind: str, file: str) -> None:
    """One rank; leaves its peak resident memory in bytes."""
    arguments = KINDS[kind]
    strategy: Any = "auto"
    if arguments is not None:
        from lightning_dsgd import DCS3GDStrategy

        strategy = DCS3GDStrategy(**arguments)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if arguments is None else 2,
        strategy=strategy,
        max_steps=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Stack(), DataLoader(TensorDataset(torch.randn(64, WIDTH)), batch_size=4))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if os.environ.get("RANK", "0") == "1" or arguments is None:
        Path(file).write_text(json.dumps(peak))


def measure(kind: str) -> int:
    """Peak memory of a fresh process of that kind; with two ranks, of rank 1."""
    start = [sys.executable]
    if KINDS[kind] is not None:
        torchrun = Path(sys.executable).parent / "torchrun"
        start = [str(torchrun), "--nproc-per-node=2", "--standalone"]
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run(
            [*start, "-m", "benchmarks.memory", "--train", kind, file.name],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
        )
        return int(json.loads(Path(file.name).read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--report", action="store_true")
    given: Any = parser.parse_args()
    if given.train:
        train(*given.train)
        return
    peaks = {kind: measure(kind) for kind in KINDS}
    plain = peaks["plain training"]
    rows = [
        [kind, f"{peak / 2**20:.0f}", f"{(peak - plain) / BYTES:+.2f}"]
        for kind, peak in peaks.items()
    ]
    text = table(["2 ranks, torch", "peak MiB per rank", "beyond plain, in model sizes"], rows)
    text += (
        f"\n\nA model of {BYTES / 2**20:.0f} MiB, SGD with momentum; resident memory of the whole "
        "process, so the collectives' own buffers are in it."
    )
    title = "DC-S3GD: memory per rank"
    command = "python -m benchmarks.memory --report"
    report("dc_s3gd_memory", title, command, text, {"model": BYTES, **peaks}, write=given.report)


if __name__ == "__main__":
    main()
