"""From a strategy's name to something that can be simulated: its entry point is all that is known.

The object made here is the strategy itself, without a Trainer: its arguments are checked as in
training, and its two halves are those that train.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.registry import load
from lightning_dsgd.workers.algorithm import Algorithm, RoundsAlgorithm


def algorithm_class(name: str) -> type[Algorithm]:
    """The class behind a name; one that says nothing of its halves is refused."""
    cls = load(name)
    if not issubclass(cls, Algorithm):
        raise ConfigurationError(
            f"{name} cannot be simulated: {cls.__name__} is no lightning_dsgd strategy"
        )
    return cls


def make_algorithm(name: str, workers: int, arguments: Mapping[str, Any]) -> Algorithm:
    """The algorithm of that name, for so many workers."""
    cls = algorithm_class(name)
    unknown = [argument for argument in arguments if not cls.takes(argument)]
    if unknown:
        raise ConfigurationError(f"{name} has no argument {unknown[0]!r}")
    algorithm = cls(**arguments)
    algorithm.check_workers(workers)
    return algorithm


def make_rounds(name: str, workers: int, arguments: Mapping[str, Any]) -> RoundsAlgorithm:
    """The same, of an algorithm that makes rounds."""
    algorithm = make_algorithm(name, workers, arguments)
    if not isinstance(algorithm, RoundsAlgorithm):
        raise ConfigurationError(f"{name} makes no rounds: only its timing is simulated")
    return algorithm
