"""Four ranks behind slow links: is the all-reduce hidden?

Each rank runs in a network namespace of its own, whose link to a common bridge `tc` limits to a
rate. Needs root and iproute2.

sudo python -m benchmarks.slow_network --report
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Case, every_rank, report, table
from benchmarks.network import address, network

RANKS = 4


def launch(cases: list[Case], rate: str) -> list[list[Any]]:
    """Every rank's results, [case][rank], one process per namespace."""
    with network(RANKS, rate) as names, tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cases.json")
        file.write_text(json.dumps(cases))
        program = [sys.executable, "-m", "benchmarks.worker", str(file), folder]
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *program],
                cwd=ROOT,
                env=environment(rank),
                stdout=subprocess.DEVNULL,
                stderr=open(Path(folder, f"{name}.txt"), "w"),  # noqa: SIM115  # goes with the folder
            )
            for rank, name in enumerate(names)
        ]
        try:
            codes = [process.wait(timeout=600) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(codes):
            sys.exit("".join(Path(folder, f"{name}.txt").read_text()[-2000:] for name in names))
        found = [json.loads(Path(folder, f"rank-{r}.json").read_text()) for r in range(RANKS)]
    return [list(results) for results in zip(*found, strict=True)]


def environment(rank: int) -> dict[str, str]:
    """What torchrun would set, with the addresses of the namespaces."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": "29477",
        "TORCHELASTIC_RUN_ID": "slow-network",
        "GLOO_SOCKET_IFNAME": "eth0",  # for the rival
    }


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
    given: Any = parser.parse_args()
    common: Case = {"widths": [512, 512], "batch": 16, "warm_up": 4, "steps": given.steps}
    bare = {**common, **RIVALS["backup_workers, backups=0"]}
    paces = [
        {**common, **rival, "stragglers": every_rank(seconds, RANKS)}
        for rival in RIVALS.values()
        for seconds in given.compute
    ]
    found = [results[0]["per_update"] for results in launch([bare, *paces], given.rate)]
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
