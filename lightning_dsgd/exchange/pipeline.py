"""The pipeline exchange: one all-reduce is under way while the training thread computes on.

Two threads meet here, under one condition variable: the training thread starts an exchange and
later takes its result; the thread `dsgd-pipeline` carries it out. There is never more than one.

What travels is converted to the wire's format, and back, by the training thread, in the order of
its stream. On a device the exchange waits for the step's own mark there, and not for what is queued
behind it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Literal

import torch

from lightning_dsgd.backends import Channel
from lightning_dsgd.backends.streams import Moment, Streams, happened, look_until
from lightning_dsgd.control.link import Control, Wait
from lightning_dsgd.errors import RoundTimeoutError
from lightning_dsgd.exchange.gradients import Flat, is_narrow
from lightning_dsgd.exchange.serving import serve
from lightning_dsgd.workers.messages import Contribution

Wire = Literal["full", "bf16", "fp16"]
WIRES: dict[str, torch.dtype | None] = {"full": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_SCALE = {"full": 1.0, "bf16": 1.0, "fp16": 1024.0}
"""Steps are small: unscaled, fp16 would round those below 6e-8 to nothing."""

_NAP_MS = 200


class Pipeline:
    """One rank's end of it."""

    def __init__(
        self,
        channel: Channel,
        control: Control,
        streams: Streams,
        *,
        wire: Wire,
        version: int,
    ) -> None:
        self.busy_seconds = 0.0
        """From the start of each exchange until its end, all of them together."""
        self.waited_seconds = 0.0
        """The part of it that training has spent waiting, as far as it is known."""
        self._channel = channel
        self._control = control
        self._alarm = channel.alarm
        self._wire = wire
        self._number = version
        self._flat: Flat | None = None
        self._sent: Flat | None = None
        self._streams = streams
        self._finite = True
        self._done = True
        self._last_seconds = 0.0
        self._began = streams.moment()
        self._spans: list[tuple[Moment, Moment]] = []
        """Of computing, in the present turn; waiting is none."""
        self._idle: deque[tuple[Moment, Moment]] = deque()
        self._counted: list[tuple[Moment, Moment]] = []
        """Those of the turn whose step is under way."""
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="dsgd-pipeline", daemon=True)
        self._alarm.listen(self._wake)
        self._thread.start()

    # ------------------------------------------------------------- training thread

    def precision(self, dtype: torch.dtype) -> float:
        """The relative rounding error of a mean of steps of that type."""
        return self._channel.world_size * torch.finfo(WIRES[self._wire] or dtype).eps

    @property
    def under_way(self) -> bool:
        """An exchange has been started and its result has not been taken yet."""
        return self._flat is not None

    def start(self, flat: Flat, *, finite: bool = True) -> None:
        """Begin to average these buffers over all ranks, in place; they are not to be touched.

        Args:
            flat: This rank's step.
            finite: It comes from a gradient, and is not zero because that was not finite.
        """
        assert self._flat is None, "one exchange at a time"
        self._alarm.check()
        sent = self._encoded(flat)
        ready = self._streams.moment()
        spans, self._spans = [*self._spans, (self._began, ready)], []
        self._began = ready
        self._number += 1
        sent.mark = ready.mark
        with self._changed:
            self._flat, self._sent, self._done = flat, sent, False
            self._counted, self._finite = spans, finite
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until the buffers given to `start` hold the mean."""
        assert self._flat is not None and self._sent is not None
        came = self._streams.moment()
        wait = Wait(self._control, self._number)
        with self._changed:
            while not self._done:
                self._changed.wait(wait.check())
        self._alarm.check()
        self._sent.take_up(self._streams)
        went_on = self._streams.moment()
        self._spans.append((self._began, came))
        self._idle.append((came, went_on))
        self._count_idle()
        self._began = went_on
        self._decode(self._flat)
        self._flat = None

    def _count_idle(self) -> None:
        """As far as the device has come."""
        while self._idle and happened(self._idle[0][1].mark):
            came, went_on = self._idle.popleft()
            self.waited_seconds += came.seconds_until(went_on)

    def close(self) -> None:
        """End the thread; nothing may be under way any more, or the alarm must have rung."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=10.0)
        self._alarm.forget(self._wake)
        if not self._thread.is_alive():
            self._channel.close()

    def _encoded(self, flat: Flat) -> Flat:
        dtype = WIRES[self._wire]
        if dtype is None:
            for buffer in filter(is_narrow, flat):
                buffer.div_(self._channel.world_size)
            return flat
        factor = _SCALE[self._wire] / self._channel.world_size
        return Flat([buffer.mul_(factor).to(dtype) for buffer in flat])

    def _decode(self, flat: Flat) -> None:
        assert self._sent is not None
        if self._sent is flat:
            for buffer in flat:
                if not is_narrow(buffer):
                    buffer.div_(self._channel.world_size)
        else:
            for buffer, sent in zip(flat, self._sent, strict=True):
                buffer.copy_(sent).div_(_SCALE[self._wire])
        self._sent = None

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --------------------------------------------------------------- dsgd-pipeline

    def _run(self) -> None:
        serve(self._serve, self._streams, self._alarm, self._channel.rank)

    def _serve(self) -> None:
        while self._await_work():
            self._exchange()

    def _await_work(self) -> bool:
        with self._changed:
            while self._done and not self._closing and self._alarm.error is None:
                self._changed.wait()
        return not self._done and self._alarm.error is None

    def _exchange(self) -> None:
        assert self._sent is not None
        look_until(self._sent.mark, self._alarm.wait)
        self._alarm.check()
        self._announce()
        began = self._streams.moment()
        for buffer in self._sent.take_up(self._streams):
            self._channel.sum_(buffer)
        self._sent.hand_over(self._streams)
        ended = self._streams.moment()
        self._channel.wait_for(ended.mark)
        self._await_count()
        self._last_seconds = began.seconds_until(ended)
        self.busy_seconds += self._last_seconds
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def _announce(self) -> None:
        """The coordinator counts who has come, and so can name who has not."""
        came = Contribution(
            self._channel.rank,
            self._number,
            self._number - 1,
            seconds=(sum(began.seconds_until(ended) for began, ended in self._counted),),
            exchange=self._last_seconds,
            finite=self._finite,
        )
        self._control.announce_exchange(came)

    def _await_count(self) -> None:
        """All ranks have announced this exchange, or it could not have ended: word is coming."""
        deadline = time.monotonic() + self._channel.timeout
        while not self._control.rounds.poll(_NAP_MS):
            self._alarm.check()
            if time.monotonic() > deadline:
                raise RoundTimeoutError(
                    f"rank {self._channel.rank}: the coordinator has not confirmed exchange "
                    f"{self._number} within {self._channel.timeout:g} s"
                )
        self._control.rounds.recv()
