"""Ranks that leave an epoch before its end, alone or together, in each of the ways to do so."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

import lightning_dsgd as dsgd
from tests.ranks.run import rank
from tests.ranks.toy import BATCH, Toy, dataset, digest, loader, trainer_for

Result = dict[str, Any]
LONER, STEP = 2, 3


class _BareNext(Toy):
    """Its own iterator is exhausted."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == LONER and self.global_step >= STEP:
            next(iter(()))
        return super().training_step(batch, batch_idx)


class _Skips(Toy):
    """Skips the rest of its first epoch, as Lightning has it."""

    def __init__(self, *ranks: int) -> None:
        super().__init__(lr=1e-3)
        self.ranks = ranks

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        skips = self.global_rank in self.ranks and self.global_step == STEP
        return -1 if skips and self.current_epoch == 0 else None


class _Exhausted(Dataset[Any]):
    """As a generator would behave that ends too soon, on one rank."""

    def __init__(self) -> None:
        self.rows = dataset()
        self.taken = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.taken += 1
        if rank() == LONER and self.taken > STEP * BATCH:
            raise StopIteration
        return self.rows[index]


def _ends(strategy: Any, module: Any, data: Any) -> Result:
    began = time.monotonic()
    trainer = trainer_for(strategy, max_epochs=2)
    try:
        trainer.fit(module, data)
        end = "finished"
    except Exception as error:
        end = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    return {
        "end": end, "seconds": seconds, "steps": trainer.global_step, "weights": digest(module)
    }  # fmt: skip


def _every_kind() -> dict[str, Any]:
    return {
        "backups=0": dsgd.BackupWorkersStrategy(backups=0, timeout=60.0),
        "backups=1": dsgd.BackupWorkersStrategy(backups=1, timeout=60.0),
        "k_batch_async": dsgd.KBatchAsyncStrategy(k=3, timeout=60.0),
        "cyclic_delay": dsgd.CyclicDelayStrategy(timeout=60.0),
        "dc_s3gd": dsgd.DCS3GDStrategy(timeout=60.0),
    }


def in_the_step(out: Path) -> Result:
    return {n: _ends(strategy, _BareNext(), loader()) for n, strategy in _every_kind().items()}


def by_skipping(out: Path) -> Result:
    return {n: _ends(strategy, _Skips(LONER), loader()) for n, strategy in _every_kind().items()}


def with_the_data(out: Path) -> Result:
    data = DataLoader(_Exhausted(), batch_size=BATCH)
    return {"dc_s3gd": _ends(_every_kind()["dc_s3gd"], Toy(), data)}


def together(out: Path) -> Result:
    kinds = _every_kind().items()
    return {n: _ends(strategy, _Skips(0, 1, 2, 3), loader()) for n, strategy in kinds}
