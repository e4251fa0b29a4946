"""A rank that fails where nothing is trained yet, or nothing at all; the others end with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning_dsgd as dsgd
from tests.ranks.run import rank
from tests.ranks.toy import Toy, loader, trainer_for

Result = dict[str, Any]
VICTIM = 2
MISTAKE = "the victim's own mistake"
INTERFACES = "GLOO_SOCKET_IFNAME"
STAGES = ("setup", "sanity check", "validate", "test")


class _Fails(Toy):
    """On one rank, in one of its hooks."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.fails_in = stage

    def _come_to(self, stage: str) -> None:
        if stage == self.fails_in and self.global_rank == VICTIM:
            raise ValueError(MISTAKE)

    def setup(self, stage: str) -> None:
        self._come_to("setup")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._come_to("sanity check" if self.trainer.sanity_checking else "validate")
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._come_to("test")
        super().validation_step(batch, batch_idx)


def _end(run: Callable[[], object]) -> Result:
    began = time.monotonic()
    try:
        run()
        end = "finished"
    except Exception as error:
        end = f"{type(error).__name__}: {error}"
    return {"end": end, "seconds": time.monotonic() - began}


def _trainer(**options: Any) -> Any:
    return trainer_for(dsgd.BackupWorkersStrategy(timeout=60.0), max_epochs=1, **options)


def _stage(name: str) -> Result:
    module, data, trainer = _Fails(name), loader(64, shuffle=False), _trainer()
    if name in ("setup", "sanity check"):
        return _end(lambda: trainer.fit(module, data, data))
    work = trainer.validate if name == "validate" else trainer.test
    return _end(lambda: work(module, data, verbose=False))


def stages(out: Path) -> Result:
    return {name: _stage(name) for name in STAGES}


def _with_interface(name: str, module: Any) -> Result:
    if rank() == VICTIM:
        os.environ[INTERFACES] = name
    try:
        return _end(lambda: _trainer().fit(module, loader()))
    finally:
        os.environ.pop(INTERFACES, None)


def before_the_meeting(out: Path) -> Result:
    """One rank is told of an interface that its host has not."""
    return _with_interface("nowhere", Toy())


def one_chosen_interface(out: Path) -> Result:
    """One rank alone has been told what to use."""
    return _with_interface("lo", Toy())
