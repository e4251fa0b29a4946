"""AD-PSGD with one of four ranks ten times slower: what do the others notice?

    python -m benchmarks.gossip [--launcher horovodrun] [--repetitions 3] [--report | --smoke]

Every mini-batch sleeps 0.05 s, the slow rank's 0.5 s. A rank's time per step includes the end of
the epoch, where all wait for the last gradient.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.harness import Case, every_rank, launch, options, report, spread, table

EVEN = every_rank(0.05)
ONE_SLOW = [*EVEN[:3], {"kind": "slow", "rank": 3, "seconds": 0.5}]
LIMIT = 1.10


def cases(launcher: str) -> list[Case]:
    """Rivals of one launch; DDP comes last and needs torchrun."""
    own: Case = {"strategy": "ad_psgd", "epochs": 1, "warm_up": 5}
    found: list[Case] = [
        {**own, "stragglers": EVEN, "arguments": {"gradients_per_epoch": 800}},
        {**own, "stragglers": ONE_SLOW, "arguments": {"gradients_per_epoch": 620}},
    ]
    if launcher == "torchrun":
        found += [
            {"strategy": "ddp", "steps": 45, "warm_up": 5, "stragglers": EVEN},
            {"strategy": "ddp", "steps": 20, "warm_up": 5, "stragglers": ONE_SLOW},
        ]
    return found


def pace(results: list[Any]) -> float:
    """Seconds per step of the ranks that are never slow."""
    return statistics.mean(result["per_update"] for result in results[:3])


def rows(paces: list[list[float]]) -> tuple[list[list[str]], dict[str, list[float]]]:
    """One line per strategy: without a slow rank, with one, and their ratio within a launch."""
    lines: list[list[str]] = []
    ratios: dict[str, list[float]] = {}
    for name, first in (("AD-PSGD", 0), ("Lightning DDP", 2)):
        if first >= len(paces[0]):
            continue
        even, slow = [run[first] for run in paces], [run[first + 1] for run in paces]
        ratios[name] = [b / a for a, b in zip(even, slow, strict=True)]
        lines.append([name, spread(even), spread(slow), spread(ratios[name], 3)])
    return lines, ratios


def main() -> int:
    """Measure, and fail if the others are slowed by more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launcher", choices=["torchrun", "horovodrun"], default="torchrun")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--report", action="store_true")
    args = options(parser, repetitions=1)
    runs = [
        launch(cases(args.launcher), launcher=args.launcher, smoke=args.smoke)
        for _ in range(args.repetitions)
    ]
    lines, ratios = rows([[pace(results) for results in run] for run in runs])
    ratio = statistics.median(ratios["AD-PSGD"])
    exchanges = [result["tally"]["workers"] for run in runs for result in run[1][:1]]
    text = table(["4 ranks, the 3 fast ones", "nobody slow", "one 10 times slower", "ratio"], lines)
    text += (
        "\n\nSeconds per step: median (range) over "
        f"{args.repetitions} launches under {args.launcher}; rivals share each launch. Required: a "
        f"median ratio of at most {LIMIT}; {'holds' if ratio <= LIMIT else 'DOES NOT HOLD'}.\n\n"
        "With the slow rank, first launch:\n\n"
    )
    counted = [[str(r), *(str(w[k]) for k in COUNTS)] for r, w in enumerate(exchanges[0])]
    text += table(["rank", *COUNTS], counted)
    name = "gossip" if args.launcher == "torchrun" else "gossip_horovod"
    command = f"python -m benchmarks.gossip --launcher {args.launcher}"
    command += f" --repetitions {args.repetitions} --report"
    report(name, "AD-PSGD beside a slow rank", command, text, ratios, write=args.report)
    return 0 if ratio <= LIMIT or args.smoke else 1


COUNTS = ["gradients", "started", "answered"]

if __name__ == "__main__":
    raise SystemExit(main())
