"""A rank dies, stops or raises: the others end with its name, soon, and leave nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import asked
from tests.launching import ROOT, alive, all_gone, command, environment
from tests.ranks.faulty import MISTAKE, ORPHANED, RANKS

LAUNCHES = [
    ["torchrun", "backup_workers:raise:1", "dc_s3gd:raise:2", "backup_workers:kill:0"],
    ["torchrun", "k_batch_sync:raise:2", "cyclic_delay:raise:0", "backup_workers:stop:1"],
    ["torchrun", "backup_workers:orphan:1"],
    ["python", "backup_workers:stop:1"],
    ["torchrun", "ad_psgd:raise:2", "ad_psgd:kill:1"],
    ["horovodrun", "k_batch_sync:raise:0", "cyclic_delay:raise:2", "backup_workers:kill:1"],
    ["horovodrun", "backup_workers:stop:2"],
    ["horovodrun", "dc_s3gd:kill:2"],
    ["horovodrun", "ad_psgd:kill:2"],
]

ERRORS = {
    "kill": {"PeerLostError"},
    "orphan": {"PeerLostError"},
    "raise": {"PeerFailedError"},
    "stop": {"PeerLostError", "RoundTimeoutError"},  # silent for `timeout`: either may say so first
}
LIMITS = {
    "kill": 10.0,
    "orphan": ORPHANED / 3,
    "raise": 10.0,
    "stop": 10.0 + 5.0,  # after the `timeout` of 5 s
}


def run(launcher: str, cases: list[str], out: Path) -> int:
    line = [*command(launcher, RANKS[launcher]), "-m", "tests.ranks.faulty", str(out), *cases]
    with (out / "output.txt").open("w") as output:
        process = subprocess.Popen(
            line,
            cwd=ROOT,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=150)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            raise


def check(case: str, ranks: int, out: Path, log: str) -> list[int]:
    """What the others noted of one case; returns the processes."""
    _, kind, victim = case.split(":")
    fault = json.loads((out / "fault").read_text())
    pids = [fault["pid"]]
    for rank in sorted(set(range(ranks)) - {int(victim)}):
        report = json.loads((out / f"end.{rank}").read_text())
        pids.append(report["pid"])
        assert f"rank {victim}" in report["end"], (report, log)
        assert report["end"].split(":")[0] in ERRORS[kind], (report, log)
        assert report["time"] - fault["time"] < LIMITS[kind], report
        assert report["threads"] == [], report
        assert kind != "raise" or MISTAKE in report["end"], (report, log)
    if kind == "raise":
        assert MISTAKE in json.loads((out / f"end.{victim}").read_text())["end"]
        assert f"rank {victim} ends: ValueError: {MISTAKE}" in log
    return pids


REPEATED = {"fault": LAUNCHES}
Fault = tuple[list[str], Path, Future[int]]


@pytest.fixture(scope="session")
def faults(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[tuple[object, Fault]]]:
    """Every launch that is asked for, two at a time: they mostly wait."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        started = []
        for launch, number in asked(request.session, "fault"):
            out = tmp_path_factory.mktemp("faults")
            code = pool.submit(run, launch[0], launch[1:], out)
            started.append(((launch, number), (launch, out, code)))
        yield started


@pytest.fixture(scope="session")
def fault(request: pytest.FixtureRequest, faults: list[tuple[object, Fault]]) -> Fault:
    return next(found for wanted, found in faults if wanted == request.param)


def test_the_others_name_the_rank_and_end(fault: Fault) -> None:
    launch, out, ended = fault
    code = ended.result()
    log = (out / "output.txt").read_text()
    assert code != 0, log
    for case in launch[1:]:
        pids = check(case, RANKS[launch[0]], out / case, log)
    assert all_gone(pids), f"left behind: {[pid for pid in pids if alive(pid)]}"
