"""One flag per rank for "this run is over", which ends every wait of every thread at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_dsgd.errors import RunError


class Alarm:
    """Rung once, by whoever learns first why the run cannot go on; the first reason stays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rung = threading.Event()
        self._listeners: set[Callable[[], None]] = set()
        self.error: RunError | None = None

    def ring(self, error: RunError) -> None:
        """Give the reason and wake everybody."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            listeners = list(self._listeners)
        self._rung.set()
        for wake in listeners:
            wake()

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` when the alarm rings; at once if it has rung."""
        with self._lock:
            self._listeners.add(wake)
            rung = self.error is not None
        if rung:
            wake()

    def forget(self, wake: Callable[[], None]) -> None:
        """Undo `listen`."""
        with self._lock:
            self._listeners.discard(wake)

    def check(self) -> None:
        """Raise the reason, if there is one."""
        if self.error is not None:
            raise self.error

    def wait(self, seconds: float) -> bool:
        """Wait for the alarm; True if it has rung."""
        return self._rung.wait(seconds)
