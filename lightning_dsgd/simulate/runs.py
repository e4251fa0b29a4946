"""One run in simulated time, of whichever installed strategy."""

from __future__ import annotations

from typing import Any

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.simulate.algorithms import make_algorithm
from lightning_dsgd.simulate.arrivals import SortedArrivals
from lightning_dsgd.simulate.cluster import Cluster
from lightning_dsgd.simulate.gossip import simulate_gossip
from lightning_dsgd.simulate.learning import Learner
from lightning_dsgd.simulate.pipeline import simulate_pipeline
from lightning_dsgd.simulate.result import Result
from lightning_dsgd.simulate.rounds import Progress, Recorder, RoundsSimulation
from lightning_dsgd.workers.algorithm import Algorithm, GossipAlgorithm, RoundsAlgorithm
from lightning_dsgd.workers.machine import Rule
from lightning_dsgd.workers.policy import RoundsPolicy


def simulate(
    strategy: str,
    cluster: Cluster,
    *,
    updates: int = 1000,
    seed: int = 0,
    learner: Learner | None = None,
    recorder: Recorder | None = None,
    progress: Progress | None = None,
    **arguments: Any,
) -> Result:
    """Run a strategy on a cluster in simulated time.

    Args:
        strategy: The name of an installed one.
        cluster: Workers, compute times, network.
        updates: How many updates to simulate.
        seed: Decides everything random.
        learner: What to train meanwhile; rounds strategies only.
        recorder: Takes down events and decisions; rounds strategies only.
        progress: Called with the number of updates so far.
        arguments: The strategy's own, as in training.
    """
    algorithm = make_algorithm(strategy, cluster.workers, arguments)
    return run(
        algorithm,
        cluster,
        updates,
        seed=seed,
        learner=learner,
        recorder=recorder,
        progress=progress,
    )


def run(
    algorithm: Algorithm,
    cluster: Cluster,
    updates: int,
    *,
    policy: RoundsPolicy | None = None,
    seed: int = 0,
    learner: Learner | None = None,
    recorder: Recorder | None = None,
    progress: Progress | None = None,
) -> Result:
    """The same, of an algorithm that has been made; `policy` is one to go on with."""
    if isinstance(algorithm, RoundsAlgorithm):
        policy = policy or algorithm.make_policy(cluster.workers)
        result = Result(
            algorithm.strategy_name, cluster.workers, algorithm.first_k(cluster.workers)
        )
        if learner is None and recorder is None and in_lockstep(algorithm, policy, cluster.workers):
            return SortedArrivals(policy, cluster, result, seed=seed).run(updates, progress)
        simulation = RoundsSimulation(
            algorithm, policy, cluster, result, seed=seed, learner=learner, recorder=recorder
        )
        return simulation.run(updates, progress)
    if learner is not None or recorder is not None:
        raise ConfigurationError(
            f"{algorithm.strategy_name} makes no rounds: only its timing is simulated"
        )
    if isinstance(algorithm, GossipAlgorithm):
        return simulate_gossip(algorithm, cluster, updates, seed=seed, progress=progress)
    return simulate_pipeline(algorithm, cluster, updates, seed=seed, progress=progress)


def in_lockstep(algorithm: RoundsAlgorithm, policy: RoundsPolicy, workers: int) -> bool:
    """Do all workers begin every round at the same instant, for nothing but arrivals to decide it?

    That is so where each gives one gradient per version and stops when an update is decided.
    """
    timed = type(policy).deadline is not RoundsPolicy.deadline
    return algorithm.make_rule(workers) == Rule(cancels=True) and not timed
