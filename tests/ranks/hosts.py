"""Ranks on several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning_dsgd as dsgd
from lightning_dsgd.backends import horovod_launched
from lightning_dsgd.backends.hosts import this_place
from tests.ranks.lightning_copy import pl
from tests.ranks.toy import Toy, digest, loader, trainer_for


class Endpoint(pl.Callback):
    """Where the control plane listens."""

    found = ""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        coordinator = trainer.strategy._coordinator
        self.found = coordinator.ticket.endpoint if coordinator else ""


def trains(out: Path) -> dict[str, Any]:
    """One strategy of each exchange; that of the pairs first, for Horovod."""
    result: dict[str, Any] = {}
    for cls in (dsgd.ADPSGDStrategy, dsgd.BackupWorkersStrategy, dsgd.DCS3GDStrategy):
        module, endpoint = Toy(), Endpoint()
        strategy = cls(timeout=60.0)
        hosts = {} if horovod_launched() else {"num_nodes": 2}  # horovodrun tells by itself
        trainer = trainer_for(strategy, [endpoint], devices=2, max_epochs=2, **hosts)
        trainer.fit(module, loader(64))
        result[cls.strategy_name] = digest(module)
        result["endpoint"] = endpoint.found
        result["place"] = this_place(trainer.strategy.cluster_environment.main_address)
    return result
