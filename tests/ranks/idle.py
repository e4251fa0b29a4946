"""Ranks that wait for one that sleeps, with their own CPU time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning_dsgd as dsgd
from tests.ranks.toy import Toy, loader, trainer_for

PAUSE = 2.0


def idle(out: Path) -> tuple[float, float]:
    """CPU seconds and wall seconds of this rank while it waits for update 3."""
    strategy = dsgd.BackupWorkersStrategy(backups=0, timeout=60.0)
    trainer = trainer_for(strategy, max_steps=4, max_epochs=-1)
    measured: list[tuple[float, float]] = []

    class Sleeper(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if trainer.global_step == 2:
                if trainer.global_rank == 3:
                    time.sleep(PAUSE)
                take = strategy._exchange.take

                def timed(timeout: float) -> Any:
                    cpu, wall = time.process_time(), time.monotonic()
                    update = take(timeout)
                    spent = time.process_time() - cpu, time.monotonic() - wall
                    measured.append(spent)
                    return update

                strategy._exchange.take = timed
            return loss

    trainer.fit(Sleeper(), loader())
    return measured[0]
