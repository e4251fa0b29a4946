"""Scenarios for AD-PSGD on four ranks."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lightning_dsgd as dsgd
from tests.ranks.lightning_copy import pl
from tests.ranks.toy import Toy, digest, fine_tune, flat, loader, trainer_for

Result = dict[str, Any]


class Scatter(pl.Callback):
    """Gives every rank a model of its own to begin with, and looks at it again before the mean."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        generator = torch.Generator().manual_seed(trainer.global_rank)
        for parameter in pl_module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data.add_(noise)
        self.start = flat(pl_module)
        strategy._exchange.model.replace([torch.from_numpy(self.start.copy())])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end = flat(pl_module)


class Own(pl.Callback):
    """The model that the rank would go on from, the mean, and the exchanges' counts."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        exchange = trainer.strategy._exchange
        own = [torch.zeros(sum(p.numel() for p in pl_module.parameters()), dtype=torch.float64)]
        exchange.model.read(own)
        self.model = own[0].numpy()
        self.mean = flat(pl_module)
        self.counts = exchange.counts


def standing_still(out: Path) -> Result:
    """Learning rate 0: only exchanges move the models. The richest graph is first, for Horovod."""
    scatter, own = Scatter(), Own()
    strategy = dsgd.ADPSGDStrategy("bipartite", gradients_per_epoch=120, timeout=60.0)
    trainer = trainer_for(strategy, [scatter, own], max_epochs=1)
    trainer.fit(Toy(lr=0.0), loader())
    assert strategy.tally is not None
    return {
        "start": scatter.start,
        "own": own.model,
        "end": scatter.end,
        "counts": own.counts,
        "consensus": strategy.tally.consensus,
        "threads": [t.name for t in threading.enumerate() if t.name.startswith("dsgd")],
    }


class Rich(Toy):
    """A normalised model with an epoch schedule that logs what may be logged."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.unused = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step([self.norm(batch[0]), batch[1]], batch_idx)
        self.log("loss", loss, on_step=True)
        self.log("loss_all", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step([self.norm(batch[0]), batch[1]], batch_idx)
        self.log("weights", float(flat(self).sum()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        groups = [{"params": [first], "lr": 0.01}, {"params": others}]
        optimizer = torch.optim.Adam(groups, lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def _slow() -> Any:
    delays = dsgd.Stragglers()
    for rank in range(4):
        delays.slow(rank, seconds=0.1 if rank == 3 else 0.01)
    return delays


def trains(out: Path) -> Result:
    """Most of what a Trainer does, with a slow rank."""
    keeper = pl.callbacks.ModelCheckpoint(dirpath=out / "kept", monitor="val_loss", save_top_k=-1)
    own = Own()
    module = Rich()
    strategy = dsgd.ADPSGDStrategy("ring", timeout=60.0)
    trainer = trainer_for(
        strategy,
        [keeper, pl.callbacks.EarlyStopping("val_loss", patience=9), _slow(), own],
        max_epochs=3,
        limit_train_batches=10,
        limit_val_batches=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        enable_checkpointing=True,
        logger=pl.loggers.CSVLogger(out / "csv"),
        log_every_n_steps=2,
    )
    trainer.fit(module, loader(), loader(64, shuffle=False))
    assert strategy.tally is not None
    return {
        "digest": digest(module),
        "end": flat(module),
        "own": own.model,
        "statistics": module.norm.running_mean.tolist(),
        "lr": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "gradients": [counts.gradients for counts in strategy.tally.ranks],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "best": keeper.best_model_path,
        "last": sorted(str(path) for path in (out / "kept").glob("epoch=2*")),
        "log": trainer.logger.log_dir if trainer.logger else None,
    }


def resumes(out: Path) -> Result:
    """Two epochs more from the third one's checkpoint."""
    (path,) = (out / "kept").glob("epoch=2*")
    epochs: list[int] = []

    class Epochs(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
            epochs.append(trainer.current_epoch)

    module = Rich()
    strategy = dsgd.ADPSGDStrategy("exponential", timeout=60.0)
    trainer = trainer_for(strategy, [Epochs()], max_epochs=5, limit_train_batches=10)
    trainer.fit(module, loader(), loader(64, shuffle=False), ckpt_path=str(path))
    trainer.validate(module, loader(64, shuffle=False), verbose=False)
    assert strategy.tally is not None
    return {
        "digest": digest(module),
        "epochs": sorted(set(epochs)),
        "gradients": sum(counts.gradients for counts in strategy.tally.ranks),
    }


def resyncs(out: Path) -> Result:
    """Training goes on from the mean after an epoch, or some steps; or from the own model."""
    found: Result = {}
    for name, every in (("never", "never"), ("epoch", "epoch"), ("steps", 3)):
        own = Own()
        strategy = dsgd.ADPSGDStrategy(resync_every=every, gradients_per_epoch=40, timeout=60.0)
        trainer_for(strategy, [own], max_epochs=2).fit(Toy(lr=0.1, momentum=0.0), loader())
        found[name] = {"own": own.model, "mean": own.mean}
    return found


def _refused(strategy: Any = None, module: Any = None, **options: Any) -> str:
    try:
        trainer = trainer_for(strategy or "ad_psgd", **{"max_epochs": 1, **options})
        trainer.fit(module or Toy(), loader(), loader(16, shuffle=False))
    except dsgd.ConfigurationError as error:
        return str(error)
    return "nothing was refused"


def refuses(out: Path) -> Result:
    class Manual(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    keeper = pl.callbacks.ModelCheckpoint(dirpath=out / "no", every_n_train_steps=2)
    timer = pl.callbacks.Timer(timedelta(hours=1))
    return {
        "max_steps": _refused(max_steps=5, max_epochs=-1),
        "val_check_interval": _refused(val_check_interval=0.5),
        "checkpoints inside an epoch": _refused(callbacks=[keeper], enable_checkpointing=True),
        "max_time": _refused(callbacks=[timer]),
        "automatic optimization": _refused(module=Manual()),
        "too short": _refused(limit_train_batches=1, accumulate_grad_batches=2),
    }


def refuses_inside(out: Path) -> Result:
    """A collective in each step; the process cannot go on after this one."""

    class PerStep(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=True, sync_dist=True)
            return loss

    return {"message": _refused(module=PerStep())}


def small_things(out: Path) -> Result:
    """fast_dev_run, an endless dataset, and layers that are frozen and freed."""

    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            while True:
                yield torch.randn(6, dtype=torch.float64), torch.randn(3, dtype=torch.float64)

    trainer_for("ad_psgd", fast_dev_run=2).fit(Toy(), loader(), loader(16, shuffle=False))
    strategy = dsgd.ADPSGDStrategy(gradients_per_epoch=20, timeout=60.0)
    module = Toy()
    endless = torch.utils.data.DataLoader(Endless(), batch_size=4)
    trainer_for(strategy, max_epochs=2).fit(module, endless)
    assert strategy.tally is not None
    return {
        "gradients": sum(c.gradients for c in strategy.tally.ranks),
        "digest": digest(module),
        "tuned": fine_tune(dsgd.ADPSGDStrategy(timeout=60.0), callbacks=[_slow()]),
    }
