"""The rounds exchange: contributions go in, numbered updates come out, the same on every rank.

Two threads meet here, under one condition variable:

- the training thread publishes its contributions and takes updates;
- the thread `dsgd-rounds` receives decisions and executes each round in order, with this rank's
  contributions or with zeros. It never waits for the training thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from lightning_dsgd.backends import Channel
from lightning_dsgd.control import Control, Wait
from lightning_dsgd.errors import RoundTimeoutError, RunError
from lightning_dsgd.gradients import Flat, FlatPool
from lightning_dsgd.protocol import (
    Closed,
    Contribution,
    Dropped,
    Message,
    Passed,
    Round,
    decode_downward,
)

_NAP_MS = 200


class Update(msgspec.Struct):
    """An executed round: the mean gradient that takes the model to version `round.number`."""

    round: Round
    gradient: Flat


class RoundsExchange:
    """One rank's part in all rounds of a run."""

    def __init__(
        self,
        channel: Channel,
        control: Control,
        pool: FlatPool,
        *,
        scale: Callable[[int], float] | None = None,
        divide: bool = True,
        version: int = 0,
        token: int | None = None,
    ) -> None:
        self.rank = channel.rank
        self.token = token
        self.passed = False
        """The token has gone by since this rank's last turn."""
        self.own_round: int | None = None
        """The last update that this rank had a part in."""
        self.exchange_seconds = 0.0
        self.waited = 0.0
        """Seconds that the training thread has spent waiting here."""
        self._channel = channel
        self._control = control
        self._alarm = channel.alarm
        self._pool = pool
        self._scale = scale
        self._divide = divide
        self._changed = threading.Condition()
        self._pending: dict[int, Flat] = {}
        self._updates: deque[Update] = deque()
        self._decided = version
        self._taken = version
        self._seq = 0
        self._closing = False
        self.overtaken = threading.Event()
        """Set while a round that this rank has not taken yet is decided."""
        self._thread = threading.Thread(target=self._run, name="dsgd-rounds", daemon=True)
        self._alarm.listen(self._wake)
        self._thread.start()

    # ------------------------------------------------------------- training thread

    @property
    def outstanding(self) -> int:
        """How many own contributions no round has used or dropped yet."""
        with self._changed:
            return len(self._pending)

    @property
    def ready(self) -> bool:
        """An update is there to be taken."""
        return bool(self._updates)

    @property
    def decided_version(self) -> int:
        """The number of the latest update that has been decided."""
        return self._decided

    @property
    def decided(self) -> bool:
        """An update is there or under way: no use in computing at the present version."""
        return self._decided > self._taken

    def publish(self, flat: Flat, contribution: Contribution) -> None:
        """Hand a gradient over; its buffers belong to the exchange from now on."""
        with self._changed:
            self._seq += 1
            self._pending[self._seq] = flat
        self._control.announce(
            msgspec.structs.replace(contribution, seq=self._seq, exchange=self.exchange_seconds)
        )

    def next(self) -> Wait:
        """From now on this rank would like the next update, whatever it does meanwhile."""
        return Wait(self._control, self._taken + 1)

    def take(self, wait: Wait) -> Update:
        """The next update in order; waits for it."""
        began = time.monotonic()
        with self._changed:
            while not self._updates:
                self._changed.wait(wait.check())
            update = self._updates.popleft()
            self._taken = update.round.number
            if self._decided <= self._taken:
                self.overtaken.clear()
        self.waited += time.monotonic() - began
        return update

    def wait(self, seconds: float) -> None:
        """Wait until an update is ready, the token moves, or time is up."""
        began = time.monotonic()
        with self._changed:
            if not self._updates:
                self._changed.wait(seconds)
        self.waited += time.monotonic() - began

    def change_layout(self, pool: FlatPool, carry: Callable[[Flat], Flat]) -> None:
        """Between two segments: from now on gradients have another form, late ones too."""
        with self._changed:
            self._pool = pool
            self._pending = {seq: carry(flat) for seq, flat in self._pending.items()}

    def settle(self, timeout: float) -> None:
        """Wait until every round that has been decided is executed and no more can follow."""
        self._thread.join(timeout)
        self._alarm.check()
        if self._thread.is_alive():
            raise RoundTimeoutError(
                f"rank {self.rank}: the last round did not end within {timeout:g} s"
            )

    def close(self) -> None:
        """End the thread; no round may be under way any more, or the alarm must have rung."""
        self._closing = True
        self._thread.join(timeout=5.0)
        self._alarm.forget(self._wake)
        if not self._thread.is_alive():
            self._channel.close()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self.overtaken.set()

    # ----------------------------------------------------------------- dsgd-rounds

    def _run(self) -> None:
        try:
            while not self._closing and self._alarm.error is None:
                if self._control.rounds.poll(_NAP_MS):
                    decision = decode_downward(self._control.rounds.recv())
                    if isinstance(decision, Closed):
                        return
                    self._decision(decision)
        except RunError as error:
            self._alarm.ring(error)
        except Exception as error:
            self._alarm.ring(RunError(f"rank {self.rank}: {type(error).__name__}: {error}"))

    def _decision(self, decision: Message) -> None:
        if isinstance(decision, Round):
            self._execute(decision)
        elif isinstance(decision, Dropped):
            with self._changed:
                self._pool.give_back(self._pending.pop(decision.seq))
        elif isinstance(decision, Passed):
            with self._changed:
                self.token = decision.token
                self.passed |= decision.worker == self.rank
                self._changed.notify_all()

    def _execute(self, decision: Round) -> None:
        with self._changed:
            self._decided = decision.number
            self._move_token(decision)
            self.overtaken.set()
            self._changed.notify_all()
            mine = self._mine(decision)
        began = time.monotonic()
        gradient = self._combine(mine)
        for buffer in gradient:
            if len(decision.workers) == 1:
                self._channel.broadcast_(buffer, decision.workers[0])
            else:
                self._channel.sum_(buffer)
            if self._divide:
                buffer.div_(sum(decision.batches))
        self.exchange_seconds = time.monotonic() - began
        with self._changed:
            self._updates.append(Update(decision, gradient))
            self._changed.notify_all()

    def _move_token(self, decision: Round) -> None:
        self.token = decision.token
        if self.rank in decision.workers:
            self.passed = False
            self.own_round = decision.number

    def _mine(self, decision: Round) -> list[tuple[Flat, int]]:
        """This rank's gradients in the round, each with its staleness."""
        parts = zip(decision.workers, decision.seqs, decision.staleness(), strict=True)
        return [(self._pending.pop(seq), age) for rank, seq, age in parts if rank == self.rank]

    def _combine(self, mine: list[tuple[Flat, int]]) -> Flat:
        """The one buffer this rank sends, whatever number of mini-batches is in it."""
        if not mine:
            return self._pool.zeroed()
        for flat, age in mine:
            factor = 1.0 if self._scale is None else self._scale(age)
            if factor != 1.0:
                for buffer in flat:
                    buffer.mul_(factor)
        (total, _), *others = mine
        for flat, _ in others:
            for target, source in zip(total, flat, strict=True):
                target.add_(source)
            self._pool.give_back(flat)
        return total
