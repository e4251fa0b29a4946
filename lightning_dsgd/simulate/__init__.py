"""Simulated time around the real policies: choose before you spend.

>>> from lightning_dsgd.simulate import Cluster, Exponential, simulate
>>> result = simulate("k_sync", Cluster(8, Exponential(1.0)), k=4, updates=2000)
>>> round(result.seconds_per_update, 1)
0.6
"""

from __future__ import annotations

from lightning_dsgd.simulate.cluster import Cluster, Link, Network, read_cluster
from lightning_dsgd.simulate.distributions import (
    ComputeTime,
    Constant,
    Empirical,
    Exponential,
    Gamma,
    Pareto,
    PerRank,
    ShiftedExponential,
)
from lightning_dsgd.simulate.learning import Learner, Logistic, Quadratic, TorchModel
from lightning_dsgd.simulate.result import Result
from lightning_dsgd.simulate.runs import simulate

__all__ = [
    "Cluster",
    "ComputeTime",
    "Constant",
    "Empirical",
    "Exponential",
    "Gamma",
    "Learner",
    "Link",
    "Logistic",
    "Network",
    "Pareto",
    "PerRank",
    "Quadratic",
    "Result",
    "ShiftedExponential",
    "TorchModel",
    "read_cluster",
    "simulate",
]
