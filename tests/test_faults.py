"""A rank dies, stops or raises: the others end with its name, soon, and leave nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.launching import ROOT, command, environment
from tests.ranks.faulty import RANKS

CASES = [
    ("torchrun", "kill", 0),
    ("torchrun", "raise", 1),
    ("torchrun", "stop", 1),
    ("horovodrun", "kill", 1),
    ("horovodrun", "raise", 0),
    ("horovodrun", "stop", 2),
]

ERRORS = {
    "kill": {"PeerLostError"},
    "raise": {"PeerFailedError"},
    "stop": {"PeerLostError", "RoundTimeoutError"},  # silent for `timeout`: either may say so first
}


def run(launcher: str, kind: str, victim: int, out: Path) -> int:
    line = [*command(launcher, RANKS), "-m", "tests.ranks.faulty", kind, str(victim), str(out)]
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


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_gone(pids: list[int], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(("launcher", "kind", "victim"), CASES)
def test_the_others_name_the_rank_and_end(
    launcher: str, kind: str, victim: int, tmp_path: Path
) -> None:
    code = run(launcher, kind, victim, tmp_path)
    log = (tmp_path / "output.txt").read_text()[-5000:]
    assert code != 0, log
    fault = json.loads((tmp_path / "fault").read_text())
    pids = [fault["pid"]]
    limit = 10.0 + (5.0 if kind == "stop" else 0.0)
    for rank in range(RANKS):
        if rank == victim:
            continue
        report = json.loads((tmp_path / f"end.{rank}").read_text())
        pids.append(report["pid"])
        assert f"rank {victim}" in report["end"], (report, log)
        assert report["end"].split(":")[0] in ERRORS[kind], (report, log)
        assert report["time"] - fault["time"] < limit, report
    if kind == "raise":
        assert "the victim's own mistake" in log
    assert all_gone(pids), f"left behind: {[pid for pid in pids if alive(pid)]}"
