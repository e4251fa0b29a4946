"""`lightning-dsgd plan`: compare strategies on a cluster before paying for it."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped]  # ships no types

from lightning_dsgd.control.trace import FILE_NAME, Trace, TraceError, read_trace
from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.registry import algorithms
from lightning_dsgd.simulate.cluster import Cluster, Description, read_cluster
from lightning_dsgd.simulate.planning import (
    Candidate,
    Option,
    Recommendation,
    Settings,
    candidates,
    evaluate,
    recommend,
)
from lightning_dsgd.simulate.replay import recorded_cluster, recorded_halves
from lightning_dsgd.simulate.theory import LossModel, fit_loss
from lightning_dsgd.workers.messages import Contribution

_LOSS_KEYS = ("start", "rate", "noise", "optimum", "staleness")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `plan` takes."""
    parser.add_argument("source", help="a cluster file (YAML) or the trace directory of a real run")
    parser.add_argument("--workers", type=numbers, metavar="N,…", help="worker counts to compare")
    parser.add_argument(
        "--strategies",
        type=names,
        metavar="NAME,…",
        help="of those that `lightning-dsgd algorithms` lists; default: all worth comparing",
    )
    parser.add_argument("--k", type=numbers, metavar="K,…", help="the Ks to try; default: a spread")
    parser.add_argument("--target", type=float, help="the loss to reach, if a loss curve is known")
    parser.add_argument(
        "--loss-curve",
        metavar="CSV",
        help="measured losses: a column `step` or `update`, and one whose name contains `loss`",
    )
    parser.add_argument(
        "--curve-k", type=float, metavar="K", help="gradients per update when it was measured"
    )
    parser.add_argument(
        "--optimum", type=float, default=0.0, help="the least loss the model can have (default 0)"
    )
    parser.add_argument(
        "--staleness-penalty",
        type=float,
        default=0.5,
        metavar="G",
        help="how much a stale gradient misleads, 0 (not) to 1 (fully); default 0.5",
    )
    parser.add_argument("--updates", type=int, default=2000, help="updates per simulation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--finish-late",
        action="store_true",
        help="late workers of the synchronous variants finish their gradient instead of stopping",
    )
    parser.add_argument("--plot", metavar="FILE", help="also draw the comparison")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Compare and recommend."""
    if args.updates < 100:
        raise ConfigurationError("--updates must be at least 100, or the figures mean nothing")
    source, trace = read_source(args.source)
    wanted = candidates(
        source.cluster,
        args.workers or source.workers,
        args.strategies,
        args.k,
        cancel_late=not args.finish_late,
    )
    settings = Settings(
        updates=args.updates,
        seed=args.seed,
        loss=_loss_model(args, source, trace),
        target=source.target if args.target is None else args.target,
    )
    if args.target is not None and settings.loss is None:
        raise ConfigurationError("--target needs --loss-curve, or `loss` in the cluster file")
    progress = Progress(len(wanted))
    options = evaluate(source.cluster, wanted, settings, progress)
    progress.done()
    best = recommend(options)
    _print(args, settings, options, best)
    if args.plot:
        from lightning_dsgd.report.picture import draw_plan

        draw_plan(options, best.option, Path(args.plot))
    return 0


def _print(
    args: argparse.Namespace,
    settings: Settings,
    options: list[Option],
    best: Recommendation,
) -> None:
    trainer = best.trainer()
    if args.json:
        print(json.dumps(_as_json(settings, options, best, trainer), indent=2))
        return
    print(table(options))
    print(f"\nRecommendation: {best.option.candidate}\nbecause it is {_reason(best.reason)}.\n")
    print("# Trainer configuration; devices * num_nodes is the number of workers")
    print(yaml.safe_dump(trainer, sort_keys=False), end="")


def _reason(text: str) -> str:
    return text if not text.startswith(("most", "no ")) else f"the choice with {text}"


def _as_json(
    settings: Settings, options: list[Option], best: Recommendation, trainer: dict[str, Any]
) -> dict[str, Any]:
    return {
        "updates": settings.updates,
        "seed": settings.seed,
        "target": settings.target,
        "options": [option.summary() for option in options],
        "recommendation": {
            "strategy": best.option.candidate.strategy,
            "workers": best.option.candidate.workers,
            "k": best.option.candidate.k,
            "reason": best.reason,
            "config": trainer,
        },
    }


# ---------------------------------------------------------------------------------- input


def read_source(path: str) -> tuple[Description, Trace | None]:
    """A cluster file, or a trace turned into a cluster; exit code 2 stands behind every error."""
    where = Path(path)
    if not where.is_dir() and where.suffix != Path(FILE_NAME).suffix:
        return read_cluster(where), None
    try:
        trace = read_trace(where)
        cluster = recorded_cluster(trace)
    except TraceError as error:
        raise ConfigurationError(str(error)) from None
    return Description(cluster, (cluster.workers,)), trace


def _loss_model(
    args: argparse.Namespace, source: Description, trace: Trace | None
) -> LossModel | None:
    if args.loss_curve:
        updates, losses = read_curve(Path(args.loss_curve))
        k = args.curve_k or _recorded_k(source.cluster, trace)
    elif source.loss is not None:
        return _described_loss(source.loss)
    elif trace is not None and args.target is not None:
        updates, losses = _recorded_losses(trace)
        k = args.curve_k or _recorded_k(source.cluster, trace)
    else:
        return None
    return fit_loss(
        np.asarray(updates),
        np.asarray(losses),
        k=k,
        optimum=args.optimum,
        staleness=args.staleness_penalty,
    )


def _described_loss(given: Any) -> LossModel:
    unknown = sorted(str(key) for key in given if key not in _LOSS_KEYS)
    missing = [key for key in ("start", "rate") if key not in given]
    if unknown or missing:
        wrong = f"unknown {unknown[0]!r}" if unknown else f"{missing[0]} is missing"
        raise ConfigurationError(f"loss: {wrong}; it takes {', '.join(_LOSS_KEYS)}")
    try:
        return LossModel(**{key: float(value) for key, value in given.items()})
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"loss: {error}") from None


def _recorded_k(cluster: Cluster, trace: Trace | None) -> float:
    if trace is None:
        return float(cluster.workers)
    algorithm, _ = recorded_halves(trace)
    return float(algorithm.gradients_per_round(trace.header.workers))


def _recorded_losses(trace: Trace) -> tuple[list[float], list[float]]:
    """The trace's own curve: what each contribution reported, at the version it was computed at."""
    points = [
        (float(event.version), event.loss)
        for _, event in trace.events
        if isinstance(event, Contribution) and event.loss is not None
    ]
    return [version for version, _ in points], [loss for _, loss in points]


