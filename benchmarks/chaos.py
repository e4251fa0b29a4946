"""Whatever comes over a rank: the run ends soon and says whose fault it was, or goes on.

    python -m benchmarks.chaos [--faults 200] [--seed 0] [--report | --smoke]

Faults are drawn at random, by seed, over strategies, launchers, victims and moments. What a process
survives shares a launch with others of its kind. One of every kind comes first. At the end, in one
process per rank, 30 trainings fail and 50 succeed, and no thread or descriptor may be left of them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.harness import ROOT, environment, launcher_line, options, report, table

Fault = dict[str, Any]

STRATEGIES: dict[str, dict[str, Any]] = {
    "BackupWorkersStrategy": {"backups": 0},
    "KBatchSyncStrategy": {"k": 2},
    "KAsyncStrategy": {"k": 2},
    "AdaSyncStrategy": {},
    "CyclicDelayStrategy": {},
    "DCS3GDStrategy": {},
    "ADPSGDStrategy": {},
}
PIPELINE_OR_GOSSIP = ("DCS3GDStrategy", "ADPSGDStrategy")
RAISED = ("ValueError", "KeyError", "MemoryError", "OSError", "Nameless", "SystemExit")
SOFT = (
    *(*RAISED, "KeyboardInterrupt", "StopIteration", "NaN", "NaN, dropped"),
    *("full disk", "other arguments", "other strategy"),
)
"""The process goes on afterwards, with the next one."""
HARD = (
    *("kill", "crash", "vanish", "stop", "stop and continue", "SIGINT", "SIGTERM"),
    *("late start", "garbage", "SIGINT to the launcher", "SIGTERM to the launcher"),
)
SURVIVED = ("NaN, dropped", "full disk", "stop and continue", "late start", "garbage", "nothing")
APART = ("other arguments", "other strategy")
PLACES = ("training_step", "on_before_optimizer_step", "validation_step")
PER_LAUNCH = 6
SOON, ORPHANS = 15.0, 15.0
"""Seconds from the fault to the end of every rank, and from the launcher's to that of all."""
GROWTH = 2
"""Threads, and descriptors, that may come and go by themselves."""


def draw(kind: str, launcher: str, dice: random.Random) -> Fault:
    """Where, when, and what is being trained."""
    gossips = launcher == "torchrun" or kind in HARD
    names = [name for name in STRATEGIES if gossips or name != "ADPSGDStrategy"]
    if kind == "full disk":
        names = [name for name in names if name not in PIPELINE_OR_GOSSIP]
    strategy = dice.choice(names)
    ranks = 2 if launcher == "python" else 3
    return {
        "kind": kind,
        "launcher": launcher,
        "strategy": strategy,
        "arguments": STRATEGIES[strategy],
        "victim": dice.randrange(ranks),
        "ranks": ranks,
        "step": dice.randrange(1, 10),
        "place": dice.choice(PLACES) if kind in RAISED else "training_step",
        "timeout": 5.0 if kind == "stop" else 30.0,
        "epochs": 200 if "launcher" in kind else 3,
    }


def plan(count: int, seed: int) -> list[list[Fault]]:
    """One of each kind, then whatever comes; by launch."""
    dice = random.Random(seed)
    kinds = dice.sample([*SOFT, *HARD], len(SOFT) + len(HARD))
    while len(kinds) < count:
        kinds.append(dice.choice(SOFT if dice.random() < 0.6 else HARD))
    launches: list[list[Fault]] = []
    soft: dict[str, list[Fault]] = {"torchrun": [], "horovodrun": []}
    for kind in kinds[:count]:
        launcher = dice.choice(["torchrun", "horovodrun", *["python"] * (kind in HARD)])
        fault = draw(kind, launcher, dice)
        if kind in HARD:
            launches.append([fault])
        else:
            soft[launcher].append(fault)
    for faults in soft.values():
        launches += [faults[i : i + PER_LAUNCH] for i in range(0, len(faults), PER_LAUNCH)]
    return launches


# ------------------------------------------------------------------------------- a launch


class Outcome(NamedTuple):
    """What came of one fault."""

    fault: Fault
    ends: dict[int, str]
    seconds: float
    """From the fault to the last rank's end."""
    problem: str


def line(launcher: str, ranks: int) -> list[str]:
    own = launcher_line("horovodrun", ranks)[-1:]
    return own if launcher == "python" else launcher_line(launcher, ranks)


