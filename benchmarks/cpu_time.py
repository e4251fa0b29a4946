"""What an update costs the processor, beside an earlier revision in the same run.

    python -m benchmarks.cpu_time --against REVISION [--report | --smoke]

Both revisions train the same in turns, in processes of their own; each pair is a ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import (
    ROOT,
    SMOKE_RANKS,
    environment,
    launcher_line,
    options,
    report,
    spread,
    table,
)

Found = dict[str, float]
"""CPU milliseconds per update, mean over the ranks, by strategy."""


@contextlib.contextmanager
def checkout(revision: str, folder: Path) -> Iterator[Path]:
    """That revision's packages, under the names by which they are imported."""
    tree = folder / "tree"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--detach", "--quiet", str(tree), revision], check=True)
    try:
        yield packages(tree, folder / "before")
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def packages(tree: Path, site: Path) -> Path:
    """A directory for PYTHONPATH."""
    site.mkdir()
    (site / "lightning_dsgd").symlink_to(tree / "lightning_dsgd")
    (site / "lightning_dsgd_plugins").symlink_to(tree / "plugins")
    (site / "benchmarks").symlink_to(ROOT / "benchmarks")
    return site


def measure(site: Path, updates: int, ranks: int) -> Found:
    """One launch."""
    with tempfile.TemporaryDirectory() as name:
        line = [*launcher_line("torchrun", ranks), "-m", "benchmarks.cpu_time_worker"]
        env = {**environment(), "PYTHONPATH": str(site)}
        done = subprocess.run(
            [*line, name, str(updates)], cwd=name, env=env, capture_output=True, text=True
        )
        if done.returncode != 0:
            sys.exit(done.stdout[-3000:] + done.stderr[-6000:])
        found = [json.loads(file.read_text()) for file in Path(name).glob("*.json")]
    return {key: statistics.mean(rank[key] for rank in found) for key in found[0]}


def main() -> None:
    """Print the table; write the report if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", default="HEAD", help="a revision of this repository")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--report", action="store_true")
    given = options(parser, repetitions=1, updates=8)
    ranks = SMOKE_RANKS if given.smoke else 4
    pairs: list[tuple[Found, Found]] = []
    with tempfile.TemporaryDirectory() as name, checkout(given.against, Path(name)) as before:
        now = packages(ROOT, Path(name) / "now")
        for number in range(given.repetitions):
            order = (now, before) if number % 2 else (before, now)
            found = {site: measure(site, given.updates, ranks) for site in order}
            pairs.append((found[now], found[before]))
            print(f"{number + 1} of {given.repetitions}", file=sys.stderr, flush=True)
    text, data = tell(pairs)
    line = f"python -m benchmarks.cpu_time --against {given.against} --report"
    report("cpu_time", "CPU time per update", line, text, data, write=given.report)


def tell(pairs: list[tuple[Found, Found]]) -> tuple[str, dict[str, list[float]]]:
    """Medians and ranges, by strategy."""
    ratios = {key: [new[key] / old[key] for new, old in pairs] for key in pairs[0][0]}
    rows = [
        [
            key,
            spread([old[key] for _, old in pairs], 2),
            spread([new[key] for new, _ in pairs], 2),
            spread(ratios[key], 3),
        ]
        for key in ratios
    ]
    head = [f"{os.cpu_count()} cores, CPU ms per update and rank", "before", "now", "ratio"]
    return table(head, rows), ratios


if __name__ == "__main__":
    main()