def read_curve(file: Path) -> tuple[list[float], list[float]]:
    """Steps and losses from a CSV file, such as the one Lightning's CSVLogger writes."""
    try:
        with file.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"cannot read the loss curve {file}: {error}") from None
    columns = [name for name in (rows[0] if rows else {}) if name]
    step = next((name for name in columns if name in ("update", "step")), None)
    loss = next((name for name in columns if "loss" in name and "val" not in name), None)
    if step is None or loss is None:
        raise ConfigurationError(
            f"{file} needs a column `step` or `update` and one with `loss` in its name; it has: "
            f"{', '.join(columns) or 'none'}"
        )
    try:
        points = [(float(row[step]), float(row[loss])) for row in rows if row[step] and row[loss]]
    except ValueError as error:
        raise ConfigurationError(f"{file}: {error}") from None
    return [step for step, _ in points], [loss for _, loss in points]


def numbers(text: str) -> list[int]:
    """A list of counts from the command line."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers") from None
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every number must be at least 1")
    return values


def names(text: str) -> list[str]:
    """A list of strategies from the command line."""
    values = [part.strip() for part in text.split(",")]
    known = algorithms()
    unknown = [value for value in values if value not in known]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown strategy {unknown[0]!r}; known: {', '.join(known)}"
        )
    return values


# --------------------------------------------------------------------------------- output


class Progress:
    """One line on the terminal that says what is being simulated; silent in a pipe."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._shown = sys.stderr.isatty()

    def __call__(self, done: int, candidate: Candidate) -> None:
        if self._shown:
            filled = 20 * done // max(1, self._total)
            bar = "#" * filled + "." * (20 - filled)
            text = f"\r[{bar}] {done}/{self._total} {candidate}"
            print(f"{text:<79.79}", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r" + " " * 79 + "\r", end="", file=sys.stderr, flush=True)


def table(options: list[Option]) -> str:
    """The comparison in columns."""
    timed = any(option.seconds_to_target is not None for option in options)
    head = ["workers", "strategy", "K", "s/update", "±99%", "grads/update", "grads/s"]
    head += ["staleness", "wasted"] + (["s to target"] if timed else [])
    rows = [head] + [_row(option, timed) for option in options]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: list[str], widths: list[int]) -> str:
    cells = [
        cell.ljust(width) if column == 1 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _row(option: Option, timed: bool) -> list[str]:
    result, candidate = option.result, option.candidate
    row = [
        str(candidate.workers),
        candidate.strategy,
        "-" if candidate.k is None else str(candidate.k),
        f"{result.seconds_per_update:.4g}",
        f"{result.confidence:.1g}",
        f"{result.gradients_per_update:.3g}",
        f"{result.gradients_per_second:.4g}",
        f"{result.mean_staleness:.2f}",
        f"{result.wasted:.0%}",
    ]
    if timed:
        seconds = option.seconds_to_target
        row.append("never" if seconds in (None, float("inf")) else f"{seconds:.4g}")
    return row