def conduct(faults: list[Fault]) -> tuple[list[Outcome], Any]:
    """Launch ranks that live through these; what became of them, and what they had open."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "faults.json").write_text(json.dumps(faults))
        first = faults[0]
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(
                [*line(first["launcher"], first["ranks"]), "-m", "benchmarks.chaos_worker", name],
                cwd=ROOT,
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = end(process, first, folder, limit=90.0 + 20.0 * len(faults))
        left = orphans(folder)
        text = (folder / "output").read_text()[-2000:]
        found = [look(fault, folder / str(n), code, left, text) for n, fault in enumerate(faults)]
        return found, [notes(folder / str(n)) for n in range(len(faults))]


def end(process: subprocess.Popen[Any], fault: Fault, folder: Path, limit: float) -> int | None:
    """Wait for the launcher, and do what is done from outside; None if it had to be killed."""
    with contextlib.suppress(TimeoutError):
        if "launcher" in fault["kind"] or fault["kind"] == "garbage":
            await_training(fault, folder)
            if fault["kind"] == "garbage":
                throw_garbage(folder)
            else:
                (folder / "0" / "fault").write_text(str(time.time()))
                process.send_signal(signal.Signals[fault["kind"].split()[0]])
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def await_training(fault: Fault, folder: Path) -> None:
    deadline = time.monotonic() + 60.0
    while len(list(folder.glob("0/training.*"))) < fault["ranks"]:
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


def throw_garbage(folder: Path) -> None:
    """At every port on which a rank listens: noise, a web browser's request, a large number."""
    dice = random.Random(folder.name)
    for pid in pids(folder):
        for wire in psutil.Process(pid).net_connections("tcp"):
            if wire.status == psutil.CONN_LISTEN:
                for noise in (dice.randbytes(4096), b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64):
                    throw(noise, wire.laddr.port)


def throw(noise: bytes, port: int) -> None:
    """Whoever listens may close the door."""
    address = ("127.0.0.1", port)
    with contextlib.suppress(OSError), socket.create_connection(address, 2.0) as wire:
        wire.sendall(noise)


def pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.glob("pid.*")]


