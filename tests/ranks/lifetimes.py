"""What is left of trainings that fail, and of one that a rank has missed."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import lightning_dsgd as dsgd
from lightning_dsgd.backends import on_horovod, on_torch
from tests.ranks.run import rank
from tests.ranks.toy import Toy, loader, trainer_for

Result = dict[str, Any]
WARM, MORE = 1, 3
"""Failures of each strategy before the first count, and until the second."""
ABSENT = 2


class _Fails(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step >= 2 and self.global_rank == 1:
            raise ValueError("a mistake")
        return super().training_step(batch, batch_idx)


def _opened() -> tuple[int, int]:
    """Threads and descriptors of this process, garbage aside."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def _end(strategy: Any, module: Any) -> str:
    try:
        size = int(os.environ.get("WORLD_SIZE", os.environ.get("HOROVOD_SIZE", "")))
        trainer_for(strategy, max_epochs=1, devices=size).fit(module, loader())
        return "finished"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _fail(times: int) -> list[str]:
    kinds = (dsgd.BackupWorkersStrategy, dsgd.CyclicDelayStrategy, dsgd.DCS3GDStrategy)
    return [_end(kind(timeout=60.0), _Fails()) for _ in range(times) for kind in kinds]


def failures(out: Path) -> Result:
    """What is open after a few, and after many more. A good one ends it, for the exit code."""
    ends = _fail(WARM)
    before = _opened()
    ends += _fail(MORE)
    after = _opened()
    last = _end(dsgd.BackupWorkersStrategy(backups=0, timeout=60.0), Toy())
    return {"ends": ends, "before": before, "after": after, "last": last}


def one_apart(out: Path) -> Result:
    """After a common training one rank misses a second, and comes when the others are at a third.

    Whoever waits for a rank to come does so for seconds here, not for a minute.
    """
    on_torch.MEETING_SECONDS = on_horovod.MEETING_SECONDS = 3.0
    ends = [_end(dsgd.BackupWorkersStrategy(timeout=60.0), Toy())]
    if rank() != ABSENT:
        ends.append(_end(dsgd.BackupWorkersStrategy(timeout=3.0), Toy()))
        (out / f"missed.{rank()}").touch()
    deadline = time.monotonic() + 60.0
    while len(list(out.glob("missed.*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    module, began = Toy(), time.monotonic()
    ends.append(_end(dsgd.BackupWorkersStrategy(timeout=10.0), module))
    return {"ends": ends, "steps": module.global_step, "seconds": time.monotonic() - began}
