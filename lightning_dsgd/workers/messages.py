"""What travels between ranks, coordinator, policy and simulator: plain data, nothing that acts.

*Events* go into a policy, *decisions* come out of it, *notes* belong to the control plane alone.
All of them are immutable and encode to a few bytes of MessagePack or a line of JSON.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Base of everything that is sent or recorded; nothing in it refers back to it."""


# --------------------------------------------------------------------------- events


class Contribution(Message, frozen=True, tag=True):
    """A worker has a gradient ready; the tensor itself stays with the worker."""

    worker: int
    seq: int
    version: int
    """Version of the parameters it was computed at (the oldest, if it sums several)."""
    batches: int = 1
    loss: float | None = None
    seconds: tuple[float, ...] = ()
    """Time spent computing, by mini-batch."""
    exchange: float = 0.0
    """Duration of the last collective this worker took part in."""
    finite: bool = True
    """Neither a NaN nor an infinity is in it, as far as its worker was asked to look."""


class Applied(Message, frozen=True, tag=True):
    """A worker's replica has reached a version."""

    worker: int
    version: int
    cancelled: tuple[float, ...] = ()
    """Time spent on each gradient that it has begun and given up since it last told."""


class Bound(Message, frozen=True, tag=True):
    """How far apart ranks may get, so that what waits meanwhile has room."""

    lag: int
    """Updates that may wait for a rank that is behind; then the others wait for it, too."""
    given: int
    """Own gradients, announced and in no update yet; then a rank computes no further one."""
    setting: str = "max_lag"
    """The argument that has set it."""


class Segment(Message, frozen=True, tag=True):
    """Rounds up to number `last` may be decided: the end of the epoch or of the training.

    One that ends where the rounds are already is the end of all: `Closed` answers it.
    """

    last: int
    bound: Bound | None = None
    """From now on; as before where there is none."""


class Joined(Message, frozen=True, tag=True):
    """A worker has come; it takes part from now on."""

    worker: int


class Left(Message, frozen=True, tag=True):
    """A worker is gone for good, with whatever it had announced."""

    worker: int


class Tick(Message, frozen=True, tag=True):
    """Time has passed and nothing else happened."""


class Computed(Message, frozen=True, tag=True):
    """A gossiping worker has a gradient ready."""

    worker: int
    starts: bool
    """It is an active worker and free to exchange."""


Event = Contribution | Applied | Segment | Joined | Left | Tick | Computed


# ------------------------------------------------------------------------ decisions


class Round(Message, frozen=True, tag=True):
    """Update `number` is made of these contributions, and takes the model to that version."""

    number: int
    workers: tuple[int, ...]
    seqs: tuple[int, ...]
    versions: tuple[int, ...]
    batches: tuple[int, ...]
    k: int
    reason: str
    token: int | None = None
    """Whose turn is next, where there are turns."""
    loss: float | None = None
    """Mean training loss of its mini-batches, as their workers saw it."""

    def staleness(self) -> tuple[int, ...]:
        """Per contribution: how many updates the model was ahead of it."""
        return tuple(self.number - 1 - version for version in self.versions)


class Dropped(Message, frozen=True, tag=True):
    """A contribution that no update will use."""

    worker: int
    seq: int
    reason: str


class Again(Message, frozen=True, tag=True):
    """To this worker: nobody has given anything to the next update; make another gradient."""

    worker: int


class Said(Message, frozen=True, tag=True):
    """Something that the user should know, in one line."""

    reason: str


class KChanged(Message, frozen=True, tag=True):
    """From the next round on, `k` contributions make an update."""

    k: int
    loss: float
    reason: str


class Held(Message, frozen=True, tag=True):
    """Round `number` is ready but waits for a worker whose update queue is full."""

    number: int
    worker: int
    reason: str


class Passed(Message, frozen=True, tag=True):
    """The token has gone past a worker that was too slow to use it."""

    worker: int
    token: int
    reason: str


class Pair(Message, frozen=True, tag=True):
    """This worker and its partner average their models; both get one, and heed theirs in order."""

    worker: int
    partner: int
    number: int
    starts: bool
    """This worker is the active one of the two."""
    age: int
    """Gradients that all workers together have made since the partner's last one."""


class Go(Message, frozen=True, tag=True):
    """The answer to `Computed`: may the worker begin another gradient of this segment?"""

    worker: int
    more: bool


class Closed(Message, frozen=True, tag=True):
    """To this worker: no further round, or pair of the segment, will be decided."""

    worker: int


Decision = Round | Dropped | Again | Said | KChanged | Held | Passed | Pair | Go | Closed


# ---------------------------------------------------------------------------- notes


class Hello(Message, frozen=True, tag=True):
    """A rank's socket is connected."""

    worker: int


class Failed(Message, frozen=True, tag=True):
    """A rank has raised; its error in one line."""

    worker: int
    error: str


class Goodbye(Message, frozen=True, tag=True):
    """A rank has finished and will go; its silence is no fault from now on."""

    worker: int


class Overdue(Message, frozen=True, tag=True):
    """A rank has waited for `timeout` seconds until something with that number be decided."""

    worker: int
    number: int


class Checksum(Message, frozen=True, tag=True):
    """A rank's parameters at a version, as one number: all ranks' should be the same."""

    worker: int
    version: int
    value: int


class Departed(Message, frozen=True, tag=True):
    """A rank has left its epoch, with its replica at that version."""

    worker: int
    version: int


class Welcome(Message, frozen=True, tag=True):
    """The coordinator knows every socket of every rank: rounds can start."""


class Abort(Message, frozen=True, tag=True):
    """The run is over for everybody, and why."""

    kind: Literal["lost", "failed", "late", "left", "differs", "broken"]
    """A rank is gone, or has raised; somebody has not come, or has left too soon; replicas are not
    the same; the coordinator itself has failed."""
    worker: int | None
    reason: str


class Over(Message, frozen=True, tag=True):
    """The coordinator has served its time, and its going is no fault."""


Note = Hello | Failed | Goodbye | Overdue | Checksum | Departed | Welcome | Abort | Over

encode = msgspec.msgpack.Encoder().encode
decode_upward = msgspec.msgpack.Decoder(Event | Note).decode
decode_downward = msgspec.msgpack.Decoder(Decision | Note).decode
