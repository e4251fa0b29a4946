"""Runs scenarios on one rank: `python -m tests.ranks.run OUT [FOLDER/]MODULE.NAME...`.

Starting ranks costs seconds, so one launch serves many scenarios. Each leaves one file per rank in
its module's folder, within FOLDER if there is one, with what it returned or the error it raised.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def rank() -> int:
    """This process's rank under any launcher."""
    for name in ("HOROVOD_RANK", "RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def outcome(function: Any, out: Path) -> dict[str, Any]:
    """What the scenario gives back, or how it fails."""
    try:
        return {"result": function(out)}
    except Exception as error:
        return {
            "error": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
        }


def main() -> None:
    importlib.import_module("tests.ranks.lightning_copy")  # hides the other copy from our package
    for given in sys.argv[2:]:
        folder, _, scenario = given.rpartition("/")
        module, _, name = scenario.partition(".")
        scenarios = importlib.import_module(f"tests.ranks.{module}")
        out = Path(sys.argv[1], folder, module)
        out.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        result = outcome(getattr(scenarios, name), out)
        print(f"{given}: {time.monotonic() - began:.1f} s", flush=True)
        (out / f"{name}.{rank()}.pickle").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
