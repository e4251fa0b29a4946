"""Starts ranks as a user would, and reads what they left."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
LAUNCHERS = ("torchrun", "horovodrun")
KINDS = (*LAUNCHERS, "device")
"""`device` is torchrun with ranks that train on the asynchronous test device, whose kernels are
held back at random."""


def command(launcher: str, ranks: int) -> list[str]:
    """The launcher's command line, up to the program."""
    if launcher in ("torchrun", "device"):
        return [str(BIN / "torchrun"), f"--nproc-per-node={ranks}", "--standalone"]
    if launcher == "horovodrun":
        return [str(BIN / "horovodrun"), "-np", str(ranks), str(BIN / "python")]
    return [str(BIN / "python")]


def environment(**extra: str) -> dict[str, str]:
    """One thread per rank, our modules importable, the venv's tools first."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path, **extra}


def launch(
    launcher: str,
    names: list[str],
    out: Path,
    *,
    ranks: int = 4,
    timeout: float = 300.0,
    cwd: Path = ROOT,
    **extra: str,
) -> subprocess.CompletedProcess[str]:
    """Run scenarios as `tests.ranks.run` names them; what hangs is killed and fails."""
    out.mkdir(parents=True, exist_ok=True)
    if launcher == "device":
        extra = {"LAG": "1", "LAG_FUZZ": "1", "LAG_POISON": "1", **extra}
    program = ["-m", "tests.ranks.run", str(out), *names]
    process = subprocess.Popen(
        [*command(launcher, ranks), *program],
        cwd=cwd,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        raise AssertionError(f"{launcher} {names} hung:\n{output[-8000:]}") from None
    (out / "output.txt").write_text(output)
    return subprocess.CompletedProcess(process.args, process.returncode, output, "")


def label(kind: str | list[str]) -> str:
    """What a test of this launcher, or of this command line, is called."""
    return kind if isinstance(kind, str) else " ".join(kind)


def read(out: Path, name: str, ranks: int = 4) -> list[dict[str, Any]]:
    """Every rank's outcome of one scenario, errors included.

    `name` is MODULE.NAME, or NAME alone where `out` is the module's folder.
    """
    module, _, scenario = name.rpartition(".")
    folder = out / module
    files = [folder / f"{scenario}.{rank}.pickle" for rank in range(ranks)]
    missing = [file.name for file in files if not file.exists()]
    log = next((p / "output.txt" for p in folder.parents if (p / "output.txt").exists()), None)
    tail = log.read_text()[-6000:] if log else ""
    assert not missing, f"no outcome {missing}\n{tail}"
    return [pickle.loads(file.read_bytes()) for file in files]


def results(out: Path, name: str, ranks: int = 4) -> list[Any]:
    """Every rank's result; an error on any of them fails the test with its traceback."""
    outcomes = read(out, name, ranks)
    for number, outcome in enumerate(outcomes):
        assert "result" in outcome, f"rank {number} of {name}:\n{outcome.get('traceback')}"
    return [outcome["result"] for outcome in outcomes]


def alive(pid: int) -> bool:
    """Is there such a process, and not only its name?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_gone(pids: list[int], seconds: float = 20.0) -> bool:
    """Have all of these ended, or do so soon?"""
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(alive(pid) for pid in pids)
