"""Who is let in: ZeroMQ asks for each connection, before anything of it is read.

The asking follows ZeroMQ's authentication protocol (ZAP, rfc.zeromq.org/spec/27): a request by an
inner socket, with the client's public key; the answer says whether it may come in, and as whom.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq
from zmq.utils import z85

from lightning_dsgd.control.sockets import Context

_DOOR = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class Door:
    """Knows the ranks' public keys; its owner's thread answers."""

    def __init__(self, context: Context, keys: Sequence[bytes]) -> None:
        self._ranks = {z85.decode(key): rank for rank, key in enumerate(keys)}
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_DOOR)

    def answer(self) -> bool:
        """Answer one request; was it a rank's?"""
        _, number, _, _, _, mechanism, *credentials = self.socket.recv_multipart()
        rank = self._ranks.get(credentials[0]) if mechanism == b"CURVE" and credentials else None
        if rank is None:
            self.socket.send_multipart([_VERSION, number, b"400", b"not of this run", b"", b""])
            return False
        name = str(rank).encode()
        self.socket.send_multipart([_VERSION, number, b"200", b"OK", name, b""])
        return True

    def close(self) -> None:
        """Nobody is let in any more."""
        self.socket.close()
