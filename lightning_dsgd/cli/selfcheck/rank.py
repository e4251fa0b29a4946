"""One rank of the self-test: `python -m lightning_dsgd.cli.selfcheck.rank FOLDER`.

FOLDER/job.json says what to do; each check's outcome is a line in FOLDER/RANK.jsonl. A failed check
is this rank's last: the others may stand elsewhere then.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

_RANKS = ("HOROVOD_RANK", "RANK", "LOCAL_RANK")


def main(folder: Path) -> None:
    """Check after check."""
    warnings.simplefilter("ignore")
    given = json.loads((folder / "job.json").read_text())
    for module in given["imports"]:
        importlib.import_module(module)
    checks = importlib.import_module("lightning_dsgd.cli.selfcheck.checks")
    rank = next(int(os.environ[name]) for name in _RANKS if name in os.environ)
    job = checks.Job(rank, given["ranks"], given["accelerator"], given["backend"])
    known = {**checks.CHECKS, checks.LAST: checks.killed}
    with (folder / f"{rank}.jsonl").open("a") as file:
        for name in given["checks"]:
            found = outcome(known[name], job)
            print(json.dumps({"check": name, **found}), file=file, flush=True)
            if not found["ok"]:
                break


def outcome(check: Any, job: Any) -> dict[str, Any]:
    """How it went here."""
    began = time.monotonic()
    try:
        text, fine = check(job), True
    except Exception as error:
        text, fine = f"{type(error).__name__}: {error}".removeprefix("CheckFailed: "), False
    return {"ok": fine, "text": text, "seconds": round(time.monotonic() - began, 2)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
