"""One rank comes to harm in the middle of an epoch; every other notes how its run ended.

    python -m tests.ranks.faulty KIND VICTIM OUT

A launcher ends all ranks as soon as one is gone. To see what each would do by itself, ranks ignore
its signal and leave only when the others have noted their end too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

import lightning_dsgd as dsgd
from tests.ranks.run import rank
from tests.ranks.toy import Toy, loader, trainer_for

RANKS = 3
STEP = 6


class Harm(pl.Callback):
    def __init__(self, kind: str, victim: int, out: Path) -> None:
        self.kind, self.victim, self.out = kind, victim, out

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        time.sleep(0.01)
        if trainer.global_step != STEP or trainer.global_rank != self.victim:
            return
        (self.out / "fault").write_text(json.dumps({"time": time.time(), "pid": os.getpid()}))
        if self.kind == "raise":
            raise ValueError("the victim's own mistake")
        os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


def note(out: Path, text: str) -> None:
    report = {"end": text, "time": time.time(), "pid": os.getpid()}
    (out / f"end.{rank()}").write_text(json.dumps(report))


def wait_for_the_others(out: Path, victim: int) -> None:
    """A stopped process cannot end itself, so the first survivor does it."""
    expected = RANKS - 1
    deadline = time.monotonic() + 30
    while len(list(out.glob("end.*"))) < expected and time.monotonic() < deadline:
        time.sleep(0.05)
    if sys.argv[1] == "stop" and rank() == (victim + 1) % RANKS:
        os.kill(json.loads((out / "fault").read_text())["pid"], signal.SIGKILL)


def main() -> None:
    kind, victim, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    strategy = dsgd.BackupWorkersStrategy(backups=0, timeout=5.0 if kind == "stop" else 60.0)
    trainer = trainer_for(
        strategy, [Harm(kind, victim, out)], devices=RANKS, max_steps=400, max_epochs=-1
    )
    try:
        trainer.fit(Toy(), loader())
        note(out, "finished")
    except BaseException as error:
        note(out, f"{type(error).__name__}: {error}")
        wait_for_the_others(out, victim)
        raise


if __name__ == "__main__":
    main()
