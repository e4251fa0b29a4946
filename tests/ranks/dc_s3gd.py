"""Scenarios for DC-S3GD; they run on any number of ranks."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

from lightning_dsgd import DCS3GDStrategy
from tests.ranks.lightning_copy import pl
from tests.ranks.toy import BATCH, Toy, dataset, digest, flat, trainer_for

Result = dict[str, Any]
RANKS = int(os.environ.get("WORLD_SIZE", os.environ.get("HOROVOD_SIZE", "1")))
RANK = int(os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0")))
TIMEOUT = 60.0


def batches(per_rank: int) -> DataLoader[Any]:
    """In fixed order, dealt out round-robin; Lightning's own sampler would shuffle."""
    data = dataset(per_rank * BATCH * RANKS)
    sampler = DistributedSampler(data, RANKS, RANK, shuffle=False)
    return DataLoader(data, batch_size=BATCH, sampler=sampler)


def fit(
    module: Any, per_rank: int, *, ckpt: str | None = None, validate: bool = False, **options: Any
) -> pl.Trainer:
    arguments = options.pop("arguments", {})
    strategy = DCS3GDStrategy(**{"timeout": TIMEOUT, **arguments})
    trainer = trainer_for(strategy, **{"devices": RANKS, "max_epochs": 1, **options})
    loaders = {"val_dataloaders": batches(2)} if validate else {}
    trainer.fit(module, batches(per_rank), ckpt_path=ckpt, **loaders)
    return trainer


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dsgd")]


# ----------------------------------------------------------------- against the oracles


def _toy(steps: int, **arguments: Any) -> Any:
    def scenario(out: Path) -> Result:
        module = Toy()
        trainer = fit(module, steps, arguments=arguments)
        tally = trainer.strategy.tally
        return {
            "end": flat(module),
            "threads": our_threads(),
            "tally": tally.as_dict() if tally else None,
        }

    return scenario


by_model = _toy(100)
by_tensor = _toy(100, lambda_scope="tensor")
stale = _toy(100, lambda0=0.0)
half_wire = _toy(30, wire="fp16")
brain_wire = _toy(30, wire="bf16")


class Scheduled(Toy):
    """Adam with two parameter groups, decay, and a schedule by the step."""

    def configure_optimizers(self) -> Any:
        first, last = self.network[0], self.network[2]
        optimizer = torch.optim.Adam(
            [
                {"params": first.parameters(), "lr": 0.01, "weight_decay": 0.1},
                {"params": last.parameters(), "lr": 0.02},
            ]
        )
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": warmup, "interval": "step"},
        }


def scheduled(out: Path) -> Result:
    module = Scheduled()
    trainer = fit(module, 60, accumulate_grad_batches=2, gradient_clip_val=0.5)
    return {"end": flat(module), "steps": trainer.global_step}


# --------------------------------------------------------------------- common points


class Normalised(Toy):
    """With buffers that differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


class Witness(pl.Callback):
    """The weights and buffers at the moments at which all ranks are to have the same."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.tentative: set[str] = set()

    def _see(self, moment: str, module: Any) -> None:
        buffers = torch.cat([buffer.double().ravel() for buffer in module.buffers()])
        self.seen.append((moment, digest(module) + str(buffers.tolist())))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._see("validation", pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.tentative.add(digest(pl_module))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._see("epoch", pl_module)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._see("checkpoint", pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._see("end", pl_module)


def common_points(out: Path) -> Result:
    witness = Witness()
    saver = pl.callbacks.ModelCheckpoint(out / "common", every_n_train_steps=5, save_top_k=-1)
    trainer = fit(
        Normalised(),
        12,
        validate=True,
        max_epochs=2,
        val_check_interval=4,
        callbacks=[witness, saver],
        enable_checkpointing=True,
    )
    tested = trainer.validate(trainer.model, batches(2), verbose=False)
    return {"seen": witness.seen, "tentative": witness.tentative, "tested": tested}


def resume(out: Path) -> Result:
    saver = pl.callbacks.ModelCheckpoint(out / "resume", save_top_k=-1, filename="{epoch}")
    whole = Normalised()
    fit(whole, 10, max_epochs=3, callbacks=[saver], enable_checkpointing=True)
    path = str(out / "resume" / "epoch=1.ckpt")
    resumed = Normalised().double()  # Lightning loads weights before it makes them float64
    trainer = fit(resumed, 10, max_epochs=3, ckpt=path)
    momentum = next(iter(trainer.optimizers[0].state.values()))["momentum_buffer"]
    return {
        "whole": digest(whole),
        "resumed": digest(resumed),
        "steps": trainer.global_step,
        "momentum": momentum.tolist(),
    }


# --------------------------------------------------------------- features of the Trainer


def mixed(out: Path) -> Result:
    class Single(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step([part.float() for part in batch], batch_idx)

    module = Single()
    fit(module, 10, precision="bf16-mixed")
    return {
        "digest": digest(module),
        "finite": bool(torch.isfinite(module.network[0].weight).all()),
    }


def thawed(out: Path) -> Result:
    """The first layer is frozen during the first epoch; one parameter is never used."""

    class Thaws(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(3))
            self.network[0].requires_grad_(False)
            self.before = self.network[0].weight.detach().clone()

        def on_train_epoch_start(self) -> None:
            self.network[0].requires_grad_(self.current_epoch > 0)

    module = Thaws()
    fit(module, 5, max_epochs=2)
    moved = bool((module.network[0].weight.double() != module.before.double()).any())
    return {"digest": digest(module), "moved": moved}


def corrections(out: Path) -> Result:
    """How long each correction was, relative to its gradient."""
    shares: list[float] = []

    class Measured(DCS3GDStrategy):
        def correct(self, points: Any, precision: float) -> None:
            before = [gradient.clone() for gradient, _, _ in points.corrigible()]
            super().correct(points, precision)
            pairs = zip(before, points.corrigible(), strict=True)
            change = torch.cat([(after - old).ravel() for old, (after, _, _) in pairs])
            whole = torch.cat([old.ravel() for old in before])
            shares.append(float(change.norm() / whole.norm()))

    trainer = trainer_for(Measured(timeout=TIMEOUT), devices=RANKS, max_epochs=1)
    trainer.fit(Toy(), batches(12))
    return {"shares": shares}


def logged(out: Path) -> Result:
    logger = pl.loggers.CSVLogger(out, name="logged", version=0)
    fit(Toy(), 6, logger=logger, log_every_n_steps=2)
    return {"rows": (out / "logged" / "version_0" / "metrics.csv").exists()}


def unequal(out: Path) -> Result:
    mine = Subset(dataset(), range(BATCH * (3 + RANK)))
    options = {"devices": RANKS, "max_epochs": 1, "use_distributed_sampler": False}
    trainer = trainer_for(DCS3GDStrategy(timeout=TIMEOUT), **options)
    trainer.fit(Toy(), DataLoader(mine, batch_size=BATCH))
    return {}
