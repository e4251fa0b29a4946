"""How fast the simulator is: K-sync with up to 10,000 workers, driving the real policy.

    python -m benchmarks.simulator

Writes benchmarks/reports/simulator.md and .json. The cost of an event is that of one announced
gradient, drawing, sorting and deciding included; peak memory is the whole process's.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import resource
import time
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness import REPORTS, options, output
from lightning_dsgd.simulate import Cluster, simulate
from lightning_dsgd.simulate.distributions import ShiftedExponential

COMMAND = "python -m benchmarks.simulator"
LIMIT_SECONDS, LIMIT_MEGABYTES = 30.0, 1000.0
SIZES, ROUNDS = (100, 1_000, 10_000), 1000
SMOKE_SIZES, SMOKE_ROUNDS = (10, 100), 10


def measure(workers: int, k: int, rounds: int) -> dict[str, Any]:
    """CPU time of one simulation on one core."""
    cluster = Cluster(workers, ShiftedExponential(0.08, 0.02))
    began = time.process_time()
    result = simulate("k_sync", cluster, k=k, updates=rounds)
    seconds = time.process_time() - began
    return {
        "workers": workers,
        "k": k,
        "rounds": rounds,
        "events": result.events,
        "cpu_seconds": round(seconds, 3),
        "microseconds_per_event": round(1e6 * seconds / result.events, 3),
        "peak_megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cost per event against the smallest cluster's, beside what log P would allow."""
    first = rows[0]
    return [
        {
            "workers": row["workers"],
            "cost": round(row["microseconds_per_event"] / first["microseconds_per_event"], 2),
            "log": round(math.log(row["workers"]) / math.log(first["workers"]), 2),
        }
        for row in rows
    ]


def report(rows: list[dict[str, Any]], grown: list[dict[str, Any]], passed: bool) -> str:
    """The report as Markdown."""
    lines = [
        "# The simulator's speed",
        "",
        f"Made by `{COMMAND}` on {date.today()}, Python {platform.python_version()}, one core.",
        "K-sync on a shifted exponential, the real `FirstKPolicy` deciding every round.",
        "",
        "| workers | K | rounds | events | CPU s | µs per event | peak MB |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows]
    lines += ["", "Growth of the cost per event, K = P:", "", "| workers | cost | log P |"]
    lines += ["|---:|---:|---:|"]
    lines += [f"| {row['workers']} | {row['cost']} | {row['log']} |" for row in grown]
    verdict = "holds" if passed else "DOES NOT HOLD"
    lines += [
        "",
        f"Requirement, 10,000 workers for 1,000 rounds within {LIMIT_SECONDS:g} s and "
        f"{LIMIT_MEGABYTES:g} MB: {verdict}.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure, write the report, fail if a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=REPORTS)
    args = options(parser)
    sizes, rounds = (SMOKE_SIZES, SMOKE_ROUNDS) if args.smoke else (SIZES, ROUNDS)
    simulate("k_sync", Cluster(4, ShiftedExponential(1.0, 1.0)), k=2, updates=10)  # imports
    full = [measure(workers, workers, rounds) for workers in sizes]
    rows = [*full, measure(sizes[-1], sizes[-1] * 96 // 100, rounds)]
    large = rows[-2:]
    passed = all(
        row["cpu_seconds"] <= LIMIT_SECONDS and row["peak_megabytes"] <= LIMIT_MEGABYTES
        for row in large
    )
    grown = growth(full)
    content = {"command": COMMAND, "rows": rows, "growth": grown, "passed": passed}
    text = report(rows, grown, passed)
    with output(args) as folder:
        (folder / "simulator.json").write_text(json.dumps(content, indent=2) + "\n")
        (folder / "simulator.md").write_text(text)
    print(text)
    return 0 if passed or args.smoke else 1


if __name__ == "__main__":
    raise SystemExit(main())
