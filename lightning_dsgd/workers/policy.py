"""A policy is an algorithm's round-making rule as a pure state machine: events in, decisions out.

It knows no clock (`now` is an argument), no I/O, no global randomness, no tensors. The coordinator
of a real run and the simulator drive the very same objects, and a recorded list of events, fed to a
fresh policy, gives the same decisions again.

What all of them share lives here: the version, who is present, how far each replica has come, and
the two reasons for which a complete round must wait (the segment is over; a replica's queue is
full).
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from lightning_dsgd.workers.messages import (
    Again,
    Applied,
    Bound,
    Closed,
    Contribution,
    Decision,
    Dropped,
    Event,
    Held,
    Joined,
    Left,
    Round,
    Said,
    Segment,
    Tick,
)

NOTHING: Sequence[Decision] = ()
NOT_FINITE = "it is not finite"


class Policy(abc.ABC):
    """What the coordinator asks of any policy."""

    version: int
    """What has been decided so far, counted in the policy's own unit."""
    last: int
    """How far it may go on deciding."""

    @abc.abstractmethod
    def handle(self, event: Event, now: float) -> Sequence[Decision]:
        """Take one event in and give back what it decides."""

    @abc.abstractmethod
    def missing(self) -> tuple[int, ...]:
        """Whom the next decision waits for, for messages to the user."""

    def deadline(self) -> float | None:
        """When the policy wants a Tick even if nothing happens; None for never."""
        return None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take a checkpoint's state over."""
        return


