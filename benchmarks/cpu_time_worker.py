"""One rank of the benchmark of CPU time: `torchrun -m benchmarks.cpu_time_worker FOLDER N`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dsgd as dsgd

STRATEGIES: dict[str, Any] = {
    "backup_workers, backups=0": lambda: dsgd.BackupWorkersStrategy(backups=0),
    "k_batch_async": lambda: dsgd.KBatchAsyncStrategy(),
    "dc_s3gd": lambda: dsgd.DCS3GDStrategy(),
}


class Clock(pl.Callback):
    """CPU time of the process, all its threads included, from a first update to the last."""

    def __init__(self, updates: int) -> None:
        self.first, self.last = updates // 4, updates
        self.marks: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if trainer.global_step in (self.first, self.last):
            self.marks.append(time.process_time())

    def milliseconds(self) -> float:
        return (self.marks[-1] - self.marks[0]) * 1000 / (self.last - self.first)


class Perceptron(pl.LightningModule):
    """Small: what is measured is what is around it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def train(strategy: Any, updates: int) -> float:
    clock = Clock(updates)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        callbacks=[clock],
        max_steps=updates,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = TensorDataset(torch.randn(65536, 64), torch.randn(65536, 10))
    trainer.fit(Perceptron(), DataLoader(rows, batch_size=16))
    return clock.milliseconds()


def main() -> None:
    folder, updates = Path(sys.argv[1]), int(sys.argv[2])
    found = {name: train(make(), updates) for name, make in STRATEGIES.items()}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
