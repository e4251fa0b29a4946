"""One rank of a benchmark: runs each case of a list and leaves one JSON file.

torchrun --nproc-per-node 4 -m benchmarks.worker CASES.json OUT
"""

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
from torch.utils.data import DataLoader

from benchmarks.data import SOURCES
from lightning_dsgd import Stragglers
from lightning_dsgd.registry import load


class Network(pl.LightningModule):
    """A multi-layer perceptron under SGD."""

    def __init__(self, inputs: int, widths: list[int], lr: float, momentum: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in widths:
            layers += [nn.Linear(inputs, width), nn.ReLU()]
            inputs = width
        self.network = nn.Sequential(*layers, nn.Linear(inputs, 10))
        self.lr, self.momentum = lr, momentum

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


class Clock(pl.Callback):
    """Times updates after a warm-up, and stops when enough gradients have been used."""

    def __init__(self, warm_up: int, gradients: int | None) -> None:
        self.warm_up, self.gradients = warm_up, gradients
        self.began = self.ended = 0.0
        self.updates = self.used = 0
        self.exchange: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        now = time.perf_counter()
        if trainer.global_step == self.warm_up:
            self.began = now
        elif trainer.global_step > self.warm_up:
            self.updates, self.ended = self.updates + 1, now
        round_ = getattr(trainer.strategy, "last_round", None)
        self.used += sum(round_.batches) if round_ is not None else trainer.world_size
        desk = getattr(trainer.strategy, "_desk", None)
        if desk is not None:
            self.exchange.append(desk.exchange_seconds)
        if self.gradients is not None and self.used >= self.gradients:
            trainer.should_stop = True


def accuracy(module: Network, data: Any) -> float:
    images, labels = data.tensors
    with torch.no_grad():
        return float((module.network(images).argmax(1) == labels).float().mean())


def strategy_of(case: dict[str, Any]) -> Any:
    if case["strategy"] == "ddp":
        return "ddp"
    return load(case["strategy"])(timeout=120.0, **case.get("arguments", {}))


def run(case: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    pl.seed_everything(case.get("seed", 0), verbose=False)
    training, validation = SOURCES[case.get("data", "noise")]()
    module = Network(
        training.tensors[0].shape[1],
        case.get("widths", [64]),
        case.get("lr", 0.1),
        case.get("momentum", 0.0),
    )
    strategy = strategy_of(case)
    clock = Clock(case.get("warm_up", 5), case.get("gradients"))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=strategy,
        callbacks=[clock, Stragglers(case.get("stragglers"), seed=case.get("seed", 0))],
        max_steps=case.get("steps", -1),
        max_epochs=case.get("epochs", -1),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    began = time.perf_counter()
    batch = case.get("batch", 32)
    trainer.fit(module, DataLoader(training, batch_size=batch, shuffle=True, drop_last=True))
    seconds = time.perf_counter() - began
    tally = getattr(strategy, "tally", None)
    return {
        "seconds": seconds,
        "per_update": (clock.ended - clock.began) / max(1, clock.updates),
        "updates": trainer.global_step,
        "used": clock.used,
        "measured_seconds": clock.ended - clock.began,
        "exchange": sorted(clock.exchange)[len(clock.exchange) // 2] if clock.exchange else None,
        "idle": getattr(strategy, "idle_seconds", None),
        "accuracy": accuracy(module, validation) if case.get("evaluate") else None,
        "tally": tally.as_dict() if tally is not None else None,
    }


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    rank = os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0"))
    found = [run(case) for case in cases]
    Path(sys.argv[2], f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
