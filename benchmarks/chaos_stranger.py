"""A process that has no part in a training, and knocks at its control plane's port.

    python -m benchmarks.chaos_stranger KIND ENDPOINT SERVER_KEY MESSAGE

It claims to be rank 0. Its end is 0 if it got as far as a connection, and no further. It needs
nothing but ZeroMQ, so as to be there soon.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

STRANGERS = ("stranger without a key", "stranger with a key", "stranger with noise")
_HELD = 1.5
"""Seconds for which it does not go away."""
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE"


def throw(noise: bytes, port: int, held: float = 0.0) -> bool:
    """Was it taken? Whoever listens may close the door afterwards."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2.0) as wire:
        wire.sendall(noise)
        time.sleep(held)
        return True
    return False


def make_noise(port: int) -> bool:
    """The beginning of ZeroMQ's own greeting among it, and then nothing more."""
    noises = (b"GET / HTTP/1.1\r\n\r\n" * 50, bytes(range(256)) * 20, b"\xff" * 64)
    return all([throw(noise, port) for noise in noises]) and throw(_GREETING, port, _HELD)


def knock(endpoint: str, server_key: bytes, message: bytes, with_key: bool) -> bool:
    """With ZeroMQ, and with a key that no rank has shown the others; again and again."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.identity = b"0/main"
        if with_key:
            stranger.curve_serverkey = server_key
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        monitor = stranger.get_monitor_socket()
        stranger.connect(endpoint)
        with contextlib.suppress(zmq.Again):  # it may have been turned away already
            stranger.send(message, zmq.NOBLOCK)
        events = list(seen(monitor))
        stranger.disable_monitor()
        monitor.close(linger=0)
    return zmq.EVENT_CONNECTED in events and zmq.EVENT_HANDSHAKE_SUCCEEDED not in events


def seen(monitor: zmq.Socket[bytes]) -> list[int]:
    """What has become of the connection, by ZeroMQ's numbers."""
    events: list[int] = []
    deadline = time.monotonic() + _HELD
    while (left := deadline - time.monotonic()) > 0:
        if monitor.poll(left * 1000):
            events.append(int(parse_monitor_message(monitor.recv_multipart())["event"]))
    return events


def main() -> int:
    kind, endpoint, server_key, message = sys.argv[1:]
    if kind == "stranger with noise":
        return not make_noise(int(endpoint.rpartition(":")[2]))
    with_key = kind == "stranger with a key"
    return not knock(endpoint, server_key.encode(), bytes.fromhex(message), with_key)


if __name__ == "__main__":
    raise SystemExit(main())
