"""Which strategy and which K pay on a cluster: simulate the candidates, compare, say why.

The comparison knows two questions. With a loss model and a target: which option is expected to be
there first. Without: which option uses most gradients per second with none of them stale, because
what staleness costs cannot be told from timing alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.simulate.cluster import Cluster
from lightning_dsgd.simulate.learning import Curve
from lightning_dsgd.simulate.result import Result
from lightning_dsgd.simulate.strategies import (
    HAVE_K,
    K_FAMILY,
    STRATEGIES,
    check,
    default_interval,
    simulate,
)
from lightning_dsgd.theory import LossModel

_CLASSES = {
    "k_sync": "lightning_dsgd.KSyncStrategy",
    "k_batch_sync": "lightning_dsgd.KBatchSyncStrategy",
    "k_async": "lightning_dsgd.KAsyncStrategy",
    "k_batch_async": "lightning_dsgd.KBatchAsyncStrategy",
    "backup_workers": "lightning_dsgd.BackupWorkersStrategy",
    "adasync": "lightning_dsgd.AdaSyncStrategy",
    "cyclic_delay": "lightning_dsgd.CyclicDelayStrategy",
    "dc_s3gd": "lightning_dsgd.DCS3GDStrategy",
    "ad_psgd": "lightning_dsgd.ADPSGDStrategy",
}
PLANNED = tuple(name for name in STRATEGIES if name != "backup_workers")
"""Backup workers are K-sync with K = P - b: listing both would show every figure twice."""


_CLOSE = 1.03
"""Options this near to the best are equal: neither cluster nor loss model is known any better."""
_LONGEST = 8
"""How many times the asked-for updates are simulated at most, waiting for an adaptive K."""


@dataclass(frozen=True)
class Candidate:
    """Something to simulate."""

    strategy: str
    workers: int
    k: int | None = None

    def __str__(self) -> str:
        k = "" if self.k is None else f", K={self.k}"
        return f"{self.strategy}, {self.workers} workers{k}"


@dataclass(frozen=True)
class Option:
    """A candidate with what the simulation says of it."""

    candidate: Candidate
    result: Result
    seconds_to_target: float | None = None

    def summary(self) -> dict[str, Any]:
        """The figures, ready for JSON; null is a target never reached."""
        figures = {**self.result.summary(), "k": self.candidate.k}
        if self.seconds_to_target is not None:
            reached = math.isfinite(self.seconds_to_target)
            figures["seconds_to_target"] = self.seconds_to_target if reached else None
        return figures


@dataclass(frozen=True)
class Settings:
    """How to simulate and what to compare by."""

    updates: int = 2000
    seed: int = 0
    cancel_late: bool = True
    loss: LossModel | None = None
    target: float | None = None


def candidates(
    workers: Iterable[int], strategies: Sequence[str] | None, ks: Sequence[int] | None
) -> list[Candidate]:
    """Every strategy asked for, at every worker count, at each K or a spread of them."""
    found: list[Candidate] = []
    for count in workers:
        for strategy in PLANNED if strategies is None else strategies:
            if strategy == "ad_psgd" and count < 2:
                continue
            choices = _ks(strategy, count, ks)
            found.extend(Candidate(strategy, count, k) for k in choices)
    for candidate in found:
        check(candidate.strategy, candidate.workers, candidate.k)
    return found


def _ks(strategy: str, workers: int, ks: Sequence[int] | None) -> list[int | None]:
    if strategy not in HAVE_K:
        return [None]
    if strategy == "adasync":
        return [max(1, workers // 4)] if ks is None else list(ks)
    return list(spread(workers)) if ks is None else list(ks)


def spread(workers: int) -> list[int]:
    """One, a quarter, a half, three quarters, all but one, all: where the trade-off shows."""
    shares = (1, workers // 4, workers // 2, 3 * workers // 4, workers - 1, workers)
    return sorted({k for k in shares if k >= 1})


def evaluate(
    cluster: Cluster,
    wanted: Sequence[Candidate],
    settings: Settings,
    progress: Callable[[int, Candidate], None] | None = None,
) -> list[Option]:
    """Simulate every candidate."""
    options = []
    for done, candidate in enumerate(wanted):
        if progress is not None:
            progress(done, candidate)
        options.append(_evaluate(cluster.with_workers(candidate.workers), candidate, settings))
    return options


def _evaluate(cluster: Cluster, candidate: Candidate, settings: Settings) -> Option:
    if candidate.strategy == "adasync" and settings.loss is not None:
        return _evaluate_adaptive(cluster, candidate, settings, settings.loss)
    result = _simulate(cluster, candidate, settings, settings.updates)
    return Option(candidate, result, _seconds_to_target(result, settings))


def _evaluate_adaptive(
    cluster: Cluster, candidate: Candidate, settings: Settings, loss: LossModel
) -> Option:
    """K follows the loss, so the loss is simulated too, for as long as the target may need."""
    updates = settings.updates
    result = _simulate(cluster, candidate, settings, updates, Curve(loss))
    if settings.target is None:
        return Option(candidate, result)
    while math.isinf(result.time_to(settings.target)) and updates < _LONGEST * settings.updates:
        updates *= 2
        result = _simulate(cluster, candidate, settings, updates, Curve(loss))
    return Option(candidate, result, result.time_to(settings.target))


def _simulate(
    cluster: Cluster,
    candidate: Candidate,
    settings: Settings,
    updates: int,
    learner: Curve | None = None,
) -> Result:
    return simulate(
        candidate.strategy,
        cluster,
        k=candidate.k,
        updates=updates,
        seed=settings.seed,
        cancel_late=settings.cancel_late,
        learner=learner,
    )


def _seconds_to_target(result: Result, settings: Settings) -> float | None:
    """Updates by the loss model, times seconds per update."""
    loss, target = settings.loss, settings.target
    if loss is None or target is None:
        return None
    # the pipeline's one-update staleness is what its correction is for
    fresh = 1.0 if result.strategy == "dc_s3gd" else result.fresh
    updates = loss.updates_to(target, result.gradients_per_update, fresh)
    return updates * result.seconds_per_update


# ------------------------------------------------------------------------ recommendation


@dataclass(frozen=True)
class Recommendation:
    """One option, and why it and not another."""

    option: Option
    reason: str

    def trainer(self, cluster: Cluster, cancel_late: bool) -> dict[str, Any]:
        """The Trainer's configuration for it."""
        candidate = self.option.candidate
        arguments = _arguments(candidate, cancel_late)
        if candidate.strategy == "adasync":
            arguments["interval"] = float(f"{default_interval(cluster):.3g}")
        strategy: dict[str, Any] = {"class_path": _CLASSES[candidate.strategy]}
        if arguments:
            strategy["init_args"] = arguments
        return {"trainer": {"devices": candidate.workers, "strategy": strategy}}


