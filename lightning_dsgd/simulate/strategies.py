"""Strategies by name: which policy decides, and how workers behave around it."""

from __future__ import annotations

from typing import Any

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.policy import RoundsPolicy
from lightning_dsgd.simulate.arrivals import SortedArrivals
from lightning_dsgd.simulate.cluster import Cluster
from lightning_dsgd.simulate.gossip import GossipSimulation
from lightning_dsgd.simulate.learning import Learner
from lightning_dsgd.simulate.pipeline import simulate_pipeline
from lightning_dsgd.simulate.result import Result
from lightning_dsgd.simulate.rounds import Behaviour, Progress, Recorder, RoundsSimulation

K_FAMILY = ("k_sync", "k_batch_sync", "k_async", "k_batch_async")
STRATEGIES = (*K_FAMILY, "backup_workers", "adasync", "cyclic_delay", "dc_s3gd", "ad_psgd")
HAVE_K = (*K_FAMILY, "backup_workers", "adasync")
_BATCHES = ("k_batch_sync", "k_batch_async")
_SYNCHRONOUS = ("k_sync", "k_batch_sync", "backup_workers")


def simulate(
    strategy: str,
    cluster: Cluster,
    *,
    k: int | None = None,
    updates: int = 1000,
    seed: int = 0,
    cancel_late: bool = True,
    max_lag: int = 64,
    variant: str = "k_sync",
    interval: float | None = None,
    delay: int | None = None,
    learner: Learner | None = None,
    recorder: Recorder | None = None,
    progress: Progress | None = None,
) -> Result:
    """Run a strategy on a cluster in simulated time.

    Args:
        strategy: One of `STRATEGIES`.
        cluster: Workers, compute times, network.
        k: Gradients per update, where the strategy has a K; AdaSync's first one. All by default.
        updates: How many updates to simulate.
        seed: Decides everything random.
        cancel_late: Whether the synchronous variants abandon late gradients.
        max_lag: How many updates a replica may fall behind before rounds wait for it.
        variant: Which of the K-family AdaSync adapts.
        interval: How often AdaSync looks at the loss, in seconds; 50 mini-batches by default.
        delay: Mini-batches per turn of the cyclic strategy; None is as many as there is time for.
        learner: What to train meanwhile; rounds strategies only.
        recorder: Takes down events and decisions; rounds strategies only.
        progress: Called with the number of updates so far.
    """
    check(strategy, cluster.workers, k)
    if strategy in ("dc_s3gd", "ad_psgd"):
        if learner is not None or recorder is not None:
            raise ConfigurationError(f"{strategy} makes no rounds: only its timing is simulated")
        return _without_rounds(strategy, cluster, updates, seed, progress)
    interval = default_interval(cluster) if interval is None else interval
    policy = make_policy(
        strategy, cluster.workers, k, max_lag=max_lag, variant=variant, interval=interval
    )
    kind = variant if strategy == "adasync" else strategy
    how = behaviour(kind, cancel_late=cancel_late, delay=delay)
    result = run_policy(
        policy,
        cluster,
        how,
        updates,
        seed=seed,
        learner=learner,
        recorder=recorder,
        progress=progress,
    )
    result.strategy = strategy
    if result.k is None and strategy in HAVE_K:
        result.k = cluster.workers if k is None else k
    return result


def default_interval(cluster: Cluster) -> float:
    """AdaSync's seconds between two looks at the loss: long enough for K to show its effect."""
    return 50.0 * cluster.compute.mean


def run_policy(
    policy: RoundsPolicy,
    cluster: Cluster,
    how: Behaviour,
    updates: int,
    *,
    seed: int = 0,
    learner: Learner | None = None,
    recorder: Recorder | None = None,
    progress: Progress | None = None,
) -> Result:
    """Drive a policy, by whole rounds where that comes to the same thing."""
    if how.cancels and how.waits == "version" and learner is None and recorder is None:
        return SortedArrivals(policy, cluster, seed=seed).run(updates, progress)
    simulation = RoundsSimulation(
        policy, cluster, how, seed=seed, learner=learner, recorder=recorder
    )
    return simulation.run(updates, progress)


def check(strategy: str, workers: int, k: int | None) -> None:
    """Refuse a strategy that does not exist or a K that cannot be."""
    if strategy not in STRATEGIES:
        raise ConfigurationError(f"unknown strategy {strategy!r}; known: {', '.join(STRATEGIES)}")
    if k is None:
        return
    if strategy not in HAVE_K:
        raise ConfigurationError(f"{strategy} has no K; leave k out")
    if k < 1:
        raise ConfigurationError(f"k={k} must be at least 1")
    if k > workers and strategy not in _BATCHES:
        raise ConfigurationError(
            f"{strategy}: k={k} is more than the {workers} workers; choose 1 to {workers}"
        )


def behaviour(strategy: str, *, cancel_late: bool = True, delay: int | None = None) -> Behaviour:
    """What workers do between gradients."""
    if strategy == "cyclic_delay":
        return Behaviour("never", turns=True, delay=delay)
    if strategy in _BATCHES:
        return Behaviour("never", cancels=cancel_late and strategy == "k_batch_sync")
    if strategy == "k_async":
        return Behaviour("taken")
    return Behaviour("version", cancels=cancel_late)


def make_policy(
    strategy: str,
    workers: int,
    k: int | None,
    *,
    max_lag: int = 64,
    variant: str = "k_sync",
    interval: float = 1.0,
) -> RoundsPolicy:
    """A fresh policy of the kind that the strategy uses in training."""
    if strategy == "cyclic_delay":
        from lightning_dsgd_plugins.cyclic_delay import CyclicPolicy

        return CyclicPolicy(workers, max_lag=max_lag)
    kind = variant if strategy == "adasync" else strategy
    arguments: dict[str, Any] = {
        "k": workers if k is None else k,
        "counted": "batches" if kind in _BATCHES else "workers",
        "max_staleness": 0 if kind in _SYNCHRONOUS else None,
        "max_lag": max_lag,
    }
    if strategy == "adasync":
        from lightning_dsgd_plugins.adasync import AdaSyncPolicy

        return AdaSyncPolicy(workers, interval=interval, **arguments)
    from lightning_dsgd_plugins.k_family import FirstKPolicy

    return FirstKPolicy(workers, **arguments)


def _without_rounds(
    strategy: str, cluster: Cluster, updates: int, seed: int, progress: Progress | None
) -> Result:
    if strategy == "dc_s3gd":
        return simulate_pipeline(cluster, updates, seed=seed, progress=progress)
    return GossipSimulation(cluster, seed=seed).run(updates, progress)
