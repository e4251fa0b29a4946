"""Whatever comes over a rank: the run ends soon and says whose fault it was, or goes on.

    python -m benchmarks.chaos [--faults 200] [--seed 0] [--report | --smoke]

Faults are drawn at random, by seed, over strategies, launchers, victims and moments. What a process
survives shares a launch with others of its kind. One of every kind comes first, and an error and a
kill at every place outside of training. A fault that has not come is a problem like any other. At
the end, in one process per rank, 30 trainings fail and 50 succeed, and no thread or descriptor may
be left of them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos_judge import (
    APART,
    ORPHANS,
    RAISED,
    SURVIVED,
    Fault,
    Launch,
    Outcome,
    look,
    notes,
)
from benchmarks.chaos_stranger import STRANGERS, throw
from benchmarks.harness import ROOT, environment, launcher_line, options, report, table

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
SOFT = (
    *(*RAISED, "KeyboardInterrupt", "StopIteration", "NaN", "NaN, dropped"),
    *("full disk", *APART),
)
"""The process goes on afterwards, with the next one."""
LOST = ("kill", "crash", "vanish", "stop")
SIGNALLED = ("SIGINT to the launcher", "SIGTERM to the launcher")
OUTSIDE = ("garbage", *STRANGERS)
ALONE = (*LOST, "stop and continue", "SIGINT", "SIGTERM", "late start")
HARD = (*ALONE, *OUTSIDE, *SIGNALLED)
ELSEWHERE = ("set-up", "sanity check", "validate", "test")
PLACES = ("training_step", "on_before_optimizer_step", "validation_step", *ELSEWHERE)
Planned = tuple[str, str | None]
"""A kind, and the place if that is not left to chance."""
FIRST: list[Planned] = [
    *((kind, None) for kind in (*SOFT, *HARD)),
    *((kind, place) for kind in ("ValueError", "kill") for place in ELSEWHERE),
]
LEAST: list[Planned] = [
    *(("ValueError", "sanity check"), ("full disk", None), ("kill", "test")),
    *(("garbage", None), ("stranger with a key", None)),
]
"""A smoke run's."""
PER_LAUNCH = 10
GROWTH = 2
"""Threads, and descriptors, that may come and go by themselves."""


def epochs(kind: str) -> int:
    """Enough for what comes from outside."""
    if kind in SIGNALLED:
        return 400
    return 12 if kind in OUTSIDE else 3


def place_for(kind: str, dice: random.Random) -> str:
    """Where a rank comes to harm."""
    if kind in RAISED:
        return dice.choice(PLACES)
    return dice.choice([*["training_step"] * 4, *ELSEWHERE]) if kind in LOST else "training_step"


def strategy_for(kind: str, launcher: str, dice: random.Random) -> str:
    gossips = launcher == "torchrun" or kind in HARD
    names = [name for name in STRATEGIES if gossips or name != "ADPSGDStrategy"]
    if kind == "full disk":
        names = [name for name in names if name not in PIPELINE_OR_GOSSIP]
    return dice.choice(names)


def draw(planned: Planned, launcher: str, dice: random.Random) -> Fault:
    """Where, when, and what is being trained."""
    kind, place = planned[0], planned[1] or place_for(planned[0], dice)
    strategy = strategy_for(kind, launcher, dice)
    ranks = 2 if launcher == "python" else 3
    started = kind == "late start" and launcher == "python"
    return {
        "kind": kind,
        "launcher": launcher,
        "strategy": strategy,
        "arguments": STRATEGIES[strategy],
        "victim": dice.randrange(started, ranks),  # rank 0 starts the others there
        "ranks": ranks,
        "step": 0 if place in ELSEWHERE else dice.randrange(1, 10),
        "place": place,
        "doing": place if place in ("validate", "test") else "fit",
        "timeout": 5.0 if kind == "stop" else 120.0,
        "epochs": epochs(kind),
        "outside": kind in OUTSIDE,
    }


def chosen(count: int, dice: random.Random) -> list[Planned]:
    """First what must not be missing, then whatever comes."""
    kinds = dice.sample(FIRST, len(FIRST))
    while len(kinds) < count:
        kinds.append((dice.choice(SOFT if dice.random() < 0.85 else HARD), None))
    return kinds[:count]


def plan(faults: list[Planned], dice: random.Random) -> list[list[Fault]]:
    """By launch."""
    alone: list[list[Fault]] = []
    soft: dict[str, list[Fault]] = {"torchrun": [], "horovodrun": []}
    for planned in faults:
        hard = planned[0] in HARD
        launcher = dice.choice(["torchrun", "horovodrun", *["python"] * hard])
        fault = draw(planned, launcher, dice)
        if hard:
            alone.append([fault])
        else:
            soft[launcher].append(fault)
    every = PER_LAUNCH
    shared = [some[i : i + every] for some in soft.values() for i in range(0, len(some), every)]
    return [*shared, *alone]