def _arguments(candidate: Candidate, cancel_late: bool) -> dict[str, Any]:
    k, name = candidate.k, candidate.strategy
    arguments: dict[str, Any] = {}
    if name in K_FAMILY:
        arguments["k"] = k
    elif name == "adasync":
        arguments["k0"] = k
    elif name == "backup_workers" and k is not None:
        arguments["backups"] = candidate.workers - k
    if name in ("k_sync", "k_batch_sync", "backup_workers"):
        late = name == "k_batch_sync" or k != candidate.workers
        arguments.update({"cancel_late": cancel_late} if late else {})
    return arguments


def recommend(options: Sequence[Option]) -> Recommendation:
    """The best option by what is known."""
    if not options:
        raise ConfigurationError("nothing to compare; name at least one strategy")
    timed = [option for option in options if option.seconds_to_target is not None]
    return _by_target(timed) if timed else _by_throughput(options)


def _by_target(options: Sequence[Option]) -> Recommendation:
    least = min(_seconds(option) for option in options)
    close = [option for option in options if _seconds(option) <= _CLOSE * least]
    best = min(close, key=lambda option: (*_order(option), _seconds(option)))
    seconds = _seconds(best)
    if math.isinf(seconds):
        found = _by_throughput(options)
        return Recommendation(
            found.option,
            "no option reaches the target by the loss model: its noise floor lies above it at "
            "every K. Use more workers, a smaller learning rate or larger mini-batches. Of these: "
            + found.reason,
        )
    reason = f"expected to reach the target after {seconds:.4g} s"
    rival = _synchronous(options, best)
    if rival is not None and rival.seconds_to_target is not None:
        reason += f"; {_times(rival.seconds_to_target / seconds)} {rival.candidate} ("
        reason += f"{rival.seconds_to_target:.4g} s)"
    return Recommendation(best, reason)


def _by_throughput(options: Sequence[Option]) -> Recommendation:
    fresh = [option for option in options if option.result.max_staleness == 0] or list(options)
    most = max(_throughput(option) for option in fresh)
    close = [option for option in fresh if _CLOSE * _throughput(option) >= most]
    best = min(close, key=lambda option: (*_order(option), -_throughput(option)))
    reason = f"most gradients per second without staleness: {_throughput(best):.4g}"
    rival = _synchronous(options, best)
    if rival is not None:
        reason += f", {_times(_throughput(best) / _throughput(rival))} {rival.candidate}"
    fastest = max(options, key=_throughput)
    if _throughput(fastest) > 1.05 * _throughput(best):
        reason += (
            f". {fastest.candidate} would use {_throughput(fastest):.4g} at a mean staleness of "
            f"{fastest.result.mean_staleness:.2g}: give a loss curve and a target to weigh that"
        )
    return Recommendation(best, reason)


def _seconds(option: Option) -> float:
    return math.inf if option.seconds_to_target is None else option.seconds_to_target


def _throughput(option: Option) -> float:
    return option.result.gradients_per_second


def _order(option: Option) -> tuple[int, int]:
    """What is nearly equal goes to fewer workers, then to the strategy listed first."""
    return option.candidate.workers, STRATEGIES.index(option.candidate.strategy)


def _synchronous(options: Sequence[Option], best: Option) -> Option | None:
    """Plain synchronous training on as many workers: what people run today."""
    wanted = Candidate("k_sync", best.candidate.workers, best.candidate.workers)
    return next((o for o in options if o.candidate == wanted and o is not best), None)


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times as fast as" if math.isfinite(ratio) else "which is never reached by"
