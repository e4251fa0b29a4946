"""Memory for gradients, used again and again by a rank's two threads."""

from __future__ import annotations

import threading

from lightning_dsgd.backends.streams import Streams
from lightning_dsgd.exchange.gradients import Flat, FlatLayout

_LOOK_EVERY = 256
"""So often memory has been taken when the pool looks whether there is too much of it."""


class FlatPool:
    """Allocates as many gradients as are in use at once, and gives back what is over.

    What a stream is still busy with is left alone while there is other memory: who takes some does
    not wait for the other thread's stream.
    """

    def __init__(self, layout: FlatLayout, streams: Streams) -> None:
        self._layout = layout
        self._streams = streams
        self._lock = threading.Lock()
        self._free: list[Flat] = []
        self._used = self._most = self.peak = 0
        self._taken = 0

    def zeroed(self) -> Flat:
        """Zeros, for the calling thread's stream."""
        flat = self._take()
        if flat is None:
            return self._layout.zeros()
        for buffer in flat.take_up(self._streams):
            buffer.zero_()
        return flat

    def _take(self) -> Flat | None:
        with self._lock:
            self._used += 1
            self._taken += 1
            self._most = max(self._most, self._used)
            free = [number for number, flat in enumerate(self._free) if flat.free]
            if self._taken % _LOOK_EVERY == 0:
                self._shrink(free)
            found = self._free.pop(free[-1]) if free else None
            self.peak = max(self.peak, self._used + len(self._free))
            return found

    def _shrink(self, free: list[int]) -> None:
        """Down to what was in use at once since the last look."""
        over = self._used + len(self._free) - self._most
        self._most = self._used
        while over > 1 and len(free) > 1:
            over -= 1
            del self._free[free.pop()]

    def part_with(self) -> None:
        """What lies here may be freed when the calling thread's stream is done with it."""
        with self._lock:
            for flat in self._free:
                flat.take_up(self._streams).part_with(self._streams)

    def give_back(self, flat: Flat, used: bool = True) -> None:
        """The calling thread's stream was the last to use it, unless it has not."""
        if used:
            flat.hand_over(self._streams)
        with self._lock:
            self._used -= 1
            self._free.append(flat)
