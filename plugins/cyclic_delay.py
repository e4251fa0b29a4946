"""Cyclic updates with dynamic delay and local accumulation.

Y. Hu et al., PRCV 2018, doi 10.1007/978-3-030-03338-5_46. The paper's exact pseudo-code was not at
hand; this is our reading of it. Workers publish in round-robin order. While a worker waits for its
turn it goes on computing and accumulates locally; at a mini-batch boundary the holder of the token
publishes what it has, as one update, and the token moves on:

    token at worker r mod P for update r
    worker i:       B_i += g, c_i += 1; with the token: publish (B_i, c_i), then B_i, c_i = 0
    every replica:  w = w - eta * B_i / c_i        (or the sum B_i)

With a fixed delay D every turn holds exactly D mini-batches: the method the paper compares with,
after Langford, Smola and Zinkevich 2009.

So that nothing is lost at the end of an epoch, its last P updates are one full cycle in which a
worker computes no more once it has published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_dsgd.backends import BackendName
from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.exchange.finite import NonFinite
from lightning_dsgd.trainer.rounds import RoundsStrategy
from lightning_dsgd.workers.machine import Rule, WorkerMachine
from lightning_dsgd.workers.messages import Contribution, Decision, Dropped, Event, Passed, Segment
from lightning_dsgd.workers.policy import RoundsPolicy, round_of


class CyclicPolicy(RoundsPolicy):
    """Rules:

    1. Only the token's holder makes a round; the token then goes to the next worker present.
    2. Who announces without the token waits until it comes; one announcement each.
    3. With `skip_after`, the token passes a holder that has not published for that long, except in
       the segment's last cycle, where everybody gets a last turn.
    """

    def __init__(
        self,
        workers: int,
        *,
        skip_after: float | None = None,
        token: int = 0,
        version: int = 0,
        max_lag: int = 64,
    ) -> None:
        super().__init__(workers, version=version, max_lag=max_lag)
        self.skip_after = skip_after
        self.token: int = token
        self._since = 0.0
        self._waiting: dict[int, Contribution] = {}

    def handle(self, event: Event, now: float) -> Sequence[Decision]:
        if isinstance(event, Segment):
            self._since = now
        passed = self._pass(now) if self._overdue(now) else []
        return [*passed, *super().handle(event, now)]

    def _overdue(self, now: float) -> bool:
        deadline = self.deadline()
        return deadline is not None and now >= deadline and not self._complete(now)

    def deadline(self) -> float | None:
        if self.skip_after is None or self.version >= self.last - len(self.present):
            return None
        if self.token in self._waiting:
            return None  # it has published, and something else holds the round up
        return self._since + self.skip_after

    def _pass(self, now: float) -> list[Decision]:
        before = self.token
        self._advance(now)
        reason = f"rank {before} did not publish within {self.skip_after:g} s"
        return [Passed(before, self.token, reason)]

    def _advance(self, now: float) -> None:
        self._since = now
        self.token = min(
            self.present, key=lambda rank: (rank <= self.token, rank), default=self.token
        )

    def _accept(self, event: Contribution, now: float) -> str | None:
        if event.worker in self._waiting:
            return "its worker has another one waiting for the token"
        self._waiting[event.worker] = event
        return None

    def _complete(self, now: float) -> bool:
        return self.token in self._waiting

    def _form(self, now: float) -> list[Decision]:
        part = self._waiting.pop(self.token)
        self._advance(now)
        many = f"{part.batches} mini-batch{'es' * (part.batches != 1)}"
        reason = f"rank {part.worker} had the token and {many}"
        return [round_of(self.version, [part], k=1, reason=reason, token=self.token)]

    def _left(self, worker: int, now: float) -> list[Decision]:
        part = self._waiting.pop(worker, None)
        if self.token == worker:
            self._advance(now)
        return [Dropped(worker, part.seq, "its worker has left")] if part is not None else []

    def _awaited(self) -> tuple[int, ...]:
        return (self.token,)

    def state(self) -> dict[str, Any]:
        return {"token": self.token}

    def restore(self, state: dict[str, Any]) -> None:
        self.token = first_token(state, len(self.present))


@dataclass(frozen=True)
class TurnRule(Rule):
    """Rules:

    1. A worker computes on and on, until it has `most` mini-batches.
    2. It publishes with the token, from `least` on, unless its last contribution still waits.
    3. Within the segment's last cycle, who has published, or is about to, computes no more.
    """

    least: int = 1
    most: int | None = None

    def may_begin(self, me: WorkerMachine) -> bool:
        room = self.most is None or me.batches < self.most
        return room and not self._has_had_last_turn(me)

    def should_publish(self, me: WorkerMachine) -> bool:
        turn = me.token == me.rank or me.passed
        return turn and me.batches >= self.least and not me.outstanding

    def _has_had_last_turn(self, me: WorkerMachine) -> bool:
        if me.own_round is not None and me.own_round > max(me.first, me.last - me.workers):
            return True
        return bool(me.outstanding) and me.decided >= me.last - 2 * me.workers


def first_token(state: dict[str, Any], workers: int) -> int:
    """The saved holder, or worker 0 where there is none of that number any more."""
    token = int(state.get("token", 0))
    return token if token < workers else 0


class CyclicDelayStrategy(RoundsStrategy):
    """One worker at a time updates the model, in turn, with all it has accumulated meanwhile.

    Args:
        delay: 'dynamic' (each turn holds what the worker's speed allows), or a number of
            mini-batches per turn, the fixed cyclic method.
        combine: An update is the 'mean' of the accumulated gradients, or their 'sum'.
        max_accumulation: Mini-batches a worker may pile up before it waits. Default: no bound.
        skip_after: Seconds after which the token passes a holder that has not published. Default:
            it is waited for, while the others go on computing.
        backend: Collectives: 'horovod', 'torch', or 'auto' for what the launcher implies.
        timeout: Seconds after which a rank that does not come or answer ends the run, by name.
        max_lag: Updates a rank may be behind before the others wait for it.
        max_lag_mb: The same in MiB of gradients that wait at a rank, and never fewer than 4.
        rounds_per_epoch: Updates per epoch. Default: as many as use the data about once, taking
            half the number of workers for the mini-batches of a dynamic turn.
        trace: Directory for a record of all events and decisions, for the simulator and planner.
        nonfinite: When a rank's gradient holds a NaN or an infinity: 'raise' ends the run on all
            ranks, by name; 'drop' leaves it out of all updates; 'ignore' looks for none.
        compare_every: Updates between two comparisons of all replicas' parameters, which also
            happen at the end of every epoch; one that differs ends the run, by name. 0: never.
    """

    paper = "Hu et al. 2018, doi 10.1007/978-3-030-03338-5_46"
    strategy_name = "cyclic_delay"
    plainness = 6
    summary = "workers update in turn and accumulate gradients while they wait"

    def __init__(
        self,
        delay: Literal["dynamic"] | int = "dynamic",
        combine: Literal["mean", "sum"] = "mean",
        max_accumulation: int | None = None,
        skip_after: float | None = None,
        backend: BackendName = "auto",
        timeout: float = 300.0,
        max_lag: int = 64,
        max_lag_mb: int = 1024,
        rounds_per_epoch: int | None = None,
        trace: str | None = None,
        nonfinite: NonFinite = "raise",
        compare_every: int = 100,
    ) -> None:
        _check(delay, combine, max_accumulation, skip_after)
        super().__init__(
            backend=backend,
            timeout=timeout,
            max_lag=max_lag,
            max_lag_mb=max_lag_mb,
            rounds_per_epoch=rounds_per_epoch,
            trace=trace,
            nonfinite=nonfinite,
            compare_every=compare_every,
        )
        self.delay = delay
        self.combine = combine
        self.max_accumulation = max_accumulation
        self.skip_after = skip_after
        self.divide_by_batches = combine == "mean"

    def make_policy(self, workers: int, *, version: int = 0) -> RoundsPolicy:
        return CyclicPolicy(
            workers, skip_after=self.skip_after, version=version, max_lag=self.max_lag
        )

    def make_rule(self, workers: int) -> TurnRule:
        if isinstance(self.delay, int):
            return TurnRule(least=self.delay, most=self.delay)
        return TurnRule(most=self.max_accumulation)

    def gradients_per_round(self, workers: int) -> int:
        return self.delay if isinstance(self.delay, int) else max(1, workers // 2)


def _check(delay: object, combine: object, bound: int | None, skip_after: float | None) -> None:
    whole = isinstance(delay, int) and not isinstance(delay, bool)
    if delay != "dynamic" and (not whole or int(str(delay)) < 1):
        raise ConfigurationError(f"delay={delay!r} must be 'dynamic' or a whole number, 1 or more")
    if combine not in ("mean", "sum"):
        raise ConfigurationError(f"combine={combine!r} is unknown; choose 'mean' or 'sum'")
    if bound is not None and bound < 1:
        raise ConfigurationError(f"max_accumulation={bound} must be at least 1")
    if skip_after is not None and not skip_after > 0:
        raise ConfigurationError(f"skip_after={skip_after} must be a positive number of seconds")
