"""`lightning-dsgd selftest`: starts ranks on this machine's devices, and tries what matters."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_dsgd.errors import ConfigurationError

_LIMIT = 300.0
"""Seconds for one launch; two minutes are usual."""
_GLANCE = 0.05
_ON_A_CPU = 4
"""Ranks, where nobody says how many."""
_ASK = "say so in an issue, with the output of `lightning-dsgd selftest --json`"
_STREAMS = "a rank waits behind another's device, which it must not"
REMEDIES = {
    "collectives": "see that NCCL (or Gloo) reaches every device: NCCL_DEBUG=INFO tells how it "
    "tries; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose interfaces",
    "replicas": f"the ranks' devices compute differently: are they of one kind? If so, {_ASK}",
    "as DDP": _ASK,
    "slow kernel": f"{_STREAMS}: {_ASK}",
    "memory bound": f"lower max_lag_mb for now, and {_ASK}",
    "overlap": f"try fewer ranks or a faster way between devices (NCCL_DEBUG=INFO); else {_ASK}",
    "killed rank": _ASK,
}


@dataclass
class Line:
    """One check, as all ranks together have found it."""

    check: str
    ok: bool
    text: str
    seconds: float
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--devices", type=int, metavar="N", help="ranks, each with a device")
    parser.add_argument("--accelerator", default="auto", help="as the Trainer's; default: auto")
    parser.add_argument("--backend", choices=["torch", "horovod"], default="torch")
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module that ranks import first, such as one that registers an accelerator",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print a line per check; 1 when any of them failed."""
    accelerator, ranks = _where(args.accelerator, args.devices)
    job = {
        "ranks": ranks,
        "accelerator": accelerator,
        "backend": args.backend,
        "imports": args.imports,
    }
    facts = {**_facts(), **job}
    if not args.json:
        print(_head(facts), flush=True)
    lines = []
    for line in _all_checks(job):
        lines.append(line)
        if not args.json:
            print(as_text(line), flush=True)
    fine = all(line.ok for line in lines)
    if args.json:
        print(
            json.dumps({**facts, "ok": fine, "checks": [asdict(line) for line in lines]}, indent=2)
        )
    else:
        print("\nall is well" if fine else "\nnot all is well: see the remedies above")
    return 0 if fine else 1


def _where(accelerator: str, devices: int | None) -> tuple[str, int]:
    """All GPUs of this host where there are several; else ranks that share the CPU."""
    import torch

    gpus = torch.cuda.device_count()
    if accelerator == "auto":
        accelerator = "cuda" if gpus > 1 else "cpu"
    if accelerator in ("cuda", "gpu"):
        if gpus < max(2, devices or 0):
            raise ConfigurationError(
                f"this host has {gpus} GPUs, and the self-test needs one for each of at least 2 "
                "ranks; use --accelerator cpu, or fewer --devices"
            )
        return accelerator, devices or gpus
    ranks = devices or _ON_A_CPU
    if ranks < 2:
        raise ConfigurationError(f"--devices {ranks}: the self-test needs at least 2 ranks")
    return accelerator, ranks


def _facts() -> dict[str, Any]:
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning-dsgd": version("lightning-dsgd"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _head(facts: dict[str, Any]) -> str:
    names = ("lightning-dsgd", "torch", "python")
    versions = ", ".join(f"{name} {facts[name]}" for name in names)
    gpus = f"; {', '.join(facts['gpus'])}" if facts["gpus"] else ""
    where = f"{facts['ranks']} ranks on {facts['accelerator']}, backend {facts['backend']}"
    if len(facts["gpus"]) == 1 and facts["accelerator"] == "cpu":
        where += " (ranks need a GPU each, and there is one)"
    return f"{versions}{gpus}\n{where}; takes up to two minutes\n"


def as_text(line: Line) -> str:
    """For people."""
    text = (
        f"{'ok    ' if line.ok else 'FAILED'}  {line.check:<28} {line.seconds:5.1f} s  {line.text}"
    )
    return text if line.ok else f"{text}\n        remedy: {line.remedy}"


# -------------------------------------------------------------------------------- launches


def _all_checks(job: dict[str, Any]) -> Iterator[Line]:
    from lightning_dsgd.cli.selfcheck.checks import CHECKS, LAST

    fine = True
    for line in _launch(job, list(CHECKS), range(job["ranks"])):
        fine = fine and line.ok
        yield line
    if fine:
        yield from _launch(job, [LAST], range(job["ranks"] - 1))


def _launch(job: dict[str, Any], checks: list[str], speak: Sequence[int]) -> Iterator[Line]:
    """Each check as soon as all ranks that can speak have done it; the first failure ends it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({**job, "checks": checks}))
        processes = _start(job, folder)
        try:
            deadline = time.monotonic() + _LIMIT
            for number, check in enumerate(checks):
                line = _await_line(folder, processes, number, check, speak, deadline)
                yield line
                if not line.ok:
                    return
            for process in processes:  # they are done
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10.0)
        finally:
            _end(processes)


def _start(job: dict[str, Any], folder: Path) -> list[subprocess.Popen[bytes]]:
    """Under horovodrun, or each by itself as Lightning would start them."""
    line = [sys.executable, "-m", "lightning_dsgd.cli.selfcheck.rank", str(folder)]
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    ranks: int = job["ranks"]
    if job["backend"] == "horovod":
        horovodrun = str(Path(sys.executable).with_name("horovodrun"))
        return [_popen([horovodrun, "-np", str(ranks), *line], env, folder)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    env |= {"NODE_RANK": "0"}
    return [_popen(line, {**env, "LOCAL_RANK": str(rank)}, folder) for rank in range(ranks)]


def _popen(line: list[str], env: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            line, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await_line(
    folder: Path,
    processes: Sequence[subprocess.Popen[bytes]],
    number: int,
    check: str,
    speak: Sequence[int],
    deadline: float,
) -> Line:
    """What all ranks have written of that check; why not, where one has not."""
    while time.monotonic() < deadline:
        ended = all(process.poll() is not None for process in processes)
        found = {rank: lines[number] for rank, lines in _read(folder, speak) if len(lines) > number}
        wrong = {rank: line for rank, line in found.items() if not line["ok"]}
        if wrong or len(found) == len(speak):
            return _joined(check, found, wrong)
        if ended:
            break
        time.sleep(_GLANCE)
    silent = sorted(set(speak) - set(found))
    why = "ended without a word" if ended else f"did not come to an end within {_LIMIT:g} s"
    tail = (folder / "output").read_text(errors="replace").strip()[-1500:]
    return _failed(check, f"rank {', '.join(map(str, silent))} {why}:\n{tail}", 0.0)


def _read(folder: Path, speak: Sequence[int]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    for rank in speak:
        file = folder / f"{rank}.jsonl"
        text = file.read_text() if file.exists() else ""
        yield rank, [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]


def _joined(check: str, found: dict[int, Any], wrong: dict[int, Any]) -> Line:
    seconds = max(line["seconds"] for line in found.values())
    if wrong:
        text = "; ".join(f"rank {rank}: {line['text']}" for rank, line in sorted(wrong.items()))
        return _failed(check, text, seconds)
    return Line(check, True, found[min(found)]["text"], seconds)


def _failed(check: str, text: str, seconds: float) -> Line:
    remedy = next(words for name, words in REMEDIES.items() if check.startswith(name))
    return Line(check, False, text, seconds, remedy)
