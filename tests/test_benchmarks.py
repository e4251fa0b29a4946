"""Every benchmark still runs: all of its code, with next to nothing to do, two at a time."""

from __future__ import annotations

import argparse
import gzip
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks import data, harness
from benchmarks.__main__ import BENCHMARKS
from benchmarks.network import available
from tests.launching import BIN, ROOT, environment

ACCURACY = ["strategy", "accuracy, 1 seeds", "mean", "to synchronous", "updates"]
SLOW = ["scenario", "strategy", "seconds per update"]
COLUMNS = {
    "overhead": ["4 ranks, torch, no slow rank", "seconds per update: median (range)"],
    "straggler": [*SLOW, "times the pace of Lightning DDP"],
    "straggler_horovodrun": [*SLOW, "times the pace of backup_workers, backups=0"],
    "closed_forms": [
        *("K = 2 of 4, Exp(0.1 s)", "closed form", "one exchange", "measured", "ratio")
    ],
    "accuracy": ACCURACY,
    "cyclic_digits": ACCURACY,
    "cyclic_fashion": ACCURACY,
    "cyclic": [
        *("rank 3 ten times slower", "idle %, rank 0-3", "mini-batches/s", "times synchronous")
    ],
    "prediction": [
        "predicted / measured seconds per update",
        *("from its own record", "from the synchronous run's"),
    ],
    "simulator": ["workers", "K", "rounds", "events", "CPU s", "µs per event", "peak MB"],
    "error_runtime": ["variant", "K = 1", "K = 2", "K = 4", "K = 8", "AdaSync", "leaders"],
    "gossip": ["4 ranks, the 3 fast ones", "nobody slow", "one 10 times slower", "ratio"],
    "gossip_accuracy": [
        *("4 ranks", "accuracy: median (range)", "behind, on average", "gradients")
    ],
    "delayed_accuracy": ["4 ranks", "test accuracy %, by seed", "mean", "to synchronous"],
    "chaos": ["fault", "times", "launchers", "must be", "was", "longest, s"],
    "memory": ["2 ranks, torch", "peak MiB per rank", "beyond plain, in model sizes"],
    "cpu_time": [f"{os.cpu_count()} cores, CPU ms per update and rank", "before", "now", "ratio"],
    "slow_network": [
        *("x", "c", "dc_s3gd", "backup_workers, backups=0", "Lightning DDP"),
        *("dc_s3gd / max(x, c)", "backups=0 / (x + c)", "DDP / (x + c)"),
    ],
}
"""The head of each benchmark's first table."""
PARTS = {"__main__", "worker", "memory_worker", "cpu_time_worker", "chaos_worker", "chaos_stranger"}
"""The names of the first are in the table above; the others are what benchmarks launch."""
TOGETHER = tuple(name for name in BENCHMARKS if "horovodrun" not in name)
"""One launch serves them all, for starting ranks is what takes the time."""
GROUPS = [TOGETHER, *((name,) for name in COLUMNS if name not in TOGETHER)]
Done = subprocess.CompletedProcess[str]


def smoke(names: tuple[str, ...]) -> Done:
    """A smoke run, as a user starts it; what hangs is killed with all that it started."""
    where = ["benchmarks", *names] if names[0] in BENCHMARKS else [f"benchmarks.{names[0]}"]
    line = [str(BIN / "python"), "-m", *where, "--smoke"]
    options: dict[str, Any] = {"cwd": ROOT, "env": environment(), "start_new_session": True}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(line, **options, **pipes)
    try:
        output, errors = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, errors = process.communicate()
    return Done(line, process.returncode, output, errors)


def kept() -> dict[Path, int]:
    """What benchmarks write when they are told to, and when they have done so last."""
    files = [*harness.REPORTS.iterdir(), *(ROOT / "docs").iterdir()]
    return {file: file.stat().st_mtime_ns for file in files}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, ...], Future[Done]]]:
    """All that are asked for, two at a time from the first test on; none leaves anything."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    given = [call.params.get("group") for call in calls if call]
    asked = [names for names in GROUPS if names in given]
    before = kept()
    with ThreadPoolExecutor(2) as pool:
        able = [names for names in asked if names != ("slow_network",) or available()]
        yield {names: pool.submit(smoke, names) for names in able}
    assert kept() == before


def heads(text: str) -> list[list[str]]:
    """The first line of each table that has a rule and a row as wide."""
    lines = [line.strip("| ").split("|") for line in text.splitlines()]
    rules = [n for n, line in enumerate(lines) if set("".join(line)) in ({"-", " "}, {"-", ":"})]
    wide = [n for n in rules if len(lines[n - 1]) == len(lines[n]) == len(lines[n + 1])]
    return [[cell.strip() for cell in lines[n - 1]] for n in wide]


@pytest.mark.parametrize("group", GROUPS, ids=lambda names: names[0] if len(names) == 1 else "all")
def test_benchmarks_run_and_show_their_tables(runs: Any, group: tuple[str, ...]) -> None:
    if group not in runs:
        pytest.skip("needs root, iproute2 and network namespaces")
    done = runs[group].result()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert heads(done.stdout)[: len(group)] == [COLUMNS[name] for name in group]


def test_every_benchmark_has_a_smoke_run() -> None:
    files = (ROOT / "benchmarks").glob("*.py")
    programs = {file.stem for file in files if '__name__ == "__main__"' in file.read_text()}
    assert programs - PARTS | set(BENCHMARKS) == set(COLUMNS)


def test_a_smoke_run_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", action="store_true")
    monkeypatch.setattr("sys.argv", ["benchmark", "--report", "--smoke"])
    with pytest.raises(SystemExit):
        harness.options(parser)
    assert "--smoke writes no report" in capsys.readouterr().err


def test_a_report_tells_how_it_was_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(harness, "REPORTS", tmp_path)
    harness.report("pace", "The pace", "python -m pace", "| a |", {"a": 1}, write=True)
    text = (tmp_path / "pace.md").read_text()
    assert text.startswith("# The pace\n") and "Made by `python -m pace`." in text
    assert (tmp_path / "pace.json").read_text() == '{\n "a": 1\n}\n'


def test_fashion_is_read_as_it_is_packed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Smoke runs do without: it is a package of the system."""
    for part, count in (("train", 3), ("t10k", 2)):
        pixels, labels = bytes(16) + bytes(784 * count), bytes(8) + bytes(range(count))
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(pixels))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    monkeypatch.setattr(data, "FASHION", tmp_path)
    training, validation = data.fashion()
    assert training.tensors[0].shape == (3, 784) and training.tensors[1].tolist() == [0, 1, 2]
    assert validation.tensors[1].tolist() == [0, 1]
