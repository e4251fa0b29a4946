"""DC-S3GD's timing: one all-reduce runs behind the next gradient, and everybody waits for both.

The recurrence, s the instants at which workers begin: the all-reduce needs everybody's step, so it
is over at max(s) + its duration; a worker begins again when that and its own gradient are done.

Its policy is not driven here: it counts who has come, for messages, and decides nothing that takes
time.
"""

from __future__ import annotations

import numpy as np

from lightning_dsgd.simulate.cluster import Cluster
from lightning_dsgd.simulate.result import Result
from lightning_dsgd.simulate.rounds import Progress
from lightning_dsgd.workers.algorithm import Algorithm


def simulate_pipeline(
    algorithm: Algorithm,
    cluster: Cluster,
    updates: int,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Result:
    """Time per update of the pipeline; staleness is one update, corrected by the algorithm."""
    rng = np.random.default_rng(seed)
    result = Result(algorithm.strategy_name, cluster.workers, cluster.workers)
    exchange = cluster.exchange("all_reduce") if cluster.workers > 1 else 0.0
    began = np.zeros(cluster.workers)
    model = cluster.times
    block = max(1, min(updates, 1_000_000 // cluster.workers))
    for first in range(0, updates, block):
        count = min(block, updates - first)
        times = model.sample_ranks(rng, cluster.workers, count)
        for compute in np.ascontiguousarray(times.T):
            reduced = began.max() + exchange
            began = np.maximum(began + compute, reduced) + cluster.overhead
            result.times.append(float(began.max()))
        if progress is not None:
            progress(first + count)
    result.sizes = [cluster.workers] * updates
    result.ks = [cluster.workers] * updates
    result.staleness[1] = cluster.workers * updates
    result.computed = result.events = cluster.workers * updates
    return result
