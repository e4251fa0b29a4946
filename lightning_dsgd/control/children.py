"""A forked child, such as a DataLoader's worker, must not hold its parent's connections open.

It inherits them, and nobody would notice its parent's death while it lives. ZeroMQ does not tell
its descriptors; a child finds those of the control plane by the port at their end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat

_ports: set[int] = set()


def forget_in_children(endpoint: str) -> None:
    """Let future children close what they inherit of connections to or at this endpoint."""
    _ports.add(int(endpoint.rpartition(":")[2]))


def needs_no_forgetting(endpoint: str) -> None:
    """The connections are closed; others may come to have that port."""
    _ports.discard(int(endpoint.rpartition(":")[2]))


def _forget() -> None:
    if not _ports:
        return
    with contextlib.suppress(OSError):  # where the system does not list them
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if _is_ours(int(name)):
                    os.close(int(name))


def _is_ours(descriptor: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.family != socket.AF_INET:
            return False
        ends = [copy.getsockname()[1]]
        with contextlib.suppress(OSError):  # a listening one has no peer
            ends.append(copy.getpeername()[1])
    return not _ports.isdisjoint(ends)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
