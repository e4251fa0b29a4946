"""Error against simulated time for fixed K and for AdaSync, after Dutta et al., arXiv 1803.01113.

    python -m benchmarks.error_runtime

Trains a logistic regression on scikit-learn's handwritten digits with 8 simulated workers whose
mini-batches take exponential times, through the policies that decide in real training. Draws
docs/error-runtime.png and writes benchmarks/reports/error_runtime.json and .md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from benchmarks.harness import REPORTS, ROOT, options, output
from lightning_dsgd.report.picture import load_pyplot, save
from lightning_dsgd.simulate import Cluster, Logistic, simulate
from lightning_dsgd.simulate.distributions import Exponential
from lightning_dsgd.simulate.theory import order_statistic

COMMAND = "python -m benchmarks.error_runtime"
PICTURE = ROOT / "docs" / "error-runtime.png"
WORKERS, KS, FIRST_K = 8, (1, 2, 4, 8), 1
VARIANTS = ("k_sync", "k_async")
CLUSTER = Cluster(WORKERS, Exponential(1.0))
BINS = 24
ADAPTIVE = "AdaSync"
Curve = NDArray[np.float64]


@dataclass(frozen=True)
class Settings:
    """The problem and how long to look at it."""

    seconds: float = 3000.0
    seeds: int = 3
    learning_rate: float = 0.5
    batch: int = 2
    penalty: float = 0.0003


def problem(settings: Settings, seed: int = 0, every: int = 1) -> Logistic:
    """The same data for everybody; the seed decides the mini-batches."""
    features, labels = load_digits(return_X_y=True)
    return Logistic(
        features / 16.0,
        labels,
        batch=settings.batch,
        learning_rate=settings.learning_rate,
        penalty=settings.penalty,
        evaluate_every=every,
        seed=seed,
    )


def least_loss(settings: Settings, steps: int) -> float:
    """What full-batch descent with momentum ends at: the error is counted from here."""
    learner = problem(settings)
    velocity = np.zeros_like(learner.parameters)
    for _ in range(steps):
        velocity = 0.95 * velocity - 0.4 * learner.full_gradient()
        learner.parameters = learner.parameters + velocity
    return learner.evaluate()


def edges(settings: Settings) -> Curve:
    """Time bins, equally wide on a logarithmic axis."""
    return np.geomspace(4.0, settings.seconds, BINS + 1)


def run(settings: Settings, floor: float, variant: str, k: int | None, seed: int) -> Curve:
    """Mean error in each time bin of one run; K None is AdaSync."""
    first = FIRST_K if k is None else k
    quickest = order_statistic(CLUSTER.compute, first, WORKERS)
    adaptive = {"variant": variant, "k0": first, "interval": settings.seconds / 200.0}
    result = simulate(
        "adasync" if k is None else variant,
        CLUSTER,
        **(adaptive if k is None else {"k": first}),
        updates=int(1.1 * settings.seconds / quickest) + 1,
        seed=seed,
        learner=problem(settings, seed, every=16 // first),
    )
    return time_means(np.asarray(result.losses), edges(settings)) - floor


def time_means(points: Curve, bins: Curve) -> Curve:
    """Mean over each time bin of the error, which stays what it is until the next update."""
    times, errors = points.T
    instants = np.linspace(bins[:-1], bins[1:], 20)
    return np.asarray(errors[np.maximum(0, np.searchsorted(times, instants) - 1)].mean(axis=0))


def curves(
    settings: Settings, floor: float, variant: str, mapped: Callable[..., Any]
) -> dict[str, Curve]:
    """The mean over seeds for every K and for AdaSync."""
    found = {}
    for k in (*KS, None):
        runs = list(mapped(partial(run, settings, floor, variant, k), range(settings.seeds)))
        found[ADAPTIVE if k is None else f"K = {k}"] = np.mean(np.stack(runs), axis=0)
    return found


def verdict(found: dict[str, Curve]) -> dict[str, Any]:
    """Who leads when, and how far AdaSync is from the best fixed K of each moment."""
    names = [name for name in found if name != ADAPTIVE]
    fixed = np.stack([found[name] for name in names])
    envelope = fixed.min(axis=0)
    leaders = [names[index] for index in np.argmin(fixed, axis=0)]
    ratios = {name: float(np.exp(np.log(curve / envelope).mean())) for name, curve in found.items()}
    return {"leader_by_time": leaders, "mean_ratio_to_best_fixed_k": ratios}


def synchrony_grows(leaders: list[str]) -> bool:
    """Whether the leading K is larger on average in the later half of the (logarithmic) time."""
    ks = [int(name.removeprefix("K = ")) for name in leaders]
    half = len(ks) // 2
    return sum(ks[:half]) / half < sum(ks[half:]) / (len(ks) - half)


def draw(settings: Settings, found: dict[str, dict[str, Curve]], file: Path) -> None:
    """One panel per variant, both axes logarithmic."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, len(found), figsize=(10.5, 4.2), sharey=True)
    middle = np.sqrt(edges(settings)[1:] * edges(settings)[:-1])
    colours = ("#9ecae1", "#4292c6", "#2171b5", "#08306b")
    for axis, (variant, lines) in zip(axes, found.items(), strict=True):
        for name, colour in zip([n for n in lines if n != ADAPTIVE], colours, strict=True):
            axis.loglog(middle, lines[name], color=colour, label=name, linewidth=1.6)
        axis.loglog(middle, lines[ADAPTIVE], color="#d62728", label=ADAPTIVE, linewidth=2.4,
                    linestyle="--")  # fmt: skip
        axis.set_title(f"{variant.replace('_', '-').replace('k-', 'K-')}, {WORKERS} workers")
        axis.set_xlabel("simulated time, in mean mini-batch times")
        axis.grid(alpha=0.25, which="both")
    axes[0].set_ylabel("training loss above its minimum")
    axes[0].legend()
    figure.tight_layout()
    save(figure, file)


