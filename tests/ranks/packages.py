"""What a user has who installs the wheel: every family, and a strategy from another package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning_dsgd as dsgd
import lightning_dsgd_plugins
from tests.ranks.lightning_copy import pl
from tests.ranks.toy import Toy, digest, loader, trainer_for

RESUMED = ("backup_workers", "dc_s3gd", "ad_psgd")
ROUNDS = ("backup_workers", "k_batch_async", "adasync", "cyclic_delay", "windowed")


def installed(out: Path) -> dict[str, Any]:
    """Two epochs with each strategy, by its registered name; and on from a checkpoint."""
    ends, resumed = {}, {}
    for name in (*ROUNDS, "dc_s3gd", "ad_psgd"):
        module = Toy(lr=0.01, momentum=0.0)
        trainer = trainer_for(name, devices=2, max_epochs=2)
        trainer.fit(module, loader(64), loader(64, shuffle=False))
        ends[name] = trainer.current_epoch, digest(module)
        if name in RESUMED:
            resumed[name] = _go_on(name, trainer, str(out / f"{name}.ckpt"))
    files = [module.__file__ for module in (dsgd, lightning_dsgd_plugins)]
    return {"lightning": pl.__version__, "files": files, "ends": ends, "resumed": resumed}


def _go_on(name: str, trainer: Any, path: str) -> tuple[int, bool]:
    """One more epoch from what was written; and is what was written what was validated?"""
    trainer.save_checkpoint(path)
    module = Toy(lr=0.01, momentum=0.0)
    again = trainer_for(name, devices=2, max_epochs=3)
    again.fit(module, loader(64), ckpt_path=path)
    (found,) = again.validate(module, loader(64, shuffle=False), ckpt_path=path)
    return again.current_epoch, found["val_loss"] == trainer.callback_metrics["val_loss"]
