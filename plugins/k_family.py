"""K-sync, K-batch-sync, K-async and K-batch-async: how many gradients an update waits for.

S. Dutta, G. Joshi, S. Ghosh, P. Dube, P. Nagpurkar: "Slow and Stale Gradients Can Win the Race",
arXiv 1803.01113.

Two switches make the four variants:

===================== ============================ ===============================
first K of these      late work is dropped         late work counts later, stale
===================== ============================ ===============================
distinct workers      K-sync (K = P: synchronous)  K-async (K = 1: asynchronous)
mini-batches          K-batch-sync                 K-batch-async
===================== ============================ ===============================

The update is the mean of the K gradients. In the paper a parameter server makes it; here every rank
takes part in one all-reduce, a late one with zeros, and applies the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lightning_dsgd.backends import BackendName
from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.exchange.damping import Damping, check_damping
from lightning_dsgd.exchange.finite import NonFinite
from lightning_dsgd.trainer.rounds import RoundsStrategy
from lightning_dsgd.workers.algorithm import spread
from lightning_dsgd.workers.machine import Rule, WorkerMachine
from lightning_dsgd.workers.messages import Contribution, Decision, Dropped
from lightning_dsgd.workers.policy import RoundsPolicy, round_of

Counted = Literal["workers", "batches"]


class FirstKPolicy(RoundsPolicy):
    """The first K contributions make the round.

    Rules:

    1. A gradient that is more than `max_staleness` updates old is dropped, when it arrives or when
       a round makes it too old. 0 is the synchronous pair: only the current version counts.
    2. Counting workers, a second gradient of the same worker waits for a later round.
    3. K kept gradients make a round, oldest arrival first. K never exceeds the workers that can
       give one, when workers are counted: those present, without those whose gradient at this
       version was not finite.
    """

    def __init__(
        self,
        workers: int,
        k: int,
        *,
        counted: Counted = "workers",
        max_staleness: int | None = 0,
        version: int = 0,
        max_lag: int = 64,
    ) -> None:
        super().__init__(workers, version=version, max_lag=max_lag)
        self.k = k
        self.counted = counted
        self.max_staleness = max_staleness
        self._waiting: list[Contribution] = []
        self._later: list[Contribution] = []
        self._given: set[int] = set()

    @property
    def needed(self) -> int:
        """K, capped by the workers that can come where each counts once."""
        return min(self.k, self._able) if self.counted == "workers" else self.k

    @property
    def _able(self) -> int:
        return len(self.present) - len(self._refused)

    def _accept(self, event: Contribution, now: float) -> str | None:
        if self.max_staleness is not None and self.version - event.version > self.max_staleness:
            return self._too_old(event)
        if self.counted == "batches":
            self._waiting.append(event)
        elif event.worker in self._given:
            self._later.append(event)
        else:
            self._given.add(event.worker)
            self._waiting.append(event)
        return None

    def _too_old(self, event: Contribution) -> str:
        age = self.version - event.version
        return f"computed {age} update{'s' * (age != 1)} ago, at most {self.max_staleness} allowed"

    def _complete(self, now: float) -> bool:
        waiting = len(self._waiting)
        if waiting >= self.k:
            return True
        return self.counted == "workers" and 0 < waiting >= self._able

    def _form(self, now: float) -> list[Decision]:
        needed = self.needed
        parts = self._waiting[:needed]
        rest = self._waiting[needed:] + self._later
        self._waiting, self._later, self._given = [], [], set()
        unit = "workers" if self.counted == "workers" else "mini-batches"
        of = f" of {len(self.present)}" if self.counted == "workers" else ""
        reason = f"{needed}{of} {unit} arrived"
        decisions: list[Decision] = [round_of(self.version, parts, k=needed, reason=reason)]
        decisions.extend(self._keep(rest, now))
        decisions.extend(self._after_round(parts, now))
        return decisions

    def _keep(self, rest: list[Contribution], now: float) -> list[Decision]:
        refusals = [(part, self._accept(part, now)) for part in rest]
        return [Dropped(part.worker, part.seq, why) for part, why in refusals if why is not None]

    def _after_round(self, parts: list[Contribution], now: float) -> list[Decision]:
        """A place for rules that look at finished rounds."""
        return []

    def _left(self, worker: int, now: float) -> list[Decision]:
        everything = self._waiting + self._later
        self._waiting, self._later, self._given = [], [], set()
        gone = [part for part in everything if part.worker == worker]
        decisions: list[Decision] = [
            Dropped(worker, part.seq, "its worker has left") for part in gone
        ]
        rest = [part for part in everything if part.worker != worker]
        return decisions + self._keep(rest, now)

    def _awaited(self) -> tuple[int, ...]:
        return tuple(sorted(self.present - {part.worker for part in self._waiting}))


@dataclass(frozen=True)
class UntilTakenRule(Rule):
    """One gradient per version, and none while the last is in no update yet."""

    def may_begin(self, me: WorkerMachine) -> bool:
        return me.begun == 0 and not me.outstanding


@dataclass(frozen=True)
class OnAndOnRule(Rule):
    """Nobody waits for an update; but who could fill one alone is held up by something else."""

    enough: int = 1

    def may_begin(self, me: WorkerMachine) -> bool:
        return len(me.outstanding) < self.enough


def resolve_k(k: int | float | None, world: int, *, counted: Counted = "workers") -> int:
    """K as a number of contributions; a float is a share of the world, None is one less than it."""
    if k is None:
        return max(1, world - 1)
    value = k if isinstance(k, int) else max(1, round(k * world))
    if counted == "workers" and value > world:
        raise ConfigurationError(
            f"k={k} is more than the {world} workers of this run; choose 1 to {world}, "
            "or start more workers"
        )
    return value


def check_k(k: object) -> None:
    """Refuse what can be no K in any world."""
    valid_type = k is None or (isinstance(k, (int, float)) and not isinstance(k, bool))
    if not valid_type:
        raise ConfigurationError(f"k={k!r} is not a number; give 1 or more, or a share like 0.75")
    if isinstance(k, int) and k < 1:
        raise ConfigurationError(f"k={k} must be at least 1; leave it out for one less than all")
    if isinstance(k, float) and not 0.0 < k <= 1.0:
        raise ConfigurationError(f"k={k} as a share of the workers must lie above 0 and up to 1.0")


class KFamilyStrategy(RoundsStrategy):
    """What the four variants share; use one of them."""

    paper = "Dutta et al. 2018, arXiv 1803.01113"
    counted: ClassVar[Counted] = "workers"
    keeps_late_work: ClassVar[bool] = False
    has_k = True

    def __init__(
        self,
        k: int | float | None = None,
        *,
        max_staleness: int | None = None,
        damping: Damping = "none",
        damping_constant: float = 1.0,
        **common: Any,
    ) -> None:
        check_k(k)
        if max_staleness is not None and max_staleness < 0:
            raise ConfigurationError(
                f"max_staleness={max_staleness} must not be negative; None means no bound"
            )
        check_damping(damping, damping_constant, max_staleness)
        super().__init__(**common)
        self.k = k
        self.max_staleness = max_staleness if self.keeps_late_work else 0
        self.damping = damping
        self.damping_constant = damping_constant

    def first_k(self, workers: int) -> int:
        """K in numbers."""
        return resolve_k(self.k, workers, counted=self.counted)

    def gradients_per_round(self, workers: int) -> int:
        return self.first_k(workers)

    def check_workers(self, workers: int) -> None:
        self.gradients_per_round(workers)

    def make_policy(self, workers: int, *, version: int = 0) -> RoundsPolicy:
        return FirstKPolicy(
            workers,
            self.gradients_per_round(workers),
            counted=self.counted,
            max_staleness=self.max_staleness,
            version=version,
            max_lag=self.max_lag,
        )

    def make_rule(self, workers: int) -> Rule:
        """K-async waits until the update that its gradient is in; K-batch waits for none."""
        if self.counted == "batches":
            enough = max(workers, self.gradients_per_round(workers))
            return OnAndOnRule(cancels=self.cancel_late, enough=enough)
        return UntilTakenRule() if self.keeps_late_work else super().make_rule(workers)

    @classmethod
    def with_k(cls, k: int, workers: int) -> dict[str, Any]:
        check_k(k)
        return {"k": resolve_k(k, workers, counted=cls.counted)}

    @classmethod
    def choices(cls, workers: int, seconds: float) -> list[dict[str, Any]]:
        return [cls.with_k(k, workers) for k in spread(workers)]


class KSyncStrategy(KFamilyStrategy):
    """Each update is the mean of the first K workers' gradients; the others' are dropped.

    Args:
        k: Workers per update: a number, or a share of all as a float up to 1.0. Default: all but
            one.
        cancel_late: End a late worker's computation as soon as the update has been decided without
            it, instead of letting it finish a gradient that will be dropped.
        backend: Collectives: 'horovod', 'torch', or 'auto' for what the launcher implies.
        timeout: Seconds after which a rank that does not come or answer ends the run, by name.
        max_lag: Updates a rank may be behind before the others wait for it.
        max_lag_mb: The same in MiB of gradients that wait at a rank, and never fewer than 4.
        rounds_per_epoch: Updates per epoch. Default: as many as use the data once, all ranks
            together.
        trace: Directory for a record of all events and decisions, for the simulator and planner.
        nonfinite: When a rank's gradient holds a NaN or an infinity: 'raise' ends the run on all
            ranks, by name; 'drop' leaves it out of all updates; 'ignore' looks for none.
        compare_every: Updates between two comparisons of all replicas' parameters, which also
            happen at the end of every epoch; one that differs ends the run, by name. 0: never.
    """

    strategy_name = "k_sync"
    plainness = 0
    summary = "the first K workers make the update, late gradients are dropped"

    def steps_together(self, workers: int) -> bool:
        return self.counted == "workers" and self.gradients_per_round(workers) == workers

    def __init__(
        self,
        k: int | float | None = None,
        cancel_late: bool = True,
        backend: BackendName = "auto",
        timeout: float = 300.0,
        max_lag: int = 64,
        max_lag_mb: int = 1024,
        rounds_per_epoch: int | None = None,
        trace: str | None = None,
        nonfinite: NonFinite = "raise",
        compare_every: int = 100,
    ) -> None:
        super().__init__(
            k,
            cancel_late=cancel_late,
            backend=backend,
            timeout=timeout,
            max_lag=max_lag,
            max_lag_mb=max_lag_mb,
            rounds_per_epoch=rounds_per_epoch,
            trace=trace,
            nonfinite=nonfinite,
            compare_every=compare_every,
        )


class KBatchSyncStrategy(KSyncStrategy):
    """Each update is the mean of the first K mini-batches; a fast worker may give several.

    Args:
        k: Mini-batches per update: a number, or a multiple of the workers as a float up to 1.0.
            Default: one less than the workers.
        cancel_late: End a late worker's computation as soon as the update has been decided without
            it.
        backend: Collectives: 'horovod', 'torch', or 'auto' for what the launcher implies.
        timeout: Seconds after which a rank that does not come or answer ends the run, by name.
        max_lag: Updates a rank may be behind before the others wait for it.
        max_lag_mb: The same in MiB of gradients that wait at a rank, and never fewer than 4.
        rounds_per_epoch: Updates per epoch. Default: as many as use the data once, all ranks
            together.
        trace: Directory for a record of all events and decisions, for the simulator and planner.
        nonfinite: When a rank's gradient holds a NaN or an infinity: 'raise' ends the run on all
            ranks, by name; 'drop' leaves it out of all updates; 'ignore' looks for none.
        compare_every: Updates between two comparisons of all replicas' parameters, which also
            happen at the end of every epoch; one that differs ends the run, by name. 0: never.
    """

    strategy_name = "k_batch_sync"
    plainness = 1
    summary = "the first K mini-batches make the update, whoever gives them"
    counted = "batches"


class KAsyncStrategy(KFamilyStrategy):
    """Each update is the mean of the first K workers' gradients; late ones count later, stale.

    Args:
        k: Workers per update: a number, or a share of all as a float up to 1.0. Default: all but
            one.
        max_staleness: Drop gradients older than this many updates. Default: no bound.
        damping: Weight of stale gradients: 'none', 'inverse' for 1/(1+staleness), or 'distance' for
            the paper's min(C/d², η_max), d the distance since.
        damping_constant: The C of 'distance'.
        backend: Collectives: 'horovod', 'torch', or 'auto' for what the launcher implies.
        timeout: Seconds after which a rank that does not come or answer ends the run, by name.
        max_lag: Updates a rank may be behind before the others wait for it.
        max_lag_mb: The same in MiB of gradients that wait at a rank, and never fewer than 4.
        rounds_per_epoch: Updates per epoch. Default: as many as use the data once, all ranks
            together.
        trace: Directory for a record of all events and decisions, for the simulator and planner.
        nonfinite: When a rank's gradient holds a NaN or an infinity: 'raise' ends the run on all
            ranks, by name; 'drop' leaves it out of all updates; 'ignore' looks for none.
        compare_every: Updates between two comparisons of all replicas' parameters, which also
            happen at the end of every epoch; one that differs ends the run, by name. 0: never.
    """

    strategy_name = "k_async"
    plainness = 2
    summary = "the first K workers make the update, late gradients count later"
    keeps_late_work = True

    def __init__(
        self,
        k: int | float | None = None,
        max_staleness: int | None = None,
        damping: Damping = "none",
        damping_constant: float = 1.0,
        backend: BackendName = "auto",
        timeout: float = 300.0,
        max_lag: int = 64,
        max_lag_mb: int = 1024,
        rounds_per_epoch: int | None = None,
        trace: str | None = None,
        nonfinite: NonFinite = "raise",
        compare_every: int = 100,
    ) -> None:
        super().__init__(
            k,
            max_staleness=max_staleness,
            damping=damping,
            damping_constant=damping_constant,
            backend=backend,
            timeout=timeout,
            max_lag=max_lag,
            max_lag_mb=max_lag_mb,
            rounds_per_epoch=rounds_per_epoch,
            trace=trace,
            nonfinite=nonfinite,
            compare_every=compare_every,
        )


class KBatchAsyncStrategy(KAsyncStrategy):
    """Each update is the mean of the first K mini-batches, stale ones included; nobody ever waits.

    Args:
        k: Mini-batches per update: a number, or a multiple of the workers as a float up to 1.0.
            Default: one less than the workers.
        max_staleness: Drop gradients older than this many updates. Default: no bound.
        damping: Weight of stale gradients: 'none', 'inverse' for 1/(1+staleness), or 'distance' for
            the paper's min(C/d², η_max), d the distance since.
        damping_constant: The C of 'distance'.
        backend: Collectives: 'horovod', 'torch', or 'auto' for what the launcher implies.
        timeout: Seconds after which a rank that does not come or answer ends the run, by name.
        max_lag: Updates a rank may be behind before the others wait for it.
        max_lag_mb: The same in MiB of gradients that wait at a rank, and never fewer than 4.
        rounds_per_epoch: Updates per epoch. Default: as many as use the data once, all ranks
            together.
        trace: Directory for a record of all events and decisions, for the simulator and planner.
        nonfinite: When a rank's gradient holds a NaN or an infinity: 'raise' ends the run on all
            ranks, by name; 'drop' leaves it out of all updates; 'ignore' looks for none.
        compare_every: Updates between two comparisons of all replicas' parameters, which also
            happen at the end of every epoch; one that differs ends the run, by name. 0: never.
    """

    strategy_name = "k_batch_async"
    plainness = 3
    summary = "the first K mini-batches make the update, stale ones too; nobody waits"
    counted = "batches"
