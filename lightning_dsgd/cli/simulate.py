"""`lightning-dsgd simulate`: one strategy in simulated time, or a recorded run once more."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # ships no types

from lightning_dsgd.cli.plan import read_source
from lightning_dsgd.control.trace import Trace, TraceError
from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.registry import algorithms
from lightning_dsgd.simulate.algorithms import algorithm_class
from lightning_dsgd.simulate.cluster import Cluster
from lightning_dsgd.simulate.learning import Learner, Logistic, Quadratic
from lightning_dsgd.simulate.replay import measured_seconds_per_update, predict, replay
from lightning_dsgd.simulate.result import Result
from lightning_dsgd.simulate.runs import simulate

_SHORT: dict[str, tuple[type, str]] = {
    "max_lag": (int, "updates a replica may be behind"),
    "variant": (str, "which of the K-family an adaptive K is of"),
    "interval": (float, "seconds between two looks at the loss"),
    "delay": (int, "mini-batches per turn"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `simulate` takes."""
    parser.add_argument("source", help="a cluster file (YAML) or the trace directory of a real run")
    parser.add_argument(
        "--strategy",
        choices=list(algorithms()),
        help="what to simulate; without it, a trace's own strategy is replayed and predicted",
    )
    parser.add_argument("--workers", type=int, help="how many; default: what the source says")
    parser.add_argument("--k", type=int, help="gradients per update; default: the strategy's own")
    parser.add_argument("--updates", type=int, default=2000, help="how many to simulate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--finish-late",
        action="store_true",
        help="late workers of the synchronous variants finish their gradient instead of stopping",
    )
    for name, (kind, text) in _SHORT.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=kind, help=f"{text}; short for --set {name}=…")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the strategy, as in training, such as --set delay=2; may be repeated",
    )
    parser.add_argument(
        "--train",
        choices=("quadratic", "digits"),
        help="train meanwhile: a noisy quadratic, or logistic regression on scikit-learn's digits",
    )
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--curve", metavar="CSV", help="write (seconds, error) of the training")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(args: argparse.Namespace) -> int:
    """Simulate and print the figures."""
    if args.updates < 1:
        raise ConfigurationError("--updates must be at least 1")
    if args.curve and not args.train:
        raise ConfigurationError("--curve needs --train: without it there is no error to write")
    source, trace = read_source(args.source)
    if args.strategy is None:
        return _recorded(args, trace)
    cluster = source.cluster if args.workers is None else source.cluster.with_workers(args.workers)
    result = _simulate(args, cluster)
    _print(result.summary() | _training(result), args.json)
    if args.curve:
        _write_curve(result, Path(args.curve))
    return 0


def _simulate(args: argparse.Namespace, cluster: Cluster) -> Result:
    progress = Progress(args.updates)
    result = simulate(
        args.strategy,
        cluster,
        updates=args.updates,
        seed=args.seed,
        learner=_learner(args),
        progress=progress,
        **_arguments(args, cluster.workers),
    )
    progress.done()
    return result


def _arguments(args: argparse.Namespace, workers: int) -> dict[str, Any]:
    """The strategy's own arguments, from the command line."""
    cls = algorithm_class(args.strategy)
    arguments = {} if args.k is None else cls.with_k(args.k, workers)
    if args.finish_late and cls.takes("cancel_late"):
        arguments["cancel_late"] = False
    short = {name: getattr(args, name) for name in _SHORT}
    arguments.update({name: value for name, value in short.items() if value is not None})
    return {**arguments, **dict(_setting(text) for text in args.set)}


def _setting(text: str) -> tuple[str, Any]:
    """A value is written as in a YAML file."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(f"--set {text}: write it as NAME=VALUE")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigurationError(f"--set {text}: {value!r} is no value in YAML") from None


def _learner(args: argparse.Namespace) -> Learner | None:
    if args.train is None:
        return None
    if args.train == "quadratic":
        return Quadratic(learning_rate=args.learning_rate, seed=args.seed)
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigurationError(
            "--train digits needs scikit-learn: pip install 'lightning-dsgd[examples]'"
        ) from None
    features, labels = load_digits(return_X_y=True)
    return Logistic(
        features / 16.0, labels, learning_rate=args.learning_rate, evaluate_every=10, seed=args.seed
    )


def _recorded(args: argparse.Namespace, trace: Trace | None) -> int:
    """Does the policy decide the same again, and how long would an update take?"""
    if trace is None:
        raise ConfigurationError("--strategy is needed: a cluster file names none")
    try:
        difference = replay(trace)
        measured = measured_seconds_per_update(trace)
        result = predict(trace, updates=args.updates, seed=args.seed)
    except TraceError as error:
        raise ConfigurationError(str(error)) from None
    figures = result.summary() | {
        "measured_seconds_per_update": measured,
        "predicted_over_measured": result.seconds_per_update / measured,
        "same_decisions": difference is None,
        "first_difference": None if difference is None else str(difference),
    }
    _print(figures, args.json)
    return 0 if difference is None else 1


def _training(result: Result) -> dict[str, Any]:
    if not result.losses:
        return {}
    return {"first_error": result.losses[0][1], "last_error": result.losses[-1][1]}


def _print(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    width = max(len(name) for name in figures)
    for name, value in figures.items():
        shown = f"{value:.5g}" if isinstance(value, float) else "-" if value is None else value
        print(f"{name.replace('_', ' '):<{width}}  {shown}")


def _write_curve(result: Result, file: Path) -> None:
    try:
        with file.open("w", newline="") as lines:
            writer = csv.writer(lines)
            writer.writerow(["seconds", "error"])
            writer.writerows(result.losses)
    except OSError as error:
        raise ConfigurationError(f"cannot write {file}: {error.strerror}") from None


class Progress:
    """How far a long simulation is, on a terminal only."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._step = max(1, total // 100)
        self._shown = sys.stderr.isatty()

    def __call__(self, done: int) -> None:
        if self._shown and done % self._step == 0:
            print(f"\r{done:,} of {self._total:,} updates", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
