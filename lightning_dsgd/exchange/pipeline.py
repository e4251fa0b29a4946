"""The pipeline exchange: one all-reduce is under way while the training thread computes on.

Two threads meet here, under one condition variable: the training thread starts an exchange and
later takes its result; the thread `dsgd-pipeline` carries it out. There is never more than one.

What travels is converted to the wire's format, and back, by the training thread: on a GPU this
keeps the order of its stream, and the other thread has nothing to do but the collective.
"""

from __future__ import annotations

import threading
import time
from typing import Literal

import msgspec
import torch

from lightning_dsgd.backends import Channel
from lightning_dsgd.control.link import Control, Wait
from lightning_dsgd.errors import RoundTimeoutError, RunError
from lightning_dsgd.exchange.gradients import Flat
from lightning_dsgd.workers.messages import Contribution

Wire = Literal["full", "bf16", "fp16"]
WIRES: dict[str, torch.dtype | None] = {"full": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_SCALE = {"full": 1.0, "bf16": 1.0, "fp16": 1024.0}
"""Steps are small: unscaled, fp16 would round those below 6e-8 to nothing."""

_NAP_MS = 200


class Pipeline:
    """One rank's end of it."""

    def __init__(self, channel: Channel, control: Control, *, wire: Wire, version: int) -> None:
        self.busy_seconds = 0.0
        """From the start of each exchange until its end, all of them together."""
        self.waited_seconds = 0.0
        """The part of it that the training thread spent waiting."""
        self._channel = channel
        self._control = control
        self._alarm = channel.alarm
        self._wire = wire
        self._number = version
        self._flat: Flat | None = None
        self._sent: Flat | None = None
        self._ready: torch.cuda.Event | None = None
        self._done = True
        self._last_seconds = 0.0
        self._turn_began = time.monotonic()
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
        self._announce(finite)
        sent = self._encoded(flat)
        if flat[0].is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record()
        with self._changed:
            self._flat, self._sent, self._done = flat, sent, False
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until the buffers given to `start` hold the mean."""
        assert self._flat is not None
        began = time.monotonic()
        wait = Wait(self._control, self._number)
        with self._changed:
            while not self._done:
                self._changed.wait(wait.check())
        self._alarm.check()
        self._decode(self._flat)
        self._flat = None
        waited = time.monotonic() - began
        self.waited_seconds += waited
        self._turn_began += waited  # waiting is no computing

    def close(self) -> None:
        """End the thread; nothing may be under way any more, or the alarm must have rung."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=10.0)
        self._alarm.forget(self._wake)
        if not self._thread.is_alive():
            self._channel.close()

    def _announce(self, finite: bool) -> None:
        """The coordinator counts who has come, and so can name who has not."""
        now = time.monotonic()
        seconds, self._turn_began = now - self._turn_began, now
        rank, number = self._channel.rank, self._number
        self._number += 1
        came = Contribution(rank, number + 1, number, seconds=(seconds,), finite=finite)
        self._control.announce(msgspec.structs.replace(came, exchange=self._last_seconds))

    def _encoded(self, flat: Flat) -> Flat:
        dtype = WIRES[self._wire]
        if dtype is None:
            return flat
        factor = _SCALE[self._wire] / self._channel.world_size
        return [buffer.mul_(factor).to(dtype) for buffer in flat]

    def _decode(self, flat: Flat) -> None:
        assert self._sent is not None
        if self._sent is flat:
            for buffer in flat:
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
        try:
            while self._await_work():
                self._exchange()
        except RunError as error:
            self._alarm.ring(error)
        except Exception as error:
            self._alarm.ring(
                RunError(f"rank {self._channel.rank}: {type(error).__name__}: {error}")
            )

    def _await_work(self) -> bool:
        with self._changed:
            while self._done and not self._closing and self._alarm.error is None:
                self._changed.wait()
        return not self._done and self._alarm.error is None

    def _exchange(self) -> None:
        began = time.monotonic()
        assert self._sent is not None
        if self._ready is not None:
            self._ready.synchronize()
        for buffer in self._sent:
            self._channel.sum_(buffer)
        self._await_count()
        self._last_seconds = time.monotonic() - began
        self.busy_seconds += self._last_seconds
        with self._changed:
            self._done = True
            self._changed.notify_all()

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