class RoundsPolicy(Policy):
    """Rules, in the order in which they are applied:

    1. A contribution is judged when it arrives: dropped at once, or kept until a round takes it.
       One that is not finite is dropped; where all workers have given such to one version, they
       make another.
    2. Whenever anything changes, rounds are formed for as long as one is complete.
    3. A complete round still waits while its number lies beyond the segment, or while a replica is
       `max_lag` versions behind.
    4. A segment that ends at a version already decided, where training was stopped, is the last
       word: `Closed` follows everything decided before it.
    """

    token: int | None = None
    """Whose turn is next, where there are turns."""
    heeds_loss: ClassVar[bool] = False
    """What it decides depends on the losses that contributions report."""
    refuses_nonfinite: ClassVar[bool] = True
    """A contribution that is not finite is dropped."""

    def __init__(self, workers: int, *, version: int = 0, max_lag: int = 64) -> None:
        self.version = version
        self.present = set(range(workers))
        self.last = version
        self.max_lag = max_lag
        self.lag_bound = "max_lag"
        """What sets it."""
        self.max_given = workers * max_lag
        """Contributions of one worker that may wait here; for its machine to heed."""
        self._applied = dict.fromkeys(range(workers), version)
        self._slowest = version
        self._held_at = self._stood_at = -1
        self._refused: set[int] = set()
        """Whose contribution to the present version was not finite, and who gave no other."""
        self._named: set[int] = set()

    def heed(self, bound: Bound | None) -> None:
        """Ranks may be so far apart from now on."""
        if bound is not None:
            self.max_lag, self.max_given, self.lag_bound = bound.lag, bound.given, bound.setting

    # ------------------------------------------------------------------- one door

    def handle(self, event: Event, now: float) -> Sequence[Decision]:
        """Take one event in and give back what it decides."""
        kind = type(event)
        if kind is Contribution:
            return self._contribution(event, now)  # type: ignore[arg-type]  # narrowed by kind
        if kind is Tick:
            return self._rounds(now)
        if isinstance(event, Applied):
            self._applied[event.worker] = max(self._applied.get(event.worker, 0), event.version)
        elif isinstance(event, Segment):
            self.last = event.last
            self.heed(event.bound)
            if event.last <= self.version:
                return [Closed(worker) for worker in sorted(self.present)]
        elif isinstance(event, Joined):
            self.present.add(event.worker)
            self._applied[event.worker] = self.version
            self._joined(event.worker, now)
        elif isinstance(event, Left):
            left = self._without(event.worker, now)
            return [*left, *self._once_more(), *self._rounds(now)]
        return self._rounds(now)

    def _contribution(self, event: Contribution, now: float) -> Sequence[Decision]:
        worker, version = event.worker, event.version
        applied = self._applied.get(worker)
        if applied is None:
            return [Dropped(worker, event.seq, "its worker is not part of the run")]
        if version > applied:
            if version > self.version:
                return [Dropped(worker, event.seq, "it comes from a version not reached yet")]
            self._applied[worker] = version
        if not event.finite and self.refuses_nonfinite:
            return self._refuse(event, now)
        refusal = self._accept(event, now)
        if refusal is not None:
            return [Dropped(worker, event.seq, refusal)]
        self._refused.discard(worker)
        return self._rounds(now) if self._complete(now) else NOTHING

    def _refuse(self, event: Contribution, now: float) -> Sequence[Decision]:
        """What is not finite nobody gets; a round need not wait for who has given that."""
        decisions: list[Decision] = [Dropped(event.worker, event.seq, NOT_FINITE)]
        if event.worker not in self._named:
            self._named.add(event.worker)
            where = f"rank {event.worker}'s gradient at version {event.version}"
            decisions.append(Said(f"{where} is not finite and is dropped, as any further one"))
        if event.version == self.version:
            self._refused.add(event.worker)
        return [*decisions, *self._once_more(), *self._rounds(now)]

    def _once_more(self) -> list[Decision]:
        """Where nobody has given anything finite, all try with other data; said once per round."""
        if not self.present <= self._refused:
            return []
        self._refused.clear()
        again: list[Decision] = [Again(worker) for worker in sorted(self.present)]
        number = self.version + 1
        if self._stood_at == number:
            return again
        self._stood_at = number
        text = f"no rank has a finite gradient for update {number}: training stands still until"
        return [Said(f"{text} one has"), *again]

    def _without(self, worker: int, now: float) -> list[Decision]:
        self.present.discard(worker)
        self._refused.discard(worker)
        self._applied.pop(worker, None)
        return self._left(worker, now)

    def _rounds(self, now: float) -> Sequence[Decision]:
        if not self._complete(now):
            return NOTHING
        decisions: list[Decision] = []
        while self._complete(now):
            hold = self._hold()
            if hold is not None:
                decisions.extend(hold)
                break
            self.version += 1
            decisions.extend(self._form(now))
            self._refused.clear()
        return decisions

    def _hold(self) -> Iterable[Decision] | None:
        """None to go on; otherwise the round waits, and the first time it says for whom."""
        number = self.version + 1
        if number > self.last:
            return NOTHING
        if self.version - self._slowest < self.max_lag:
            return None  # replicas only ever advance, so the old minimum still serves as a bound
        laggard = self._laggard()
        self._slowest = self._applied[laggard]
        behind = self.version - self._slowest
        if behind < self.max_lag:
            return None
        if self._held_at == number:
            return NOTHING
        self._held_at = number
        reason = f"rank {laggard} is {behind} updates behind ({self.lag_bound})"
        return [Held(number, laggard, reason)]

    def _laggard(self) -> int:
        return min(self._applied, key=self._applied.__getitem__)

    def missing(self) -> tuple[int, ...]:
        held = self._held_at == self.version + 1
        return (self._laggard(),) if held else self._awaited()

    # --------------------------------------------------- what an algorithm defines

    @abc.abstractmethod
    def _accept(self, event: Contribution, now: float) -> str | None:
        """Keep the contribution, or say why it is dropped."""

    @abc.abstractmethod
    def _complete(self, now: float) -> bool:
        """Is there a round to form?"""

    @abc.abstractmethod
    def _form(self, now: float) -> Sequence[Decision]:
        """Make round `self.version` (already counted up) and what follows from it."""

    @abc.abstractmethod
    def _awaited(self) -> tuple[int, ...]:
        """Whose contributions the next round waits for."""

    def _left(self, worker: int, now: float) -> list[Decision]:
        return []

    def _joined(self, worker: int, now: float) -> None:
        return


def round_of(
    number: int,
    parts: Sequence[Contribution],
    *,
    k: int,
    reason: str,
    token: int | None = None,
) -> Round:
    """The decision that makes one update of these contributions."""
    return Round(
        number,
        tuple([part.worker for part in parts]),
        tuple([part.seq for part in parts]),
        tuple([part.version for part in parts]),
        tuple([part.batches for part in parts]),
        k,
        reason,
        token,
        mean_loss(parts),
    )


def mean_loss(parts: Iterable[Contribution]) -> float | None:
    """Over all mini-batches alike, whichever contribution they are in; None where none is known."""
    known = [(part.loss, part.batches) for part in parts if part.loss is not None]
    if not known:
        return None
    return sum(loss * batches for loss, batches in known) / sum(batches for _, batches in known)
