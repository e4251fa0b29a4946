"""Runs lists of cases through a launcher, and writes tables, spreads and reports.

Every benchmark has an option `--smoke`: all of its code with next to nothing to do, for the tests.

Machines are noisy, so rivals run in the same launch and figures are medians over launches with
their spread. Starting ranks costs seconds, so smoke runs share a launch where they can.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "benchmarks" / "reports"
Case = dict[str, Any]
Launch = list[list[Any]]
"""What came of a launch: [case][rank]."""
SMOKE_RANKS = 2
LEAST: dict[str, float] = {
    "steps": 6,
    "warm_up": 1,
    "gradients": 12,
    "gradients_per_epoch": 12,
    "epochs": 1,
    "widths": 16,
    "batch": 16,
    "k": SMOKE_RANKS,
    "rank": SMOKE_RANKS - 1,
    "seconds": 0.001,
    "mean": 0.001,
    "minimum": 0.001,
}
"""What a smoke run makes of the numbers of a case, wherever they stand in it."""


def options(parser: argparse.ArgumentParser, **small: Any) -> Any:
    """What the command line says; `--smoke` stands for these values of the other options."""
    text = "as little as goes through everything; writes no report"
    parser.add_argument("--smoke", action="store_true", help=text)
    given = parser.parse_args()
    if given.smoke:
        if getattr(given, "report", False):
            parser.error("--smoke writes no report: its figures mean nothing")
        vars(given).update(small)
        print(f"A smoke run, {SMOKE_RANKS} ranks at most: its figures mean nothing.\n")
    return given


@contextlib.contextmanager
def output(given: Any) -> Iterator[Path]:
    """The folder `--output`; that of a smoke run does not outlive it."""
    if not given.smoke:
        given.output.mkdir(parents=True, exist_ok=True)
        yield given.output
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def shrunk(value: Any, key: str = "") -> Any:
    """The same case with next to nothing to do, and without data that must be installed."""
    if isinstance(value, dict):
        return {name: shrunk(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [shrunk(part, key) for part in value]
    if key == "data" and value == "fashion":
        return "noise"
    return min(value, LEAST[key]) if key in LEAST else value


def every_rank(seconds: float, ranks: int = 4) -> list[dict[str, Any]]:
    """A pause that stands for the work of a mini-batch, on every rank."""
    return [{"kind": "slow", "rank": rank, "seconds": seconds} for rank in range(ranks)]


def launcher_line(launcher: str, ranks: int) -> list[str]:
    """The launcher's command line, up to `-m` and the module."""
    here = Path(sys.executable).parent
    return {
        "torchrun": [str(here / "torchrun"), f"--nproc-per-node={ranks}", "--standalone"],
        "horovodrun": [str(here / "horovodrun"), "-np", str(ranks), sys.executable],
    }[launcher]


def environment(**extra: str) -> dict[str, str]:
    """One thread per rank, the project's modules importable."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **extra}


def execute(line: list[str], timeout: float = 900) -> None:
    """Run it to its end; if it fails, end with what it said."""
    done = subprocess.run(
        line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout
    )
    if done.returncode != 0:
        sys.exit(done.stdout[-3000:] + done.stderr[-6000:])


def launch(cases: list[Case], *, launcher: str = "torchrun", smoke: bool = False) -> Launch:
    """Every rank's results. Lightning's DDP initialises torch's default group for good, so its
    cases come last."""
    ranks = SMOKE_RANKS if smoke else 4
    order = sorted(range(len(cases)), key=lambda index: cases[index]["strategy"] == "ddp")
    with tempfile.TemporaryDirectory() as folder:
        program = worker([cases[index] for index in order], folder, smoke)
        execute([*launcher_line(launcher, ranks), *program])
        found = dict(zip(order, results(folder, ranks), strict=True))
    return [found[index] for index in range(len(cases))]


class Asked(NamedTuple):
    """What a benchmark wants its ranks to do."""

    launches: list[list[Case]]
    launcher: str = "torchrun"


Benchmark = Generator[Asked, list[Launch], None]
"""Asks once, and is told what came of each launch."""


def conduct(benchmarks: list[Benchmark], *, smoke: bool) -> None:
    """Run benchmarks of as many launches each; those with the same launcher share them."""
    asked = [next(benchmark) for benchmark in benchmarks]
    for launcher in sorted({one.launcher for one in asked}, reverse=True):
        sharing = [index for index, one in enumerate(asked) if one.launcher == launcher]
        found = shared([asked[index].launches for index in sharing], launcher, smoke)
        for index, launches in zip(sharing, found, strict=True):
            with contextlib.suppress(StopIteration):
                benchmarks[index].send(launches)


def shared(wanted: list[list[list[Case]]], launcher: str, smoke: bool) -> list[list[Launch]]:
    """[benchmark][launch]: everybody's first launch is one, everybody's second, and so on."""
    found: list[list[Launch]] = [[] for _ in wanted]
    for together in zip(*wanted, strict=True):
        everything = [case for cases in together for case in cases]
        rest = iter(launch(everything, launcher=launcher, smoke=smoke))
        for own, cases in zip(found, together, strict=True):
            own.append([next(rest) for _ in cases])
    return found


def worker(cases: list[Case], folder: str, smoke: bool) -> list[str]:
    """The arguments with which a Python is a rank that runs these cases."""
    file = Path(folder, "cases.json")
    file.write_text(json.dumps(shrunk(cases) if smoke else cases))
    return ["-m", "benchmarks.worker", str(file), folder]


def results(folder: str, ranks: int) -> Launch:
    """What the ranks left."""
    per_rank = [json.loads(Path(folder, f"rank-{r}.json").read_text()) for r in range(ranks)]
    return [list(found) for found in zip(*per_rank, strict=True)]


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
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    machine = f"{date.today().isoformat()}, {os.cpu_count()} cores, {versions}"
    head = f"# {title}\n\n{machine}. Made by `{command}`.\n\n"
    (REPORTS / f"{name}.md").write_text(head + text + "\n")
    (REPORTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
