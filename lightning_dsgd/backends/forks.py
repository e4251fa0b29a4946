"""A process that forks, for a DataLoader's workers, while its other threads exchange.

When an operation ends, a thread of the library drops its tensors, and enters Python for that. If
the process forks in that very moment, the child has a lock of the interpreter that nobody opens,
and hangs. So forks and operations keep out of each other's way: a fork waits until no operation is
under way, though not for long, and an operation that would begin waits until the fork is done.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

_PATIENCE = 0.1
"""Seconds that a fork waits: an operation that takes longer seldom ends in that very moment."""
_SETTLED = 0.005
"""Seconds after an operation until the library's threads have cleaned up behind it."""


class Forks:
    """Of this process."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """In a child, which has no other thread, nor what such a one has locked."""
        self._changed = threading.Condition()
        self._under_way = 0
        self._ended = 0.0
        self._forking = False

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """An operation is under way."""
        with self._changed:
            while self._forking:
                self._changed.wait(_PATIENCE)
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._ended = time.monotonic()
                self._changed.notify_all()

    def before(self) -> None:
        """In the thread that forks."""
        deadline = time.monotonic() + _PATIENCE
        with self._changed:
            self._forking = True
            while self._under_way and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            settled = self._ended + _SETTLED
        time.sleep(max(0.0, settled - time.monotonic()))

    def after(self) -> None:
        """In the parent."""
        with self._changed:
            self._forking = False
            self._changed.notify_all()


FORKS = Forks()
os.register_at_fork(
    before=FORKS.before, after_in_parent=FORKS.after, after_in_child=FORKS.begin_anew
)
