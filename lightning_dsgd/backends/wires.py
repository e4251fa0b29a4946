"""The connections of a process, as the system sees them: which there are, and how to cut them.

A library that waits on a connection for ever gives up at once when the connection is shut down; so
an operation can be ended that has no other way to end. Where the system does not tell (it is Linux
that has /proc), nothing is found and nothing is cut.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterable, Iterator


def open_sockets() -> set[tuple[int, int]]:
    """All sockets of this process: descriptor, and the number by which the system knows it."""
    return set(_sockets())


def _sockets() -> Iterator[tuple[int, int]]:
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                yield int(name), status.st_ino


class Wires:
    """Connections that were opened together."""

    def __init__(self, sockets: Iterable[tuple[int, int]]) -> None:
        self._sockets = list(sockets)

    def cut(self) -> None:
        """Shut down those that are still open."""
        alive, self._sockets = set(self._sockets) & open_sockets(), []
        for descriptor, _ in alive:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
                copy.getpeername()  # one that listens has none, and is left alone
                copy.shutdown(socket.SHUT_RDWR)
