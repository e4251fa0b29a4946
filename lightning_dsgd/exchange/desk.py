"""A rank's desk: where its training thread and its communication thread meet.

Under one condition variable lie the worker machine, what this rank has accumulated and announced,
and the updates that wait to be taken. Both threads feed the machine; the training thread carries
out what it says. `Cancel` alone is heeded at once, from whichever thread: it ends a computation.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable

import msgspec

from lightning_dsgd.backends.streams import Mark, Streams, look_until
from lightning_dsgd.control.link import Control, Wait
from lightning_dsgd.exchange.gradients import Flat, FlatGradients, FlatLayout
from lightning_dsgd.exchange.pool import FlatPool
from lightning_dsgd.workers.machine import (
    Action,
    Cancel,
    Compute,
    Decided,
    Finished,
    GaveUp,
    Input,
    Publish,
    Replay,
    Tell,
    WorkerMachine,
)
from lightning_dsgd.workers.messages import Again, Contribution, Dropped, Passed, Round

_AHEAD = 2
"""Updates that the host may have applied and the device not."""


class Update(msgspec.Struct):
    """An executed round: the mean gradient that takes the model to version `round.number`."""

    round: Round
    gradient: Flat


class Desk:
    """One rank's part in all rounds of a run, as far as its memory and its decisions go."""

    def __init__(
        self, machine: WorkerMachine, control: Control, layout: FlatLayout, streams: Streams
    ) -> None:
        self.machine = machine
        self.streams = streams
        self.waited = 0.0
        """Seconds that the training thread has spent waiting here."""
        self.exchange_seconds = 0.0
        """What the last collective took."""
        self.cancelled = threading.Event()
        """The gradient that is being computed is to be given up; or the run is over."""
        self._control = control
        self._changed = threading.Condition()
        self._move: Action | None = None
        self._errands: deque[Publish | Tell] = deque()
        self._pending: dict[int, Flat] = {}
        self._updates: deque[Update] = deque()
        self._applied: Flat | None = None
        self._ahead: deque[Mark] = deque()
        """Of updates whose application the device has yet to come to."""
        self._accumulated: Flat | None = None
        self._lay_out(layout)
        control.alarm.listen(self._wake)

    def _lay_out(self, layout: FlatLayout) -> None:
        self.layout = layout
        self.pool = FlatPool(layout, self.streams)
        self._gradients = FlatGradients(layout)

    def close(self) -> None:
        """Nobody waits here any more; memory goes when the training's stream is done with it."""
        self._control.alarm.forget(self._wake)
        if self._control.alarm.error is None:  # else the device may be what has failed
            self.pool.part_with()
            for flat in filter(None, (self._applied, self._accumulated)):
                flat.part_with(self.streams)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self.cancelled.set()

    def _feed(self, event: Input) -> None:
        """With the lock held."""
        if isinstance(event, (Finished, GaveUp)):
            self.cancelled.clear()
        self._heed(self.machine.handle(event))

    def _heed(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Cancel):
                self.cancelled.set()
            elif isinstance(action, (Publish, Tell)):
                self._errands.append(action)
            else:
                self._move = action
        self._changed.notify_all()

    # ------------------------------------------------------------- training thread

    def tell(self, event: Input) -> None:
        """Something has happened in training; what is due then is done."""
        with self._changed:
            self._feed(event)
        self._run_errands()

    @property
    def computes(self) -> bool:
        """This rank is to make a gradient."""
        return isinstance(self._move, Compute)

    def receive(self) -> None:
        """From now on `.grad` is what this rank accumulates into."""
        self._retire()
        if self._accumulated is None:
            self._accumulated = self.pool.zeroed()
        self._gradients.attach(self._accumulated)

    def collect(self) -> None:
        """Take in gradients that were replaced where they should have been written to."""
        self._gradients.collect(self.accumulated)

    @property
    def accumulated(self) -> Flat:
        """What this rank has not published yet; there from `receive` on."""
        assert self._accumulated is not None
        return self._accumulated

    def _retire(self) -> None:
        """The update taken last has been applied: its memory may be used again.

        A host that replays may not be far ahead of its device: what others may send, and so the
        memory it takes, depends on how far this rank says it is.
        """
        if self._applied is None:
            return
        self.pool.give_back(self._applied)
        self._ahead.append(self._applied.mark)
        self._applied = None
        if len(self._ahead) > _AHEAD:
            look_until(self._ahead.popleft(), self._control.alarm.wait)

    def await_gradient(self, mark: Mark) -> bool:
        """Until the device has computed it so far; False if it is to be given up before that."""
        if look_until(mark, self.cancelled.wait):
            return True
        self._control.alarm.check()
        return False

    def discard(self) -> None:
        """Half a gradient is none, and spoils what it was being added to."""
        for buffer in self.accumulated:
            buffer.zero_()

    def next(self) -> Wait:
        """From now on this rank would like the next update, whatever it does meanwhile."""
        return Wait(self._control, self.machine.version + 1)

    def await_move(self, wait: Wait) -> bool:
        """Wait until there is something to do: True to compute, False to take an update."""
        began = time.monotonic()
        moves = False
        while not moves:
            moves = self._await_errand_or_move(wait)
            self._run_errands()
        self.waited += time.monotonic() - began
        return self.computes

    def _await_errand_or_move(self, wait: Wait) -> bool:
        with self._changed:
            while not self._errands and not isinstance(self._move, (Compute, Replay)):
                self._changed.wait(wait.check())
            return isinstance(self._move, (Compute, Replay))

    def take(self, wait: Wait) -> Update:
        """The next update in order, as the gradient that the optimizer sees; waits for it."""
        began = time.monotonic()
        with self._changed:
            while not self._updates:
                self._changed.wait(wait.check())
            update = self._updates.popleft()
        self.waited += time.monotonic() - began
        self._retire()
        self._applied = update.gradient.take_up(self.streams)
        self._gradients.attach(update.gradient)
        return update

    def change_layout(self, layout: FlatLayout) -> None:
        """Between two segments: from now on gradients have another form, late ones too."""
        old = self.layout
        with self._changed:
            self.pool.part_with()
            self._lay_out(layout)
            if self._applied is not None:
                self._applied.part_with(self.streams)
                self._applied = None
            if self._accumulated is not None:
                self._accumulated = self._carried(self._accumulated, old)
            self._pending = {seq: self._carried(flat, old) for seq, flat in self._pending.items()}

    def _carried(self, flat: Flat, old: FlatLayout) -> Flat:
        new = self.layout.carry(flat.take_up(self.streams), old, onto=self.pool.zeroed())
        flat.part_with(self.streams)
        new.hand_over(self.streams)
        return new

    def _run_errands(self) -> None:
        while self._errands:
            errand = self._errands.popleft()
            if isinstance(errand, Tell):
                self._control.announce(errand.applied)
            else:
                self.publish(self.accumulated, errand.contribution)
                self._gradients.detach()
                self._accumulated = None

    def complete(self) -> None:
        """Nothing that is queued from now on belongs to the gradient any more."""
        self.accumulated.hand_over(self.streams)

    def publish(self, flat: Flat, contribution: Contribution) -> None:
        """Hand a gradient over; its buffers belong to the rounds from now on."""
        with self._changed:
            self._pending[contribution.seq] = flat
        self._control.announce(
            msgspec.structs.replace(contribution, exchange=self.exchange_seconds)
        )

    # -------------------------------------------------------- communication thread

    def decided(self, decision: Round) -> list[tuple[Flat, int]]:
        """A round is about to be carried out: this rank's gradients in it, with their ages."""
        rank = self.machine.rank
        parts = zip(decision.workers, decision.seqs, decision.staleness(), strict=True)
        own = [(seq, age) for worker, seq, age in parts if worker == rank]
        seqs = tuple(seq for seq, _ in own)
        with self._changed:
            self._feed(Decided(decision.number, seqs, decision.token))
            return [(self._pending.pop(seq).take_up(self.streams), age) for seq, age in own]

    def executed(self, update: Update, seconds: float) -> None:
        """It is there to be taken."""
        self.exchange_seconds = seconds
        with self._changed:
            self._updates.append(update)
            self._changed.notify_all()

    def dropped(self, decision: Dropped) -> None:
        """No round will use it: its memory is free again."""
        with self._changed:
            self._feed(decision)
            self.pool.give_back(self._pending.pop(decision.seq), used=False)

    def heard(self, decision: Passed | Again) -> None:
        """The token has moved; or another gradient is wanted."""
        with self._changed:
            self._feed(decision)