def orphans(folder: Path) -> list[int]:
    """Ranks that are still there a while after their launcher; they are ended then."""
    deadline = time.monotonic() + ORPHANS
    while (left := [pid for pid in pids(folder) if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def notes(folder: Path) -> dict[int, Any]:
    """Each rank's note of its end."""
    return {int(file.suffix[1:]): json.loads(file.read_text()) for file in folder.glob("end.*")}


def look(fault: Fault, folder: Path, code: int | None, left: Sequence[int], output: str) -> Outcome:
    """One fault as it went, and what was wrong about that."""
    noted = notes(folder)
    ends = {rank: note["end"] for rank, note in sorted(noted.items())}
    mark = folder / "fault"
    began = float(mark.read_text()) if mark.exists() else None
    last = max((note["time"] for note in noted.values()), default=0.0)
    seconds = last - began if began is not None else 0.0
    problems = [
        *(["the launcher did not end"] if code is None else []),
        *([f"orphans {list(left)}"] if left else []),
        *judge(fault, ends, seconds, output),
    ]
    problem = "; ".join(problems)
    return Outcome(fault, ends, seconds, f"{problem}\n{output}" if problem else "")


def judge(fault: Fault, ends: dict[int, str], seconds: float, output: str) -> Iterator[str]:
    """What is wrong about how the ranks ended."""
    kind, victim = fault["kind"], fault["victim"]
    if "launcher" in kind:
        if "finished" in ends.values() or seconds > SOON:
            yield f"{seconds:.0f} s, {ends}"
        return
    gone = {victim} if kind in ("kill", "crash", "vanish", "stop") else set()
    silent = set(range(fault["ranks"])) - gone - set(ends)
    for rank in sorted(silent):  # Lightning's own launcher may end a rank that has just said it
        if not re.search(rf"rank {rank} ends: .*rank {victim}", output):
            yield f"no word of rank {rank}"
    for rank, text in ends.items():
        if kind in SURVIVED:
            fine = text == "finished"
        elif kind in APART:
            fine = text.startswith("ConfigurationError") and "different" in text
        else:
            fine = text != "finished" and (rank == victim or f"rank {victim}" in text)
        if not fine:
            yield f"rank {rank}: {text}"
    if kind not in SURVIVED and seconds > SOON + fault["timeout"] * (kind == "stop"):
        yield f"{seconds:.0f} s"


def shown(outcome: Outcome) -> Outcome:
    """The same, after a line of progress."""
    fault = outcome.fault
    names = f"{fault['kind']}, {fault['launcher']}, {fault['strategy']}"
    print(f"{names}: {outcome.problem.partition(chr(10))[0] or 'fine'}", flush=True)
    return outcome


# ------------------------------------------------------------------------------ endurance


def many_trainings(launcher: str, failed: int, good: int) -> list[Fault]:
    """Some that fail, some that do not, mixed evenly after the first of each strategy."""
    names = [name for name in STRATEGIES if launcher == "torchrun" or name != "ADPSGDStrategy"]
    strategies = itertools.cycle(names)
    dice = random.Random(1)
    kinds = ["nothing", "ValueError"] * len(names)
    rest = ["ValueError"] * failed + ["nothing"] * good
    dice.shuffle(rest)
    faults = []
    for number, kind in enumerate([*kinds, *rest, "nothing"]):
        fault = draw(kind, launcher, dice)
        strategy = next(strategies)
        own = {"strategy": strategy, "arguments": STRATEGIES[strategy], "ranks": 2, "epochs": 1}
        faults.append({**fault, **own, "victim": number % 2})
    return faults


def endure(launcher: str, failed: int, good: int, growth: float) -> tuple[list[str], str]:
    """A row of the report, and what is wrong."""
    faults = many_trainings(launcher, failed, good)
    outcomes, noted = conduct(faults)
    warm = len(faults) - failed - good - 1
    rows = [note[0]["opened"] for note in noted if 0 in note]
    before, after = rows[warm - 1], rows[-1]
    grown = [b - a for a, b in zip(before, after, strict=True)]
    problems = [outcome.problem for outcome in outcomes if outcome.problem]
    if max(grown) > growth:
        problems.append(f"{launcher}: threads and descriptors grew by {grown}")
    cells = [f"{a} → {b}" for a, b in zip(before, after, strict=True)]
    return [launcher, str(failed), str(good), *cells], "; ".join(problems)


# ----------------------------------------------------------------------------- the report


def summary(outcomes: Iterable[Outcome]) -> str:
    """A line per kind."""
    by_kind: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_kind.setdefault(outcome.fault["kind"], []).append(outcome)
    unmeasured = (*SURVIVED, *APART)
    rows = []
    for kind in [*SOFT, *HARD]:
        found = by_kind.get(kind, [])
        if found:
            launchers = Counter(outcome.fault["launcher"] for outcome in found)
            rows.append([
                kind,
                str(len(found)),
                ", ".join(f"{name} {count}" for name, count in sorted(launchers.items())),
                "survived" if kind in SURVIVED else "ended" + " and named" * ("laun" not in kind),
                str(sum(not outcome.problem for outcome in found)),
                "" if kind in unmeasured else f"{max(outcome.seconds for outcome in found):.1f}",
            ])  # fmt: skip
    head = ["fault", "times", "launchers", "must be", "was", "longest, s"]
    return table(head, rows)


def main() -> int:
    """Run it all; fail if anything was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true")
    given = options(parser, faults=4)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ranks of a background job heed it
    launches = plan(given.faults, given.seed)
    with ThreadPoolExecutor(2) as pool:
        outcomes = [shown(outcome) for found, _ in pool.map(conduct, launches) for outcome in found]
        failed, good, growth = (1, 1, math.inf) if given.smoke else (30, 50, GROWTH)
        launchers = ["torchrun"] if given.smoke else ["torchrun", "horovodrun"]
        endured = list(pool.map(lambda name: endure(name, failed, good, growth), launchers))
    problems = [(o.fault, o.problem) for o in outcomes if o.problem]
    problems += [({}, problem) for _, problem in endured if problem]
    text = summary(outcomes)
    fine = sum(not outcome.problem for outcome in outcomes)
    text += (
        f"\n\n{fine} of {len(outcomes)} faults ended as they must; none of these left a rank "
        f"{ORPHANS:g} s after its launcher.\n\n"
    )
    head = ["2 ranks, one process each", "failed", "succeeded", "threads", "descriptors"]
    text += table(head, [row for row, _ in endured])
    data = [{**o.fault, "ends": o.ends, "seconds": round(o.seconds, 2)} for o in outcomes]
    command = f"python -m benchmarks.chaos --faults {given.faults} --seed {given.seed} --report"
    report("chaos", "Chaos", command, text, data, write=given.report and not problems)
    for fault, problem in problems:
        print(f"\nNOT AS IT MUST BE: {fault}\n{problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