def report(settings: Settings, verdicts: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = [
        "# Error against simulated time",
        "",
        f"Made by `{COMMAND}` on {date.today()}: {settings}.",
        "",
        "Error of each fixed K and of AdaSync over that of the best fixed K at the time, geometric "
        "mean over time (1 would be the lower envelope itself):",
        "",
        "| variant | " + " | ".join([f"K = {k}" for k in KS] + [ADAPTIVE]) + " | leaders |",
        "|---|" + "---:|" * (len(KS) + 1) + "---|",
    ]
    for variant, found in verdicts.items():
        ratios = " | ".join(
            f"{value:.2f}" for value in found["mean_ratio_to_best_fixed_k"].values()
        )
        order = " → ".join(dict.fromkeys(found["leader_by_time"]))
        lines.append(f"| {variant} | {ratios} | {order} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Simulate, draw, report; fail if the paper's order does not show."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=Settings.seconds)
    parser.add_argument("--seeds", type=int, default=Settings.seeds)
    parser.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--penalty", type=float, default=Settings.penalty)
    parser.add_argument("--jobs", type=int, default=1, help="processes to use")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--output", type=Path, default=REPORTS)
    args = options(parser, seconds=40.0, seeds=1)
    settings = Settings(args.seconds, args.seeds, args.learning_rate, args.batch, args.penalty)
    floor = least_loss(settings, steps=100 if args.smoke else 4000)
    with ProcessPoolExecutor(args.jobs) as pool:
        found = {variant: curves(settings, floor, variant, pool.map) for variant in VARIANTS}
    verdicts = {variant: verdict(lines) for variant, lines in found.items()}
    content = {"command": COMMAND, "settings": vars(settings), "verdicts": verdicts}
    text = report(settings, verdicts)
    with output(args) as folder:
        draw(settings, found, folder / PICTURE.name if args.smoke else args.picture)
        (folder / "error_runtime.json").write_text(json.dumps(content, indent=2) + "\n")
        (folder / "error_runtime.md").write_text(text)
    print(text)
    grows = all(synchrony_grows(verdict["leader_by_time"]) for verdict in verdicts.values())
    return 0 if grows or args.smoke else 1


if __name__ == "__main__":
    raise SystemExit(main())
