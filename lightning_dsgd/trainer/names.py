"""The strategies' names, registered with every copy of Lightning, and the rank it logs by."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import EntryPoint
from typing import Any

from lightning_dsgd.registry import algorithms


def register() -> None:
    """Make `Trainer(strategy="backup_workers")` work, whichever Lightning the user imports."""
    if os.path.basename(sys.argv[0] if sys.argv else "") == "lightning-dsgd":
        return  # the command line starts in a fraction of the time without Lightning
    from lightning_dsgd.trainer.worlds import installed_copies

    for copy in installed_copies():
        registry = importlib.import_module(f"{copy}.strategies").StrategyRegistry
        for name, point in algorithms().items():
            for alias in _names(name, point):
                registry.register(alias, _Lazy(point), description=name, override=True)


def _names(name: str, point: EntryPoint) -> list[str]:
    """The name, and the dotted paths that the command line lower-cases and takes for names."""
    cls = point.attr.lower()
    return [name, f"lightning_dsgd.{cls}", f"{point.module.lower()}.{cls}"]


class _Lazy:
    """Stands for a strategy class in a registry and imports it when called."""

    def __init__(self, point: EntryPoint) -> None:
        self._point = point
        self.__name__ = point.attr

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._point.load()(*args, **kwargs)


def know_rank() -> None:
    """Lightning does not know horovodrun's rank; without it every rank would log as rank 0."""
    if "HOROVOD_RANK" in os.environ:
        from lightning_utilities.core.rank_zero import rank_zero_only

        rank = int(os.environ["HOROVOD_RANK"])
        rank_zero_only.rank = rank  # type: ignore[attr-defined]  # how it is set everywhere