# ------------------------------------------------------------------------------- a launch


def line(launcher: str, ranks: int) -> list[str]:
    own = launcher_line("horovodrun", ranks)[-1:]
    return own if launcher == "python" else launcher_line(launcher, ranks)


def conduct(faults: list[Fault]) -> tuple[list[Outcome], Any]:
    """Launch ranks that live through these; what became of them, and what they had open."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
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
            code = end(process, first, folder, limit=240.0 + 40.0 * len(faults))
        left = orphans(name)
        launch = Launch(code, left, time.time(), (folder / "output").read_text())
        found = [look(fault, folder / str(n), launch) for n, fault in enumerate(faults)]
        return found, [notes(folder / str(n)) for n in range(len(faults))]


def end(process: subprocess.Popen[Any], fault: Fault, folder: Path, limit: float) -> int | None:
    """Wait for the launcher, and do what is done from outside; None if it had to be killed."""
    own = folder / "0"
    if fault["kind"] in (*OUTSIDE, *SIGNALLED) and are_training(fault, own, process):
        began = time.time()
        if meddle(process, fault["kind"], own, folder):
            (own / "fault").write_text(str(began))
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def are_training(fault: Fault, folder: Path, process: subprocess.Popen[Any]) -> bool:
    deadline = time.monotonic() + 180.0
    while len(list(folder.glob("training.*"))) < fault["ranks"]:
        if time.monotonic() > deadline or process.poll() is not None:
            return False
        time.sleep(0.05)
    time.sleep(0.1)  # what they write is short
    return True


def meddle(process: subprocess.Popen[Any], kind: str, own: Path, folder: Path) -> bool:
    """Has it come to that?"""
    if kind in SIGNALLED:
        process.send_signal(signal.Signals[kind.split()[0]])
        return process.returncode is None
    ticket = json.loads((own / "training.0").read_text())
    if kind == "garbage":
        return int(ticket[0].rpartition(":")[2]) in throw_garbage(folder)
    stranger = [sys.executable, "-m", "benchmarks.chaos_stranger", kind, *ticket]
    done = subprocess.run(stranger, cwd=ROOT, env=environment(), check=False, timeout=60.0)
    return done.returncode == 0


def throw_garbage(folder: Path) -> set[int]:
    """At every port on which a rank listens: noise, a web browser's request, a large number."""
    dice = random.Random(folder.name)
    taken = set()
    for pid in pids(folder):
        for wire in psutil.Process(pid).net_connections("tcp"):
            if wire.status == psutil.CONN_LISTEN:
                noises = (dice.randbytes(4096), b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64)
                if all([throw(noise, wire.laddr.port) for noise in noises]):
                    taken.add(wire.laddr.port)
    return taken


def pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.glob("pid.*")]


def orphans(name: str) -> list[int]:
    """What of a launch is still there a while after its launcher; it is ended then."""
    deadline = time.monotonic() + ORPHANS
    while (left := of_launch(name)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def of_launch(name: str) -> list[int]:
    """Ranks, what they have forked and what has started them: all have the folder's name."""
    lines = {process.pid: process.info["cmdline"] for process in psutil.process_iter(["cmdline"])}
    return [pid for pid, words in lines.items() if any(name in word for word in words or ())]


def shown(outcome: Outcome) -> Outcome:
    """The same, after a line of progress."""
    fault = outcome.fault
    names = f"{fault['kind']}, {fault['place']}, {fault['launcher']}, {fault['strategy']}"
    print(f"{names}: {outcome.problem.partition(chr(10))[0] or 'fine'}", flush=True)
    return outcome


# ------------------------------------------------------------------------------ endurance


def many_trainings(launcher: str, failed: int, good: int) -> list[Fault]:
    """Some that fail, some that do not, mixed after two of each strategy and one that does not."""
    names = [name for name in STRATEGIES if launcher == "torchrun" or name != "ADPSGDStrategy"]
    strategies = itertools.cycle(names)
    dice = random.Random(1)
    rest = ["ValueError"] * failed + ["nothing"] * (good - 1)
    dice.shuffle(rest)
    faults = []
    for number, kind in enumerate([*["ValueError", "nothing"] * len(names), *rest, "nothing"]):
        fault = draw((kind, None if kind == "nothing" else dice.choice(PLACES[:5])), launcher, dice)
        strategy = next(strategies)
        own = {"strategy": strategy, "arguments": STRATEGIES[strategy], "ranks": 2, "epochs": 1}
        faults.append({**fault, **own, "victim": number % 2})
    return faults


def endure(launcher: str, failed: int, good: int, growth: float) -> tuple[list[list[str]], str]:
    """A row of the report per rank, and what is wrong."""
    faults = many_trainings(launcher, failed, good)
    outcomes, noted = conduct(faults)
    problems = [outcome.problem for outcome in outcomes if outcome.problem]
    before, after = noted[-1 - failed - good], noted[-1]
    rows = []
    for rank in range(2):
        if rank not in before or rank not in after:
            problems.append(f"{launcher}: rank {rank} has not noted what it had open")
            continue
        pairs = list(zip(before[rank]["opened"], after[rank]["opened"], strict=True))
        if any(b - a > growth for a, b in pairs):
            problems.append(f"{launcher}, rank {rank}: threads and descriptors grew: {pairs}")
        cells = [f"{a} → {b}" for a, b in pairs]
        rows.append([f"{launcher}, rank {rank}", str(failed), str(good), *cells])
    return rows, "; ".join(problems)


# ----------------------------------------------------------------------------- the report


def grouped(outcomes: Iterable[Outcome], name: str) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.fault[name], []).append(outcome)
    return found


