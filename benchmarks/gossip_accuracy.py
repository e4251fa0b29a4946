"""AD-PSGD's accuracy on Fashion-MNIST beside synchronous SGD's, at an equal number of gradients.

    python -m benchmarks.gossip_accuracy [--seeds 3] [--epochs 2] [--report | --smoke]

Needs Debian's package dataset-fashion-mnist. The slow rank takes ten times as long per mini-batch;
synchronous SGD's result does not depend on that.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.harness import Case, launch, options, report, spread, table

BATCH, RANKS, LR = 32, 4, 0.05
UPDATES_PER_EPOCH = 60_000 // (BATCH * RANKS)
LIMIT = 0.01
NAMES = ["synchronous SGD", "AD-PSGD", "AD-PSGD, one rank 10 times slower"]


def cases(seed: int, epochs: int) -> list[Case]:
    """The three rivals of one seed."""
    common: Case = {
        "data": "fashion",
        "batch": BATCH,
        "widths": [128],
        "lr": LR,
        "seed": seed,
        "evaluate": True,
    }
    gossip: Case = {
        **common,
        "strategy": "ad_psgd",
        "epochs": epochs,
        "arguments": {"gradients_per_epoch": UPDATES_PER_EPOCH * RANKS, "seed": seed},
    }
    synchronous: Case = {
        **common,
        "strategy": "backup_workers",
        "steps": UPDATES_PER_EPOCH * epochs,
        "arguments": {"backups": 0},
    }
    slow = [{"kind": "slow", "rank": RANKS - 1, "factor": 10}]
    return [synchronous, gossip, {**gossip, "stragglers": slow}]


def gradients(result: Any) -> list[int]:
    """Each rank's share of the work."""
    workers = result["tally"]["workers"]
    return [worker.get("gradients", worker.get("used")) for worker in workers]


def main() -> int:
    """Measure, and fail if AD-PSGD is behind by more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--report", action="store_true")
    args = options(parser, seeds=1, epochs=1)
    runs = [launch(cases(seed, args.epochs), smoke=args.smoke) for seed in range(args.seeds)]
    found = {name: [run[i][0]["accuracy"] for run in runs] for i, name in enumerate(NAMES)}
    shares = {name: gradients(runs[0][i][0]) for i, name in enumerate(NAMES)}
    base = statistics.mean(found[NAMES[0]])
    behind = {name: base - statistics.mean(values) for name, values in found.items()}
    lines = [
        [name, spread(found[name]), f"{behind[name]:+.4f}", " ".join(map(str, shares[name]))]
        for name in NAMES
    ]
    passed = max(behind.values()) <= LIMIT
    text = table(["4 ranks", "accuracy: median (range)", "behind, on average", "gradients"], lines)
    text += (
        f"\n\n{args.seeds} seeds, {args.epochs} epochs, batches of {BATCH}, SGD at a rate of "
        f"{LR}, one hidden layer of 128. Gradients by rank, seed 0. Required: at most "
        f"{LIMIT:.2f} behind; {'holds' if passed else 'DOES NOT HOLD'}."
    )
    sizes = f"--seeds {args.seeds} --epochs {args.epochs}"
    command = f"python -m benchmarks.gossip_accuracy {sizes} --report"
    title = "AD-PSGD's accuracy on Fashion-MNIST"
    report("gossip_accuracy", title, command, text, found, write=args.report)
    return 0 if passed or args.smoke else 1


if __name__ == "__main__":
    raise SystemExit(main())
