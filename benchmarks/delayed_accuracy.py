"""Fashion-MNIST with a large batch: does the hidden, corrected exchange cost accuracy?

python -m benchmarks.delayed_accuracy --report
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.harness import Case, launch, options, report, table

RIVALS: dict[str, Case] = {
    "synchronous SGD": {"strategy": "backup_workers", "arguments": {"backups": 0}},
    "DC-S3GD, λ₀ = 0.2": {"strategy": "dc_s3gd"},
    "DC-S3GD, λ₀ = 0.2 per tensor": {
        "strategy": "dc_s3gd",
        "arguments": {"lambda_scope": "tensor"},
    },
    "stale-synchronous, λ₀ = 0": {"strategy": "dc_s3gd", "arguments": {"lambda0": 0.0}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=256, help="rows per rank and step, 4 ranks")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--report", action="store_true")
    given: Any = options(parser, seeds=1, epochs=1)
    steps = given.epochs * (60_000 // (4 * given.batch))
    common: Case = {
        "data": "fashion",
        "widths": [256, 128],
        "batch": given.batch,
        "lr": given.lr,
        "momentum": 0.9,
        "steps": steps,
        "evaluate": True,
    }
    cases = [{**common, **rival} for rival in RIVALS.values()]
    runs = [
        launch([{**case, "seed": seed} for case in cases], smoke=given.smoke)
        for seed in range(given.seeds)
    ]
    found = {
        name: [100 * run[index][0]["accuracy"] for run in runs] for index, name in enumerate(RIVALS)
    }
    base = statistics.mean(found["synchronous SGD"])
    rows = [
        [
            name,
            " ".join(f"{value:.2f}" for value in values),
            f"{statistics.mean(values):.2f}",
            f"{statistics.mean(values) - base:+.2f}",
        ]
        for name, values in found.items()
    ]
    text = table(["4 ranks", "test accuracy %, by seed", "mean", "to synchronous"], rows)
    text += (
        f"\n\nA perceptron of 784-256-128-10, {given.epochs} epochs ({steps} steps) with a global "
        f"batch of {4 * given.batch}, SGD with rate {given.lr} and momentum 0.9 for all."
    )
    command = (
        f"python -m benchmarks.delayed_accuracy --seeds {given.seeds} --batch {given.batch} "
        f"--epochs {given.epochs} --lr {given.lr} --report"
    )
    title = "DC-S3GD: accuracy on Fashion-MNIST"
    report("dc_s3gd_accuracy", title, command, text, found, write=given.report)


if __name__ == "__main__":
    main()
