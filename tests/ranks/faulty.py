"""One rank comes to harm in the middle of an epoch; every other notes how its run ended.

    python -m tests.ranks.faulty OUT STRATEGY:KIND:VICTIM...

KIND is raise, kill, stop, or orphan: killed while a DataLoader's worker is busy. After a raise the
same processes go on with the next case. A launcher ends all ranks as soon as one is gone. To see
what each would do by itself, ranks ignore its signal and leave only when the others have noted
their end too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

import lightning_dsgd as dsgd
from tests.ranks.lightning_copy import pl
from tests.ranks.run import rank
from tests.ranks.toy import BATCH, Toy, dataset, loader, trainer_for

LAUNCHED = not {"TORCHELASTIC_RUN_ID", "HOROVOD_RANK"}.isdisjoint(os.environ)
RANKS = {"torchrun": 3, "horovodrun": 3, "python": 2}
"""With a third rank Lightning's own launcher would end a stopped one after the third's error."""
OWN_RANKS = 3 if LAUNCHED else 2
STEP = 6
ORPHANED = 15.0
"""Seconds that a worker outlives the rank that has started it, at least."""
MISTAKE = "the victim's own mistake"


class Harm(pl.Callback):
    """What happens to the victim, when it begins its step number STEP."""

    def __init__(self, kind: str, victim: int, out: Path) -> None:
        self.kind, self.victim, self.out = kind, victim, out

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Lightning's own handler would end the run

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        time.sleep(0.01)
        if trainer.global_step != STEP or trainer.global_rank != self.victim:
            return
        (self.out / "fault").write_text(json.dumps({"time": time.time(), "pid": os.getpid()}))
        if self.kind == "raise":
            raise ValueError(MISTAKE)
        os.kill(os.getpid(), signal.SIGSTOP if self.kind == "stop" else signal.SIGKILL)


class Slow(Dataset[Any]):
    """On the victim its reader is at work for long, soon after the victim has gone."""

    def __init__(self, victim: int) -> None:
        self.rows, self.taken, self.victim = dataset(), 0, victim

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.taken += 1
        if rank() == self.victim and self.taken == (STEP + 2) * BATCH + 1:
            time.sleep(ORPHANED)
        return self.rows[index]


def data_for(kind: str, victim: int) -> Any:
    if kind != "orphan":
        return loader()
    ignore = partial(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # the launcher's
    return DataLoader(
        Slow(victim), batch_size=BATCH, num_workers=1, worker_init_fn=lambda _: ignore()
    )


def strategy_for(name: str, kind: str) -> Any:
    timeout = 5.0 if kind == "stop" else 60.0
    if name == "backup_workers":
        return dsgd.BackupWorkersStrategy(backups=0, timeout=timeout)
    return {
        "k_batch_sync": dsgd.KBatchSyncStrategy,
        "cyclic_delay": dsgd.CyclicDelayStrategy,
        "dc_s3gd": dsgd.DCS3GDStrategy,
        "ad_psgd": dsgd.ADPSGDStrategy,
    }[name](timeout=timeout)


def note(out: Path, text: str) -> None:
    threads = [t.name for t in threading.enumerate() if t.name.startswith("dsgd")]
    report = {"end": text, "time": time.time(), "pid": os.getpid(), "threads": threads}
    (out / f"end.{rank()}.part").write_text(json.dumps(report))
    (out / f"end.{rank()}.part").rename(out / f"end.{rank()}")


def wait_for_the_others(out: Path, kind: str, victim: int) -> None:
    """A stopped process cannot end itself. A launcher would, but gives it up to half a minute."""
    expected = OWN_RANKS if kind == "raise" else OWN_RANKS - 1
    deadline = time.monotonic() + 30
    while len(list(out.glob("end.?"))) < expected and time.monotonic() < deadline:
        time.sleep(0.05)
    if kind == "stop" and LAUNCHED and rank() == (victim + 1) % OWN_RANKS:
        os.kill(json.loads((out / "fault").read_text())["pid"], signal.SIGKILL)


def run(case: str, out: Path) -> BaseException | None:
    """One case, to the end of this rank's training."""
    name, kind, victim = case.split(":")
    out.mkdir(exist_ok=True)
    harm = Harm(kind, int(victim), out)
    trainer = trainer_for(strategy_for(name, kind), [harm], devices=OWN_RANKS, max_epochs=99)
    try:
        trainer.fit(Toy(), data_for(kind, int(victim)))
        note(out, "finished")
        return None
    except BaseException as error:
        note(out, f"{type(error).__name__}: {error}")
        wait_for_the_others(out, kind, int(victim))
        return error


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    out, cases = Path(sys.argv[1]), sys.argv[2:]
    *_, last = [run(case, out / case) for case in cases]
    if last is not None:
        raise last


if __name__ == "__main__":
    main()
