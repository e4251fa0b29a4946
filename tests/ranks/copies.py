"""What goes wrong where one copy of Lightning handles the other's objects."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

import lightning_dsgd as dsgd
from tests.ranks.lightning_copy import NAME, OTHER, pl
from tests.ranks.toy import Toy, loader, trainer_for

Result = dict[str, Any]


class _Halving:
    """A schedule that is not torch's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def halve(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= 2

    def state_dict(self) -> Result:
        return {}

    def load_state_dict(self, state: Result) -> None:
        return


class _OwnSchedule(Toy):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": _Halving(optimizer), "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.halve()


class _Plateau(Toy):
    """Nothing gets better: the rate falls in each epoch but the first."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "flat"}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("flat", 1.0, sync_dist=True)


def schedules(out: Path) -> Result:
    """The learning rates, relative to the first."""
    found = {}
    for module, steps in ((_OwnSchedule(), 3), (_Plateau(), -1)):
        trainer = trainer_for("backup_workers", max_steps=steps, max_epochs=3)
        trainer.fit(module, loader(64), loader(64, shuffle=False))
        found[type(module).__name__] = trainer.optimizers[0].param_groups[0]["lr"] / module.lr
    return found


def kept_in_the_background(out: Path) -> Result:
    """Does a checkpoint plugin that wraps the strategy's own get to write?"""
    keeper = pl.callbacks.ModelCheckpoint(dirpath=out / "background", filename="kept")
    trainer = trainer_for(
        dsgd.KSyncStrategy(timeout=60.0),
        [keeper],
        max_epochs=1,
        enable_checkpointing=True,
        plugins=[pl.plugins.io.AsyncCheckpointIO()],
    )
    module = Toy()
    trainer.fit(module, loader(64))
    trainer.strategy.barrier()
    kept = torch.load(keeper.best_model_path, weights_only=True)["state_dict"]
    same = all(kept[name].equal(value) for name, value in module.state_dict().items())
    read = trainer.validate(module, loader(64), verbose=False, ckpt_path=keeper.best_model_path)
    return {"same": same, "read": len(read)}


class _NoMonitor(_Plateau):
    def configure_optimizers(self) -> Any:
        return {**super().configure_optimizers(), "monitor": None}


def caught(out: Path) -> Result:
    """The user's `except` names an error of the copy that the script imports."""
    errors = importlib.import_module(f"{pl.__name__}.utilities.exceptions")
    try:
        trainer_for("k_sync", max_epochs=1).fit(_NoMonitor(), loader())
    except errors.MisconfigurationException as error:
        return {"caught": str(error)}
    return {}


def whose(out: Path) -> Result:
    """Where the code that runs comes from, and whether the other copy is there at all."""
    strategy = trainer_for(dsgd.KAsyncStrategy(), [dsgd.Stragglers(), dsgd.Stragglers()]).strategy
    parts = [strategy.validation_step, type(strategy.launcher), type(strategy._forward_redirection)]
    return {
        "modules": {part.__module__.partition(".")[0] for part in parts},
        "type": type(strategy) is dsgd.KAsyncStrategy,
        "expected": NAME,
        "other": sys.modules.get(OTHER) is not None,
    }
