"""What an algorithm says of itself, to the Trainer, the simulator and the planner alike.

A strategy class is one of these; it is found by its entry point, and nothing else knows its name.
"""

from __future__ import annotations

import abc
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.workers.machine import Rule, WorkerMachine
from lightning_dsgd.workers.messages import Bound
from lightning_dsgd.workers.policy import Policy, RoundsPolicy

Arguments = dict[str, Any]
_WHERE_IT_RUNS = ("self", "backend", "timeout", "trace", "compare_every")
"""Arguments that change nothing about what is decided."""


class Algorithm(abc.ABC):
    """Base of all strategies: what is known without a Trainer and without other ranks."""

    paper: ClassVar[str] = ""
    """Authors, year and where to find it."""
    summary: ClassVar[str] = ""
    """One line."""
    strategy_name: ClassVar[str] = ""
    """As in the entry point."""
    exchange: ClassVar[Literal["rounds", "pipeline", "gossip"]]
    """How replicas are kept together; says how the algorithm is simulated."""
    has_k: ClassVar[bool] = False
    """How many gradients an update waits for is a choice, see `with_k`."""
    planned: ClassVar[bool] = True
    """A plan looks at it without being asked to."""
    plainness: ClassVar[int] = 100
    """Of options that are nearly equal a plan recommends the one with the lowest number."""
    corrects_staleness: ClassVar[bool] = False
    """Its stale gradients count as fresh ones in a plan: mending them is what it is for."""

    @abc.abstractmethod
    def make_policy(self, workers: int, *, version: int = 0) -> Policy:
        """The coordinator's half."""

    def check_workers(self, workers: int) -> None:
        """Refuse a number of workers that it cannot work with."""
        return

    def arguments(self) -> Arguments:
        """What it was made with: every argument is kept under its own name."""
        names = inspect.signature(type(self).__init__).parameters
        return {name: getattr(self, name) for name in names if name not in _WHERE_IT_RUNS}

    @classmethod
    def takes(cls, argument: str) -> bool:
        """Has it an argument of that name?"""
        return argument in inspect.signature(cls.__init__).parameters

    def first_k(self, workers: int) -> int | None:
        """How many gradients an update waits for, at first at least, where that is a choice."""
        return None

    @classmethod
    def with_k(cls, k: int, workers: int) -> Arguments:
        """The arguments with which an update waits for `k` gradients of so many workers."""
        raise ConfigurationError(f"{cls.strategy_name} has no K; leave k out")

    @classmethod
    def choices(cls, workers: int, seconds: float) -> Sequence[Arguments]:
        """Arguments worth comparing in a plan.

        Args:
            workers: So many of them.
            seconds: What a mini-batch takes on average.
        """
        return [{}]


_FEWEST = 4
"""Updates that may wait for a rank, however large they are."""
_MIB = 1 << 20


@dataclass(frozen=True)
class MemoryBound:
    """How many gradients a rank holds at the most."""

    nbytes: int
    """Of one gradient."""
    bound: Bound
    """It is memory that sets it, or `max_lag`."""

    def gradients(self) -> int:
        """Besides: the one that is made, the one that is applied, two under way between ranks."""
        return self.bound.lag + self.bound.given + 4

    def text(self) -> str:
        """For the log."""
        lag, setting = self.bound.lag, self.bound.setting
        size, most = self.nbytes / _MIB, self.gradients() * self.nbytes / _MIB
        return (
            f"a rank may fall {lag} updates behind ({setting}) before the others wait for it, "
            f"and holds at most {most:.3g} MiB of gradients, {size:.3g} MiB each"
        )


class RoundsAlgorithm(Algorithm):
    """An algorithm of rounds: a policy, and a rule for the workers."""

    exchange = "rounds"
    max_lag: int = 64
    max_lag_mb: int = 1024

    @abc.abstractmethod
    def make_policy(self, workers: int, *, version: int = 0) -> RoundsPolicy:
        """The coordinator's half: which contributions make an update."""

    def make_rule(self, workers: int) -> Rule:
        """The workers' half: when one begins a gradient, and when it publishes."""
        return Rule()

    def gradients_per_round(self, workers: int) -> int:
        """How many gradients an update usually holds: sets the number of updates in an epoch."""
        return workers

    def steps_together(self, workers: int) -> bool:
        """Does every worker make equally many gradients, so that it may meet the others there?"""
        return False

    def memory_bound(self, workers: int, nbytes: int) -> MemoryBound:
        """Where gradients have so many bytes."""
        fit = max(_FEWEST, self.max_lag_mb * _MIB // max(nbytes, 1))
        lag = min(self.max_lag, fit)
        needed = max(self.first_k(workers) or 1, self.gradients_per_round(workers))
        given = max(lag, math.ceil(needed / max(1, workers - 1)))  # one of them may be slow
        setting = "max_lag_mb" if fit < self.max_lag else "max_lag"
        return MemoryBound(nbytes, Bound(lag, given, setting))

    def restored_policy(
        self,
        workers: int,
        version: int = 0,
        state: Mapping[str, Any] | None = None,
        nbytes: int = 0,
    ) -> RoundsPolicy:
        """A fresh policy, or one that goes on from a checkpoint's state; for gradients that big."""
        policy = self.make_policy(workers, version=version)
        policy.heed(self.memory_bound(workers, nbytes).bound)
        if state:
            policy.restore(dict(state))
        return policy

    def make_machine(self, rank: int, workers: int, policy: RoundsPolicy) -> WorkerMachine:
        """One worker of a run that this policy, as it is now, begins to decide."""
        return WorkerMachine(
            self.make_rule(workers),
            rank,
            workers,
            version=policy.version,
            token=policy.token,
            max_lag=policy.max_lag,
            max_given=policy.max_given,
        )


class GossipAlgorithm(Algorithm):
    """An algorithm of pairs that average their models."""

    exchange = "gossip"

    @abc.abstractmethod
    def is_active(self, rank: int) -> bool:
        """Does this rank start an exchange with each of its gradients?"""


def spread(workers: int) -> list[int]:
    """One, a quarter, a half, three quarters, all but one, all: where the trade-off of K shows."""
    shares = (1, workers // 4, workers // 2, 3 * workers // 4, workers - 1, workers)
    return sorted({k for k in shares if k >= 1})
