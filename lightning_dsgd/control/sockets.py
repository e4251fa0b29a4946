"""What both ends of the control plane's connections have in common."""

from __future__ import annotations

import zmq


class Context(zmq.Context["zmq.Socket[bytes]"]):
    """Of one owner, who ends it; the garbage collector never does.

    pyzmq's waits, when it is collected, until its sockets are closed; where these are garbage with
    it, of a training that failed half-way, that is for ever.
    """

    def __del__(self) -> None:
        return


def set_heartbeat(socket: zmq.Socket[bytes], timeout: float) -> None:
    """Close the connection of a peer that has not answered for `timeout` seconds."""
    socket.heartbeat_ivl = max(100, int(timeout * 1000 / 4))
    socket.heartbeat_timeout = int(timeout * 1000)