def row(kind: str, found: list[Outcome]) -> list[str]:
    launchers = Counter(outcome.fault["launcher"] for outcome in found)
    ended = "ended" if kind in SIGNALLED else "ended and named"
    return [
        kind,
        str(len(found)),
        ", ".join(f"{name} {count}" for name, count in sorted(launchers.items())),
        "survived" if kind in SURVIVED else ended,
        str(sum(not outcome.problem for outcome in found)),
        "" if kind in SURVIVED else f"{max(outcome.seconds for outcome in found):.1f}",
    ]


def summary(outcomes: Iterable[Outcome]) -> str:
    """A line per kind."""
    by_kind = grouped(outcomes, "kind")
    head = ["fault", "times", "launchers", "must be", "was", "longest, s"]
    return table(head, [row(kind, by_kind[kind]) for kind in [*SOFT, *HARD] if kind in by_kind])


def places(outcomes: Iterable[Outcome]) -> str:
    """A line per place at which a rank raised an error or was lost."""
    rows = []
    harmed = [outcome for outcome in outcomes if outcome.fault["kind"] in (*RAISED, *LOST)]
    for place, found in sorted(grouped(harmed, "place").items()):
        lost = sum(outcome.fault["kind"] in LOST for outcome in found)
        fine = sum(not outcome.problem for outcome in found)
        rows.append([place, str(len(found) - lost), str(lost), str(fine)])
    return table(["place", "errors", "losses", "ended and named"], rows)


def text_of(outcomes: list[Outcome], endured: list[tuple[list[list[str]], str]]) -> str:
    """The report."""
    fine = sum(not outcome.problem for outcome in outcomes)
    head = ["2 ranks, one process each", "failed", "succeeded", "threads", "descriptors"]
    return "\n\n".join([
        summary(outcomes),
        f"{fine} of {len(outcomes)} faults ended as they must; none of these left a process "
        f"{ORPHANS:g} s after its launcher. Every rank that is left names the one that came to "
        "harm, but for those that Horovod itself aborts as soon as a connection breaks; then "
        "another does.",
        places(outcomes),
        table(head, [row for rows, _ in endured for row in rows]),
    ])  # fmt: skip


def options_given() -> Any:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true")
    return options(parser, faults=len(LEAST))


def main() -> int:
    """Run it all; fail if anything was not as it must be."""
    given = options_given()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ranks of a background job heed it
    dice = random.Random(given.seed)
    launches = plan(LEAST if given.smoke else chosen(given.faults, dice), dice)
    with ThreadPoolExecutor(2) as pool:
        outcomes = [shown(outcome) for found, _ in pool.map(conduct, launches) for outcome in found]
        failed, good, growth = (1, 1, math.inf) if given.smoke else (30, 50, GROWTH)
        launchers = ["torchrun"] if given.smoke else ["torchrun", "horovodrun"]
        endured = list(pool.map(lambda name: endure(name, failed, good, growth), launchers))
    problems = [(o.fault, o.problem) for o in outcomes if o.problem]
    problems += [({}, problem) for _, problem in endured if problem]
    text = text_of(outcomes, endured)
    data = [{**o.fault, "ends": o.ends, "seconds": round(o.seconds, 2)} for o in outcomes]
    command = f"python -m benchmarks.chaos --faults {given.faults} --seed {given.seed} --report"
    report("chaos", "Chaos", command, text, data, write=given.report and not problems)
    for fault, problem in problems:
        print(f"\nNOT AS IT MUST BE: {fault}\n{problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
