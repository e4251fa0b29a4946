"""Has a fault come, and did the ranks end, or go on, as they must?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chaos_stranger import STRANGERS

Fault = dict[str, Any]

RAISED = ("ValueError", "KeyError", "MemoryError", "OSError", "Nameless", "SystemExit")
SURVIVED = (
    *("NaN, dropped", "full disk", "stop and continue", "late start", "garbage", "nothing"),
    *STRANGERS,
)
APART = ("other arguments", "other strategy")
GONE = ("kill", "crash", "vanish", "stop")
OWN = {
    "StopIteration": "RuntimeError",
    "NaN": "NonFiniteError",
    "KeyboardInterrupt": "SystemExit",
    "SIGINT": "SystemExit",
    "SIGTERM": "SIGTERMException",
}
"""How the victim itself ends, if not with what it has raised."""
SAID = {"full disk": "cannot be written (No space left on device)", "NaN, dropped": "is not finite"}
"""What a rank must have told the user."""
ABORTED = "Horovod background loop uncaught exception"
SOON, ORPHANS = 30.0, 15.0
"""Seconds from the fault to the end of every rank, and from the launcher's to that of all. The
first leaves room for a machine that is busy; how long it has taken is in the report."""


class Launch(NamedTuple):
    """What came of a launch."""

    code: int | None
    left: Sequence[int]
    """Processes that outlived the launcher for too long."""
    over: float
    """When the last process was gone."""
    output: str


class Outcome(NamedTuple):
    """What came of one fault."""

    fault: Fault
    ends: dict[int, str]
    seconds: float
    """From the fault to the last rank's end."""
    problem: str


def notes(folder: Path) -> dict[int, Any]:
    """Each rank's note of its end."""
    return {int(file.suffix[1:]): json.loads(file.read_text()) for file in folder.glob("end.*")}


def look(fault: Fault, folder: Path, launch: Launch) -> Outcome:
    """One fault as it went, and what was wrong about that."""
    noted = notes(folder)
    ends = {rank: note["end"] for rank, note in sorted(noted.items())}
    last = max((note["time"] for note in noted.values()), default=launch.over)
    if "launcher" in fault["kind"]:
        last = launch.over
    mark = folder / "fault"
    seconds = last - float(mark.read_text()) if mark.exists() else 0.0
    problems = [
        *(["the launcher did not end"] if launch.code is None else []),
        *([f"orphans {list(launch.left)}"] if launch.left else []),
        *unproved(fault, folder),
        *judge(fault, ends, launch.output),
        *late(fault, seconds),
    ]
    problem = "; ".join(problems)
    text = f"{problem}\n{launch.output[-3000:]}" if problem else ""
    return Outcome(fault, ends, seconds, text)


def unproved(fault: Fault, folder: Path) -> Iterator[str]:
    """What would show that the fault has come, and is not there."""
    kind = fault["kind"]
    if kind != "nothing" and not (folder / "fault").exists():
        yield "the fault has not come"
    said = "".join(file.read_text() for file in folder.glob("said.*"))
    if SAID.get(kind, "") not in said:
        yield f"nobody has said: {SAID[kind]}"
    if kind in ("garbage", *STRANGERS):
        met = folder / "foreign"
        if not met.exists() or int(met.read_text()) == 0:
            yield "the coordinator has met no stranger"


def judge(fault: Fault, ends: dict[int, str], output: str) -> Iterator[str]:
    """What is wrong about how the ranks ended."""
    if "launcher" in fault["kind"]:
        if "finished" in ends.values():
            yield f"finished: {ends}"
        return
    yield from silent(fault, ends, output)
    for rank, text in ends.items():
        if not is_right(fault, rank, text):
            yield f"rank {rank}: {text}"


def silent(fault: Fault, ends: dict[int, str], output: str) -> Iterator[str]:
    """Lightning's own launcher may end a rank that has just said why it ends; and Horovod aborts a
    rank that loses a connection within it, of which another one has to tell."""
    victim = fault["victim"]
    gone = {victim} if fault["kind"] in GONE else set()
    for rank in sorted(set(range(fault["ranks"])) - gone - set(ends)):
        aborted = f"[{rank}]: {ABORTED}" in output
        who = r"\d+" if aborted else rank
        word = re.search(rf"rank {who} ends: .*rank {victim}", output)
        if not word or not (aborted or fault["launcher"] == "python"):
            yield f"no word of rank {rank}"


def is_right(fault: Fault, rank: int, text: str) -> bool:
    """A victim has its own error, and the others name it."""
    kind, victim = fault["kind"], fault["victim"]
    if kind in SURVIVED:
        return text == "finished"
    if kind in APART:
        return text.startswith("ConfigurationError") and "different" in text
    if rank == victim:
        return kind not in GONE and text.startswith(OWN.get(kind, kind))
    return text != "finished" and f"rank {victim}" in text


def late(fault: Fault, seconds: float) -> Iterator[str]:
    """One that stands still is missed after a while only."""
    limit = SOON + fault["timeout"] * (fault["kind"] == "stop")
    if fault["kind"] not in SURVIVED and not 0.0 <= seconds <= limit:
        yield f"{seconds:.1f} s"
