"""A worker machine is one rank's way through its updates, pure: inputs in, actions out.

It is the other half of an algorithm beside its policy. `RoundsStrategy` feeds it from Lightning's
hooks and carries its actions out, the simulator does the same by its clock, tests by a list.

=============  ==================================  =============================================
state          the worker                          leaves it with
=============  ==================================  =============================================
`BETWEEN`      has no segment to work on           `Segment`
`COMPUTING`    makes a gradient                    `Finished`; a late one's `Decided` cancels it
`CANCELLING`   is to give its gradient up          `GaveUp`, or `Finished` where that was sooner
`REPLAYING`    takes an update that it lacks       `Took`
`WAITING`      has nothing to do                   `Decided`, `Dropped`, `Again` or `Passed`
=============  ==================================  =============================================

Whenever a state is left, and at every input while it waits, these rules say what is next:

1. The segment's last update has been taken: nothing, until the next segment opens.
2. What has been accumulated is published, if the algorithm says so, or at once where it is not
   finite: nobody will take it, and nothing may be added to it. Besides, the first of these that
   holds:
3. An update has been decided that this replica lacks: it is replayed. But the first thing in a
   segment is a gradient, however late: what every rank does once, all can compare.
4. The algorithm lets this worker begin a gradient, and there is memory for it: it computes.
5. It waits.

An algorithm's part in this is its `Rule`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from lightning_dsgd.errors import RunError
from lightning_dsgd.workers.messages import (
    Again,
    Applied,
    Contribution,
    Dropped,
    Message,
    Passed,
    Segment,
)

# ------------------------------------------------------------------------------- inputs


class Finished(Message, frozen=True, tag=True):
    """The gradient is complete."""

    seconds: float = 0.0
    loss: float | None = None
    finite: bool = True
    """It, and what it was added to."""


class GaveUp(Message, frozen=True, tag=True):
    """The gradient has been abandoned, as told."""

    seconds: float = 0.0


class Decided(Message, frozen=True, tag=True):
    """Update `number` has been decided; what of a `Round` one worker has to know."""

    number: int
    seqs: tuple[int, ...] = ()
    """Which of this worker's contributions are in it."""
    token: int | None = None


class Took(Message, frozen=True, tag=True):
    """This replica stands at version `number` now."""

    number: int


class Ended(Message, frozen=True, tag=True):
    """The segment is over for this replica, which stands at version `number` now."""

    number: int


Input = Segment | Finished | GaveUp | Decided | Dropped | Again | Passed | Took | Ended

# ------------------------------------------------------------------------------ actions


class Compute(Message, frozen=True, tag=True):
    """Begin a gradient, at this version."""

    version: int


class Publish(Message, frozen=True, tag=True):
    """Announce what has been accumulated, and start over from zero."""

    contribution: Contribution


class Cancel(Message, frozen=True, tag=True):
    """Give the gradient up that is being computed."""


class Replay(Message, frozen=True, tag=True):
    """Take the updates up to this one, one or more at a time."""

    number: int


class Tell(Message, frozen=True, tag=True):
    """Let the coordinator know how far this replica is."""

    applied: Applied


class Wait(Message, frozen=True, tag=True):
    """Do nothing until the next input."""


Action = Compute | Publish | Cancel | Replay | Tell | Wait
Actions = tuple[Action, ...]

_CANCEL, _WAIT, _NOTHING = Cancel(), Wait(), ()

# ---------------------------------------------------------------------- what an algorithm says


@dataclass(frozen=True)
class Rule:
    """When a worker begins a gradient and when it publishes; as it stands, once per version.

    Asked at a boundary between two mini-batches; `me` is to be read only.
    """

    cancels: bool = False
    """A gradient is given up as soon as an update has been decided without it."""

    def may_begin(self, me: WorkerMachine) -> bool:
        """May this worker begin a gradient at its present version?"""
        return me.begun == 0

    def should_publish(self, me: WorkerMachine) -> bool:
        """Is what it has accumulated announced now?"""
        return True


# --------------------------------------------------------------------------- the machine


class State(enum.Enum):
    """Where a worker is; the module's table says what each means."""

    BETWEEN = "between segments"
    COMPUTING = "computing"
    CANCELLING = "told to give its gradient up"
    REPLAYING = "replaying"
    WAITING = "waiting"


