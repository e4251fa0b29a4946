"""Four ranks behind slow links: is the all-reduce hidden?

Each rank runs in a network namespace of its own, whose link to a common bridge `tc` limits to a
rate. Needs root and iproute2.

sudo python -m benchmarks.slow_network --report
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    ROOT,
    SMOKE_RANKS,
    Case,
    Launch,
    environment,
    every_rank,
    options,
    report,
    results,
    table,
    worker,
)
from benchmarks.network import address, network

RANKS = 4


def launch(cases: list[Case], rate: str, smoke: bool) -> Launch:
    """Every rank's results, one process per namespace; DDP must come last."""
    count = SMOKE_RANKS if smoke else RANKS
    with network(count, rate) as names, tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, *worker(cases, folder, smoke)]
        logs = [Path(folder, f"{name}.txt") for name in names]
        ranks = [
            start(["ip", "netns", "exec", name, *program], rank, count, logs[rank])
            for rank, name in enumerate(names)
        ]
        if not succeed(ranks):
            sys.exit("".join(log.read_text()[-2000:] for log in logs))
        return results(folder, count)


def start(line: list[str], rank: int, ranks: int, log: Path) -> subprocess.Popen[bytes]:
    """One rank, told what torchrun would tell it, with the addresses of the namespaces."""
    told = environment(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR=address(0),
        MASTER_PORT="29477",
        TORCHELASTIC_RUN_ID="slow-network",
        GLOO_SOCKET_IFNAME="eth0",  # DDP would go by the name that all hosts share
    )
    with log.open("w") as errors:
        return subprocess.Popen(line, cwd=ROOT, env=told, stdout=subprocess.DEVNULL, stderr=errors)


def succeed(ranks: list[subprocess.Popen[bytes]], seconds: float = 600) -> bool:
    """Wait for all of them, or for the first that fails: the others could only wait for it."""
    last = time.monotonic() + seconds
    try:
        while time.monotonic() < last and not any(process.poll() for process in ranks):
            if all(process.poll() == 0 for process in ranks):
                return True
            time.sleep(0.1)
        return False
    finally:
        for process in ranks:
            process.kill()
            process.wait()


RIVALS: dict[str, Case] = {
    "dc_s3gd": {"strategy": "dc_s3gd"},
    "backup_workers, backups=0": {"strategy": "backup_workers", "arguments": {"backups": 0}},
    "Lightning DDP": {"strategy": "ddp"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="64mbit", help="of each rank's link, as tc writes it")
    parser.add_argument("--compute", type=float, nargs="+", default=[0.1, 0.25, 0.4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--report", action="store_true")
    given: Any = options(parser, rate="1gbit", compute=[0.01])
    common: Case = {"widths": [512, 512], "batch": 16, "warm_up": 4, "steps": given.steps}
    bare = {**common, **RIVALS["backup_workers, backups=0"]}
    paces = [
        {**common, **rival, "stragglers": every_rank(seconds, RANKS)}
        for rival in RIVALS.values()
        for seconds in given.compute
    ]
    ranks = launch([bare, *paces], given.rate, given.smoke)
    found = [first["per_update"] for first, *_ in ranks]
    text, data = summary(found[0], found[1:], given)
    command = (
        f"python -m benchmarks.slow_network --rate {given.rate} --steps {given.steps} --report"
    )
    title = "DC-S3GD: the all-reduce behind the gradient"
    report("dc_s3gd_overlap", title, command, text, data, write=given.report)


def summary(exchange: float, paces: list[float], given: Any) -> tuple[str, Any]:
    """Per compute time x, with c the exchange: everybody's seconds per step."""
    count = len(given.compute)
    rows, data = [], []
    for index, seconds in enumerate(given.compute):
        hidden, synchronous, ddp = (paces[index + count * rival] for rival in range(len(RIVALS)))
        longest, total = max(seconds, exchange), seconds + exchange
        numbers = [seconds, exchange, hidden, synchronous, ddp]
        ratios = [hidden / longest, synchronous / total, ddp / total]
        rows.append([f"{n:.3f}" for n in numbers] + [f"{n:.2f}" for n in ratios])
        data.append(
            {
                "compute": seconds,
                "exchange": exchange,
                **dict(zip(RIVALS, paces[index::count], strict=True)),
            }
        )
    head = ["x", "c", *RIVALS, "dc_s3gd / max(x, c)", "backups=0 / (x + c)", "DDP / (x + c)"]
    text = table(head, rows)
    text += (
        f"\n\nSeconds per step, 4 ranks, links of {given.rate}, 0.3 million parameters, all in one "
        "run. x is a pause in place of computing, before backward; c is the time per step of "
        "synchronous SGD without the pause. With the computing in a pause before backward, DDP "
        "cannot overlap its buckets with it; where backward takes long it hides part of c there."
    )
    return text, data


if __name__ == "__main__":
    main()
