"""Lightning strategies that make distributed SGD tolerate slow workers and slow networks.

Importing the package registers their names with Lightning; the classes are imported when used.
"""

from __future__ import annotations

import importlib
from typing import Any

from lightning_dsgd.trainer import names as _names

__version__ = "0.1.0"

_WHERE = {
    "ADPSGDStrategy": "lightning_dsgd_plugins.ad_psgd",
    "AdaSyncStrategy": "lightning_dsgd_plugins.adasync",
    "BackupWorkersStrategy": "lightning_dsgd_plugins.backup_workers",
    "CyclicDelayStrategy": "lightning_dsgd_plugins.cyclic_delay",
    "DCS3GDStrategy": "lightning_dsgd_plugins.dc_s3gd",
    "KAsyncStrategy": "lightning_dsgd_plugins.k_family",
    "KBatchAsyncStrategy": "lightning_dsgd_plugins.k_family",
    "KBatchSyncStrategy": "lightning_dsgd_plugins.k_family",
    "KSyncStrategy": "lightning_dsgd_plugins.k_family",
    "BackendError": "lightning_dsgd.errors",
    "ConfigurationError": "lightning_dsgd.errors",
    "DSGDError": "lightning_dsgd.errors",
    "EpochLeftError": "lightning_dsgd.errors",
    "NonFiniteError": "lightning_dsgd.errors",
    "PeerFailedError": "lightning_dsgd.errors",
    "PeerLostError": "lightning_dsgd.errors",
    "ReplicasDifferError": "lightning_dsgd.errors",
    "RoundTimeoutError": "lightning_dsgd.errors",
    "RunError": "lightning_dsgd.errors",
    "Stragglers": "lightning_dsgd.trainer.stragglers",
    "WeightDecayWarmup": "lightning_dsgd.trainer.warmup",
}

__all__ = ["__version__", *_WHERE]  # names resolved by __getattr__


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


_names.know_rank()
_names.register()
