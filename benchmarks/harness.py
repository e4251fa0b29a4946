"""Runs lists of cases through a launcher, and writes tables, spreads and reports.

Machines are noisy, so rivals run in the same launch and figures are medians over launches with
their spread. Lightning's DDP initialises torch's default group for good, so it comes last in its
launch.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "benchmarks" / "reports"
Case = dict[str, Any]


def every_rank(seconds: float, ranks: int = 4) -> list[dict[str, Any]]:
    """A pause that stands for the work of a mini-batch, on every rank."""
    return [{"kind": "slow", "rank": rank, "seconds": seconds} for rank in range(ranks)]


def launch(
    cases: list[Case], *, ranks: int = 4, launcher: str = "torchrun", timeout: float = 900
) -> list[list[Any]]:
    """Every rank's results: [case][rank]."""
    here = Path(sys.executable).parent
    start = {
        "torchrun": [str(here / "torchrun"), f"--nproc-per-node={ranks}", "--standalone"],
        "horovodrun": [str(here / "horovodrun"), "-np", str(ranks), sys.executable],
    }[launcher]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cases.json")
        file.write_text(json.dumps(cases))
        done = subprocess.run(
            [*start, "-m", "benchmarks.worker", str(file), folder],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode != 0:
            sys.exit(done.stdout[-3000:] + done.stderr[-6000:])
        per_rank = [json.loads(Path(folder, f"rank-{r}.json").read_text()) for r in range(ranks)]
    return [list(results) for results in zip(*per_rank, strict=True)]


def spread(values: list[float], digits: int = 4) -> str:
    """Median, and the range of all."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(name: str, title: str, command: str, text: str, data: Any, *, write: bool) -> None:
    """Print table and JSON; with `write` keep a dated report with the command that made it."""
    print(text, json.dumps(data), sep="\n\n")
    if not write:
        return
    REPORTS.mkdir(exist_ok=True)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    machine = f"{date.today().isoformat()}, {os.cpu_count()} cores, {versions}"
    head = f"# {title}\n\n{machine}. Made by `{command}`.\n\n"
    (REPORTS / f"{name}.md").write_text(head + text + "\n")
    (REPORTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
