"""Which strategy and which K pay on a cluster: simulate the candidates, compare, say why.

The comparison knows two questions. With a loss model and a target: which option is expected to be
there first. Without: which option uses most gradients per second with none of them stale, because
what staleness costs cannot be told from timing alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.registry import algorithms
from lightning_dsgd.simulate.algorithms import algorithm_class, make_algorithm
from lightning_dsgd.simulate.cluster import Cluster
from lightning_dsgd.simulate.learning import Curve
from lightning_dsgd.simulate.result import Result
from lightning_dsgd.simulate.runs import run
from lightning_dsgd.simulate.theory import LossModel
from lightning_dsgd.workers.algorithm import Algorithm, Arguments, RoundsAlgorithm
from lightning_dsgd.workers.policy import RoundsPolicy

_CLOSE = 1.03
"""Options this near to the best are equal: neither cluster nor loss model is known any better."""
_LONGEST = 8
"""How many times the asked-for updates are simulated at most, waiting for an adaptive K."""


@dataclass(frozen=True)
class Candidate:
    """Something to simulate."""

    strategy: str
    workers: int
    arguments: Arguments = field(default_factory=dict)

    def make(self) -> Algorithm:
        """The strategy itself, with these arguments."""
        return make_algorithm(self.strategy, self.workers, self.arguments)

    @property
    def k(self) -> int | None:
        """Gradients per update, or at first, where the strategy has a K."""
        return self.make().first_k(self.workers)

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
    loss: LossModel | None = None
    target: float | None = None


def candidates(
    cluster: Cluster,
    workers: Iterable[int],
    strategies: Sequence[str] | None = None,
    ks: Sequence[int] | None = None,
    cancel_late: bool = True,
) -> list[Candidate]:
    """Every strategy asked for, at every worker count, with all arguments worth comparing."""
    names = planned() if strategies is None else strategies
    found = [
        Candidate(name, count, _late(cls, arguments, count, cancel_late))
        for count in workers
        for name, cls in ((name, algorithm_class(name)) for name in names)
        for arguments in _choices(cls, count, cluster.compute.mean, ks)
    ]
    for candidate in found:
        candidate.make()
    return found


def planned() -> list[str]:
    """What a plan compares unless told otherwise, the plainest first."""
    classes = {name: algorithm_class(name) for name in algorithms()}
    names = [name for name, cls in classes.items() if cls.planned]
    return sorted(names, key=lambda name: (classes[name].plainness, name))


def _choices(
    cls: type[Algorithm], workers: int, seconds: float, ks: Sequence[int] | None
) -> Sequence[Arguments]:
    choices = cls.choices(workers, seconds)
    if ks is None or not cls.has_k:
        return choices
    extra = choices[0] if choices else {}
    return [{**extra, **cls.with_k(k, workers)} for k in ks]


def _late(cls: type[Algorithm], arguments: Arguments, workers: int, cancel: bool) -> Arguments:
    """Whether late work is given up, where there is any."""
    if not cls.takes("cancel_late"):
        return arguments
    together = make_algorithm(cls.strategy_name, workers, arguments)
    if isinstance(together, RoundsAlgorithm) and together.steps_together(workers):
        return arguments
    return {**arguments, "cancel_late": cancel}


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
    policy = candidate.make().make_policy(candidate.workers)
    if isinstance(policy, RoundsPolicy) and policy.heeds_loss and settings.loss is not None:
        return _evaluate_adaptive(cluster, candidate, settings, settings.loss)
    result = run(candidate.make(), cluster, settings.updates, seed=settings.seed)
    return Option(candidate, result, _seconds_to_target(candidate, result, settings))


def _evaluate_adaptive(
    cluster: Cluster, candidate: Candidate, settings: Settings, loss: LossModel
) -> Option:
    """K follows the loss, so the loss is simulated too, for as long as the target may need."""
    updates, target = settings.updates, settings.target

    def simulated() -> Result:
        return run(candidate.make(), cluster, updates, seed=settings.seed, learner=Curve(loss))

    result = simulated()
    if target is None:
        return Option(candidate, result)
    while math.isinf(result.time_to(target)) and updates < _LONGEST * settings.updates:
        updates *= 2
        result = simulated()
    return Option(candidate, result, result.time_to(target))


def _seconds_to_target(candidate: Candidate, result: Result, settings: Settings) -> float | None:
    """Updates by the loss model, times seconds per update."""
    loss, target = settings.loss, settings.target
    if loss is None or target is None:
        return None
    fresh = 1.0 if algorithm_class(candidate.strategy).corrects_staleness else result.fresh
    updates = loss.updates_to(target, result.gradients_per_update, fresh)
    return updates * result.seconds_per_update


# ------------------------------------------------------------------------ recommendation


@dataclass(frozen=True)
class Recommendation:
    """One option, and why it and not another."""

    option: Option
    reason: str

    def trainer(self) -> dict[str, Any]:
        """The Trainer's configuration for it."""
        candidate = self.option.candidate
        strategy: dict[str, Any] = {"class_path": class_path(candidate.strategy)}
        if candidate.arguments:
            strategy["init_args"] = dict(candidate.arguments)
        return {"trainer": {"devices": candidate.workers, "strategy": strategy}}


def class_path(name: str) -> str:
    """By which a configuration names the strategy; ours are exported at the top."""
    cls = algorithm_class(name)
    ours = cls.__module__.startswith("lightning_dsgd_plugins.")
    return f"{'lightning_dsgd' if ours else cls.__module__}.{cls.__name__}"


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


def _order(option: Option) -> tuple[int, int, str]:
    """What is nearly equal goes to fewer workers, then to the plainer strategy."""
    name = option.candidate.strategy
    return option.candidate.workers, algorithm_class(name).plainness, name


def _synchronous(options: Sequence[Option], best: Option) -> Option | None:
    """Plain synchronous training on as many workers: what people run today."""
    rivals = (o for o in options if o is not best and _is_synchronous(o.candidate))
    return next((o for o in rivals if o.candidate.workers == best.candidate.workers), None)


def _is_synchronous(candidate: Candidate) -> bool:
    algorithm = candidate.make()
    together = isinstance(algorithm, RoundsAlgorithm) and algorithm.steps_together
    return bool(together and together(candidate.workers))


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times as fast as" if math.isfinite(ratio) else "which is never reached by"
