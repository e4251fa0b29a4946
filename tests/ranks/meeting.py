"""Ranks that do not belong together, by what they train with or by their secrets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning_dsgd as dsgd
from lightning_dsgd.backends.seal import SECRET
from tests.ranks.run import rank
from tests.ranks.toy import Toy, digest, loader, trainer_for

Result = dict[str, Any]
OTHER = 1


def _end(strategy: Any) -> str:
    module = Toy()
    try:
        trainer_for(strategy, max_epochs=1).fit(module, loader(64))
        return f"finished {digest(module)}"
    except dsgd.DSGDError as error:
        return f"{type(error).__name__}: {error}"


def mismatches(out: Path) -> Result:
    """One rank has another strategy, or another argument."""
    other = rank() == OTHER
    trace = str(out / "trace") if other else None
    strategies = {
        "strategies": dsgd.KSyncStrategy() if other else dsgd.KAsyncStrategy(k=2),
        "arguments": dsgd.KAsyncStrategy(k=3 if other else 2),
        "a trace on one": dsgd.KAsyncStrategy(k=2, trace=trace),
        "comparing": dsgd.KAsyncStrategy(k=2, compare_every=0 if other else 100),
        "timeouts": dsgd.DCS3GDStrategy(timeout=60.0 if other else 50.0),
    }
    return {name: _end(strategy) for name, strategy in strategies.items()}


def _with_secret(secret: str | None) -> str:
    if secret is not None:
        os.environ[SECRET] = secret
    try:
        return _end(dsgd.BackupWorkersStrategy(timeout=60.0))
    finally:
        os.environ.pop(SECRET, None)


def secrets(out: Path) -> Result:
    """Each with one that is not the others', or that these have not at all; then all with one."""
    ours, theirs = "the secret of this job", "a secret of another job"
    other = rank() == OTHER
    return {
        "different": _with_secret(theirs if other else ours),
        "one has none": _with_secret(None if other else ours),
        "one has one": _with_secret(theirs if other else None),
        "same": _with_secret(ours),
    }
