"""What a user has who installs the wheel: every family, and a strategy from another package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning_dsgd as dsgd
import lightning_dsgd_plugins
from tests.ranks.lightning_copy import pl
from tests.ranks.toy import Toy, digest, loader, trainer_for

ROUNDS = ("backup_workers", "k_batch_async", "adasync", "cyclic_delay", "windowed")


def installed(out: Path) -> dict[str, Any]:
    """Two epochs with each strategy, by its registered name."""
    ends = {}
    for name in (*ROUNDS, "dc_s3gd", "ad_psgd"):
        module = Toy(lr=0.01, momentum=0.0)
        trainer = trainer_for(name, devices=2, max_epochs=2)
        trainer.fit(module, loader(64), loader(64, shuffle=False))
        ends[name] = trainer.current_epoch, digest(module)
    files = [module.__file__ for module in (dsgd, lightning_dsgd_plugins)]
    return {"lightning": pl.__version__, "files": files, "ends": ends}
