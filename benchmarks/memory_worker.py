"""One rank of the benchmark of memory: trains, and leaves its peak resident memory in bytes.

torchrun --nproc-per-node 2 -m benchmarks.memory_worker ARGUMENTS WIDTH LAYERS FILE
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Stack(pl.LightningModule):
    """Large layers, small batches: nearly all memory is parameters."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.network = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out: Tensor = self.network(batch[0])
        return out.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def train(arguments: dict[str, Any] | None, width: int, layers: int) -> None:
    """Under DC-S3GD with these arguments; without any, as if Lightning were alone."""
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
    data = TensorDataset(torch.randn(64, width))
    trainer.fit(Stack(width, layers), DataLoader(data, batch_size=4))


def main() -> None:
    arguments, width, layers, file = sys.argv[1:]
    train(json.loads(arguments), int(width), int(layers))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if os.environ.get("RANK", "1") == "1":
        Path(file).write_text(json.dumps(peak))


if __name__ == "__main__":
    main()
