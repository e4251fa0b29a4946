"""The gossip exchange: pairs of ranks average their models while all of them compute.

Two threads meet at a `SharedModel`, whose lock is held for memory copies only:

- the training thread reads it, computes at what it read, and adds its own step;
- the thread `dsgd-gossip` reads it, averages with a partner, and adds what the averaging changed.

Both add a *difference*, so what the one does while the other is busy is never lost, nobody ever
sees half a change, and the mean of all models stays what it was.

Which pairs there are is decided elsewhere. Every rank carries its pairs out in the order in which
they were decided, so the oldest pair not done yet always has both its ranks free: there is no
deadlock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

import msgspec
import torch

from lightning_dsgd.backends import Channel
from lightning_dsgd.backends.streams import Streams
from lightning_dsgd.control.alarm import Alarm
from lightning_dsgd.control.link import Control, Wait
from lightning_dsgd.exchange.gradients import Flat, is_narrow
from lightning_dsgd.exchange.serving import serve
from lightning_dsgd.workers.messages import Closed, Computed, Go, Message, Pair, decode_downward

_NAP_MS = 200


class SharedModel:
    """One rank's model, changed by two threads, each by a stream of its own on a device.

    What either queues waits for the other's last change or look. So the training thread comes here
    only when its gradient is there: a partner would wait for whatever was queued before.
    """

    def __init__(self, flat: Flat, streams: Streams) -> None:
        self._flat = flat
        self._streams = streams
        flat.hand_over(streams)
        self._lock = threading.Lock()
        self._changes = 0

    @torch.no_grad()
    def read(self, out: Flat) -> int:
        """Copy the model; the number returned tells whether it has changed since."""
        with self._ours() as model:
            _copy(model, out)
            return self._changes

    @torch.no_grad()
    def move(self, start: Flat, end: Flat, seen: int) -> None:
        """Add `end - start`, where `start` is what was read at `seen`; `end` is used up."""
        with self._ours() as model:
            if self._changes == seen:
                _copy(end, model)
            else:
                for buffer, origin, target in zip(model, start, end, strict=True):
                    buffer.add_(target.sub_(origin))
            self._changes += 1

    @torch.no_grad()
    def replace(self, flat: Flat) -> None:
        """From now on the model is this one."""
        with self._ours() as model:
            _copy(flat, model)
            self._changes += 1

    @contextlib.contextmanager
    def _ours(self) -> Iterator[Flat]:
        with self._lock:
            yield self._flat.take_up(self._streams)
            self._flat.hand_over(self._streams)


def _copy(source: Flat, target: Flat) -> None:
    for origin, copy in zip(source, target, strict=True):
        copy.copy_(origin)


class Counts(msgspec.Struct):
    """What one rank has done so far."""

    gradients: int = 0
    dropped: int = 0
    """Those of them that were not finite, and made no step."""
    started: int = 0
    answered: int = 0
    ages: int = 0
    """The partners' ages in all its exchanges, summed."""
    last_age: int = 0

    @property
    def exchanges(self) -> int:
        """Started or answered."""
        return self.started + self.answered

    @property
    def mean_age(self) -> float:
        """Gradients made by all ranks since a partner's last own one, on average over exchanges."""
        return self.ages / self.exchanges if self.exchanges else 0.0


class GossipExchange:
    """One rank's part in all exchanges of a run."""

    def __init__(
        self,
        rank: int,
        pairs: Mapping[int, Channel],
        control: Control,
        model: SharedModel,
        buffers: Callable[[], Flat],
        alarm: Alarm,
        streams: Streams,
        *,
        active: bool,
        timeout: float,
    ) -> None:
        self.rank = rank
        self.counts = Counts()
        self._pairs = pairs
        self._control = control
        self._alarm = alarm
        self._streams = streams
        self._active = active
        self._timeout = timeout
        self.change_layout(model, buffers)
        self._changed = threading.Condition()
        self._under_way = False
        self._closed = False
        self._closing = False
        self._alarm.listen(self._wake)
        self._thread = threading.Thread(target=self._run, name="dsgd-gossip", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------- training thread

    def computed(self) -> None:
        """Announce a gradient; start an exchange with it unless the last one is still going on."""
        self._alarm.check()
        with self._changed:
            starts = self._active and not self._under_way
            self._under_way |= starts
            self.counts.gradients += 1
        self._control.announce(Computed(self.rank, starts))

    def may_go_on(self) -> bool:
        """The answer to `computed`: is there a further gradient to make in this segment?"""
        answer = self._control.await_answer(
            self._timeout,
            f"rank 0 has not answered for {self._timeout:g} s (timeout); its process is busy, "
            "stopped or swapped out",
        )
        assert isinstance(answer, Go), f"unexpected answer {answer}"
        return answer.more

    def await_close(self, number: int) -> None:
        """Wait until all ranks have made that many gradients, and all pairs are done."""
        wait = Wait(self._control, number)
        with self._changed:
            while not self._closed:
                self._changed.wait(wait.check())
        self._alarm.check()
        self._closed = False

    def change_layout(self, model: SharedModel, buffers: Callable[[], Flat]) -> None:
        """Between two segments, when no pair is under way: from now on average this one."""
        self.model = model
        self._mine, self._sum = buffers(), buffers()
        self._sum.hand_over(self._streams)

    def close(self) -> None:
        """End the thread; no pair may be under way any more, or the alarm must have rung."""
        self._closing = True
        self._thread.join(timeout=10.0)
        self._alarm.forget(self._wake)
        if not self._thread.is_alive():
            for channel in self._pairs.values():
                channel.close()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # ----------------------------------------------------------------- dsgd-gossip

    def _run(self) -> None:
        serve(self._serve, self._streams, self._alarm, self.rank)

    def _serve(self) -> None:
        while not self._closing and self._alarm.error is None:
            if self._control.rounds.poll(_NAP_MS):
                self._heed(decode_downward(self._control.rounds.recv()))

    def _heed(self, decision: Message) -> None:
        if isinstance(decision, Pair):
            self._average(decision)
        elif isinstance(decision, Closed):
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def _average(self, pair: Pair) -> None:
        self._sum.take_up(self._streams)  # once, after they have been made
        seen = self.model.read(self._mine)
        _copy(self._mine, self._sum)
        channel = self._pairs[pair.partner]
        for buffer in self._sum:
            if is_narrow(buffer):
                channel.sum_(buffer.div_(2))
            else:
                channel.sum_(buffer)
                buffer.div_(2)
        channel.wait_for(self._streams.mark())
        self.model.move(self._mine, self._sum, seen)
        with self._changed:
            self._count(pair)
            self._under_way = self._under_way and not pair.starts
            self._changed.notify_all()

    def _count(self, pair: Pair) -> None:
        self.counts.started += pair.starts
        self.counts.answered += not pair.starts
        self.counts.ages += pair.age
        self.counts.last_age = pair.age