BETWEEN, COMPUTING, CANCELLING, REPLAYING, WAITING = State

_ALWAYS = tuple(State)
EXPECTED: dict[type[Message], tuple[State, ...]] = {
    Segment: (BETWEEN,),
    Finished: (COMPUTING, CANCELLING),
    GaveUp: (CANCELLING,),
    Took: (REPLAYING,),
    Ended: _ALWAYS,
    Decided: _ALWAYS,
    Dropped: _ALWAYS,
    Again: _ALWAYS,
    Passed: _ALWAYS,
}
"""Each input, and the states in which it can come."""


class UnexpectedInput(RunError):
    """An input that cannot come here: the machine's driver, or a message, is wrong."""


class WorkerMachine:
    """One worker. What it knows is public, for its rule to read."""

    __slots__ = (
        "_cancelled", "_every", "_losses", "_most", "_rule", "_seconds", "_seq", "_told",
        "batches", "begun", "decided", "first", "last", "oldest", "opening",
        "outstanding", "own_round", "passed", "rank", "spoilt", "state", "token", "version",
        "workers",
    )  # fmt: skip

    def __init__(
        self,
        rule: Rule,
        rank: int,
        workers: int,
        *,
        version: int = 0,
        token: int | None = None,
        max_lag: int = 64,
        max_given: int = 1 << 30,
    ) -> None:
        self.rank = rank
        self.workers = workers
        self.state = BETWEEN
        self.version = version
        """Updates that this replica has applied."""
        self.decided = version
        """Updates that have been decided, as far as it has heard."""
        self.first = self.last = version
        """The segment: the version it began at, and the one it ends with."""
        self.opening = False
        """The segment's first gradient is being made, which is never too late."""
        self.begun = 0
        """Gradients begun at the present version."""
        self.batches = 0
        """Mini-batches accumulated and not published."""
        self.spoilt = False
        """They are not finite."""
        self.oldest = version
        """The version at which the first of them was computed."""
        self.outstanding: set[int] = set()
        """Contributions that no update has used or dropped yet."""
        self.own_round: int | None = None
        """The last update that it had a part in."""
        self.token = token
        """Whose turn it is, where there are turns."""
        self.passed = False
        """The token has gone by since its last turn."""
        self._rule = rule
        self._heed(max_lag, max_given)
        self._told = version
        self._seq = 0
        self._seconds: tuple[float, ...] = ()
        self._losses: tuple[float, ...] = ()
        self._cancelled: tuple[float, ...] = ()

    def _heed(self, lag: int, given: int) -> None:
        """Others count on hearing how far it is before they have to wait for it."""
        self._every = max(1, lag // 8)
        self._most = given

    # ------------------------------------------------------------------- one door

    def handle(self, event: Input) -> Actions:
        """Take one input in; what the worker does next comes out."""
        kind = type(event)
        if self.state not in EXPECTED.get(kind, ()):
            raise self._unexpected(event)
        if kind is Decided:
            return self._decided(event)  # type: ignore[arg-type]  # narrowed by kind, here and below
        if kind is Finished:
            return self._finished(event)  # type: ignore[arg-type]
        if kind is Took:
            return self._took(event)  # type: ignore[arg-type]
        if kind is Dropped:
            return self._dropped(event)  # type: ignore[arg-type]
        if kind is Passed:
            return self._passed(event)  # type: ignore[arg-type]
        if kind is Again:
            return self._again()
        if kind is GaveUp:
            return self._gave_up(event)  # type: ignore[arg-type]
        if kind is Segment:
            return self._open(event)  # type: ignore[arg-type]
        return self._ended(event)  # type: ignore[arg-type]

    def _open(self, event: Segment) -> Actions:
        if event.last < self.version:
            raise self._unexpected(event)
        self.first, self.last = self.version, event.last
        if event.bound is not None:
            self._heed(event.bound.lag, event.bound.given)
        self.begun = 0
        return self._next(opening=True)

    def _finished(self, event: Finished) -> Actions:
        if not self.batches:
            self.oldest = self.version
        self.batches += 1
        self.spoilt |= not event.finite
        self._seconds += (event.seconds,)
        if event.loss is not None:
            self._losses += (event.loss,)
        return self._next()

    def _gave_up(self, event: GaveUp) -> Actions:
        """With it goes what it was being added to: nobody can take half a gradient out again."""
        self._cancelled += (*self._seconds, event.seconds)
        self._start_over()
        return self._next()

    def _took(self, event: Took) -> Actions:
        if not self.version < event.number <= self.decided:
            raise self._unexpected(event)
        self.version = event.number
        self.begun = 0
        return (*self._tell(), *self._next())

    def _ended(self, event: Ended) -> Actions:
        if not self.version <= event.number <= self.decided:
            raise self._unexpected(event)
        self.version = self.last = event.number
        return (*self._tell(), *self._next())

    def has_given(self, late_counts: bool = True) -> bool:
        """Has an update of this segment used anything of it, or may yet one do so?

        Args:
            late_counts: What has come too late for its update may be used by a later one.
        """
        used = self.own_round is not None and self.own_round > self.first
        return used or bool(self.batches) or (late_counts and bool(self.outstanding))

    # ------------------------------------------------- heard of, whatever it is doing

    def _decided(self, event: Decided) -> Actions:
        if event.number <= self.decided or not self.outstanding.issuperset(event.seqs):
            raise self._unexpected(event)
        self.decided = event.number
        self.token = event.token
        if event.seqs:
            self.outstanding.difference_update(event.seqs)
            self.own_round = event.number
            self.passed = False
        if self.state is WAITING:
            return self._next()
        if self.state is COMPUTING and self._rule.cancels and not self.opening:
            self.state = CANCELLING
            return (_CANCEL,)
        return _NOTHING

    def _dropped(self, event: Dropped) -> Actions:
        if event.seq not in self.outstanding:
            raise self._unexpected(event)
        self.outstanding.remove(event.seq)
        return self._next() if self.state is WAITING else _NOTHING

    def _again(self) -> Actions:
        """What it has given to this version is refused, and so is everybody else's."""
        if self.state is not WAITING:
            return _NOTHING
        self.begun = 0
        return self._next()

    def _passed(self, event: Passed) -> Actions:
        self.token = event.token
        self.passed |= event.worker == self.rank
        return self._next() if self.state is WAITING else _NOTHING

    # ------------------------------------------------------------------ what is next

    def _next(self, opening: bool = False) -> Actions:
        """The module's five rules."""
        self.opening = opening
        if self.version >= self.last:
            self.state = BETWEEN
            return (_WAIT,)
        if self.batches and (self.spoilt or self._rule.should_publish(self)):
            return (self._publish(), self._move())
        return (self._move(),)

    def _move(self) -> Action:
        behind = self.decided > self.version
        room = len(self.outstanding) < self._most
        if (not behind or self.opening) and room and self._rule.may_begin(self):
            self.state = COMPUTING
            self.begun += 1
            return Compute(self.version)
        self.opening = False
        if behind:
            self.state = REPLAYING
            return Replay(self.decided)
        self.state = WAITING
        return _WAIT

    def _publish(self) -> Publish:
        self._seq += 1
        self.outstanding.add(self._seq)
        losses = self._losses
        contribution = Contribution(
            self.rank,
            self._seq,
            self.oldest,
            self.batches,
            sum(losses) / len(losses) if losses else None,
            self._seconds,
            finite=not self.spoilt,
        )
        self._told = max(self._told, self.oldest)
        self._start_over()
        return Publish(contribution)

    def _start_over(self) -> None:
        self.batches = 0
        self.spoilt = False
        self._seconds = self._losses = ()

    def _tell(self) -> Actions:
        """How far it is, where its contributions have not said so; and what it has given up."""
        much = max(self.version - self._told, len(self._cancelled)) >= self._every
        if not much and self.version < self.last:
            return _NOTHING
        self._told = self.version
        cancelled, self._cancelled = self._cancelled, ()
        return (Tell(Applied(self.rank, self.version, cancelled)),)

    def _unexpected(self, event: Message) -> UnexpectedInput:
        return UnexpectedInput(
            f"worker {self.rank} is {self.state.value} at version {self.version} of "
            f"{self.decided}: {msgspec.to_builtins(event)} cannot come here"
        )
