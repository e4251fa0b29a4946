"""Ranks that wait for one that sleeps, with their own CPU time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning_dsgd as dsgd
from tests.ranks.toy import Toy, loader, trainer_for

PAUSE = 1.0
PAUSES = range(2, 7)
"""The steps at which rank 3 sleeps."""


def idle(out: Path) -> list[tuple[float, float]]:
    """CPU seconds and wall seconds of this rank in each of its waits for rank 3."""
    strategy = dsgd.BackupWorkersStrategy(backups=0, timeout=60.0)
    trainer = trainer_for(strategy, max_steps=PAUSES.stop + 1, max_epochs=-1)
    measured: list[tuple[float, float]] = []
    end_turn = strategy.end_turn

    def timed() -> None:
        cpu, wall = time.process_time(), time.monotonic()
        end_turn()
        measured.append((time.process_time() - cpu, time.monotonic() - wall))

    strategy.end_turn = timed

    class Sleeper(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if trainer.global_step in PAUSES and trainer.global_rank == 3:
                time.sleep(PAUSE)
            return loss

    trainer.fit(Sleeper(), loader())
    return measured[PAUSES.start : PAUSES.stop]
