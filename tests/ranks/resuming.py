"""Training that goes on from a checkpoint."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lightning_dsgd as dsgd
from tests.ranks.lightning_copy import pl
from tests.ranks.toy import Toy, Watch, digest, flat, loader, trainer_for

Result = dict[str, Any]


def _resumable(strategy: Any, **options: Any) -> tuple[Any, Any]:
    pl.seed_everything(3)
    module = Toy().double()  # or a checkpoint's float64 weights would go through float32
    return module, trainer_for(strategy, **options)


def resume(out: Path) -> Result:
    """Two epochs and two more from the checkpoint, beside four in a row."""
    ends: Result = {"written": 0}
    for name, epochs, start in (("half", 2, None), ("resumed", 4, "half"), ("whole", 4, None)):
        module, trainer = _resumable(
            dsgd.BackupWorkersStrategy(backups=0, timeout=60.0), max_epochs=epochs
        )
        path = str(out / f"{start}.ckpt") if start else None
        trainer.fit(module, loader(), ckpt_path=path)
        write = trainer.strategy.checkpoint_io.save_checkpoint

        def counted(*arguments: Any, write: Any = write, **options: Any) -> None:
            ends["written"] += 1
            write(*arguments, **options)

        trainer.strategy.checkpoint_io.save_checkpoint = counted
        trainer.save_checkpoint(out / f"{name}.ckpt")
        ends[name] = flat(module)
    return ends


def resume_state(out: Path) -> Result:
    """AdaSync's K and reference loss, and the cyclic token, survive a checkpoint."""
    found: Result = {}
    makers = {
        "adasync": lambda: dsgd.AdaSyncStrategy("k_batch_sync", k0=1, interval=0.01, timeout=60.0),
        "cyclic": lambda: dsgd.CyclicDelayStrategy(timeout=60.0, rounds_per_epoch=6),
    }
    for name, make in makers.items():
        first = make()
        module, trainer = _resumable(first, max_steps=9, max_epochs=-1)
        trainer.fit(module, loader())
        trainer.save_checkpoint(out / f"{name}-state.ckpt")
        second = make()
        module, trainer = _resumable(second, max_steps=15, max_epochs=-1)
        trainer.fit(module, loader(), ckpt_path=str(out / f"{name}-state.ckpt"))
        saved = torch.load(out / f"{name}-state.ckpt", weights_only=False)["lightning_dsgd"]
        found[name] = {"saved": saved, "steps": trainer.global_step, "after": second.policy_state}
    return found


class _FailsEverywhere(Toy):
    """On all ranks at once, however busy the machine; and rank 0 takes its time to write, where
    there is a file of an earlier failure."""

    def __init__(self, meeting: Path, file: Path) -> None:
        super().__init__()
        self.meeting = meeting
        self.file = file

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 4:
            self._meet()
            raise KeyError("everybody's mistake")
        return super().training_step(batch, batch_idx)

    def _meet(self) -> None:
        self.file.touch()
        os.utime(self.file, (0.0, 0.0))
        (self.meeting / str(self.global_rank)).touch()
        deadline = time.monotonic() + 30.0
        while len(list(self.meeting.iterdir())) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        time.sleep(1.0 if self.global_rank == 0 else 0.0)


def saved_on_failure(out: Path) -> Result:
    """What each rank raises, and whether the checkpoint is there by then."""
    found: Result = {}
    for strategy in (
        dsgd.BackupWorkersStrategy(backups=0, timeout=60.0),
        dsgd.DCS3GDStrategy(timeout=60.0),
    ):
        name = strategy.strategy_name
        saves = pl.callbacks.OnExceptionCheckpoint(out, name)
        trainer = trainer_for(strategy, [saves], max_epochs=1, enable_checkpointing=True)
        meeting = out / f"meeting-{name}"
        meeting.mkdir(exist_ok=True)
        file = out / f"{name}.ckpt"
        try:
            trainer.fit(_FailsEverywhere(meeting, file), loader())
        except Exception as error:
            found[name] = type(error).__name__, file.stat().st_size > 0
    return found


def resume_on_fewer(out: Path) -> Result:
    """Started on 2 ranks, with a checkpoint that 4 ranks wrote, and another number of backups."""
    module = Toy().double()
    watch = Watch()
    trainer = trainer_for(
        dsgd.BackupWorkersStrategy(backups=1, timeout=60.0), [watch], max_epochs=5, devices=2
    )
    trainer.fit(module, loader(), ckpt_path=str(out / "half.ckpt"))
    return {
        "digest": digest(module),
        "epochs": trainer.current_epoch,
        "finite": bool(np.isfinite(flat(module)).all()),
        "start": watch.start,
        "first": min(watch.digests),
        "workers": {len(round_.workers) for round_ in watch.rounds},
    }
