"""The thread `dsgd-rounds`: it receives decisions and carries out each round in order.

With this rank's contributions, or with zeros where the round has none of them. It never waits for
the training thread; the two meet at the `Desk`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_dsgd.backends import Channel
from lightning_dsgd.control.link import Control
from lightning_dsgd.errors import RoundTimeoutError
from lightning_dsgd.exchange.desk import Desk, Update
from lightning_dsgd.exchange.gradients import Flat, is_narrow
from lightning_dsgd.exchange.serving import serve
from lightning_dsgd.workers.messages import (
    Again,
    Closed,
    Dropped,
    Message,
    Passed,
    Round,
    decode_downward,
)

_NAP_MS = 200


class RoundsThread:
    """Carries decided rounds out; starts with its construction."""

    def __init__(
        self,
        channel: Channel,
        control: Control,
        desk: Desk,
        *,
        scale: Callable[[int], float] | None = None,
        divide: bool = True,
    ) -> None:
        self.rank = channel.rank
        self._channel = channel
        self._control = control
        self._alarm = channel.alarm
        self._desk = desk
        self._streams = desk.streams
        self._scale = scale
        self._divide = divide
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="dsgd-rounds", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------- training thread

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
        if not self._thread.is_alive():
            self._channel.close()

    # ----------------------------------------------------------------- dsgd-rounds

    def _run(self) -> None:
        serve(self._serve, self._streams, self._alarm, self.rank)

    def _serve(self) -> None:
        while not self._closing and self._alarm.error is None:
            if self._control.rounds.poll(_NAP_MS):
                decision = decode_downward(self._control.rounds.recv())
                if isinstance(decision, Closed):
                    return
                self._decision(decision)

    def _decision(self, decision: Message) -> None:
        if isinstance(decision, Round):
            self._execute(decision)
        elif isinstance(decision, Dropped):
            self._desk.dropped(decision)
        elif isinstance(decision, (Passed, Again)):
            self._desk.heard(decision)

    def _execute(self, decision: Round) -> None:
        mine = self._desk.decided(decision)
        began = self._streams.moment()
        count = sum(decision.batches) if self._divide else 1
        gradient = self._combine(mine, count)
        for buffer in gradient:
            if len(decision.workers) == 1:
                self._channel.broadcast_(buffer, decision.workers[0])
            else:
                self._channel.sum_(buffer)
            if self._divide and not is_narrow(buffer):
                buffer.div_(count)
        gradient.hand_over(self._streams)
        ended = self._streams.moment()
        self._channel.wait_for(ended.mark)  # only what is known to be whole is handed on
        self._desk.executed(Update(decision, gradient), began.seconds_until(ended))

    def _combine(self, mine: list[tuple[Flat, int]], count: int) -> Flat:
        """The one buffer this rank sends, whatever number of mini-batches is in it.

        Narrow ones are divided by `count` already: their sum may be too large for their type.
        """
        pool = self._desk.pool
        if not mine:
            return pool.zeroed()
        for flat, age in mine:
            factor = 1.0 if self._scale is None else self._scale(age)
            for buffer in flat:
                if factor != 1.0:
                    buffer.mul_(factor)
                if count != 1 and is_narrow(buffer):
                    buffer.div_(count)
        (total, _), *others = mine
        for flat, _ in others:
            for target, source in zip(total, flat, strict=True):
                target.add_(source)
            pool.give_back(flat)
        return total
