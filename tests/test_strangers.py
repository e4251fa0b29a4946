"""Who may speak at the coordinator's port: a rank's key opens it, for that rank's name alone."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from lightning_dsgd.control.coordinator import _LONGEST_MESSAGE, Coordinator
from lightning_dsgd.control.link import dial
from lightning_dsgd.control.sockets import Context
from lightning_dsgd.workers.messages import Contribution, Segment, encode
from lightning_dsgd_plugins.k_family import FirstKPolicy
from tests.test_control_plane import until

_MADE = zmq.EVENT_HANDSHAKE_SUCCEEDED
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class Port:
    """A coordinator whose ranks have not come yet: all their names are free."""

    def __init__(self, workers: int = 2) -> None:
        self.keys = [zmq.curve_keypair() for _ in range(workers)]
        public = [key for key, _ in self.keys]
        self.coordinator = Coordinator(public, "127.0.0.1", timeout=60.0, warn=lambda text: None)
        self.coordinator.start()
        self.tally = self.coordinator.begin(FirstKPolicy(workers, workers))
        self.context = Context()

    def client(self, name: str, keys: tuple[bytes, bytes] | None) -> Client:
        """Of that name; without keys it does not encrypt either."""
        if keys is None:
            end = self.context.socket(zmq.DEALER)
        else:
            end = dial(self.context, self.coordinator.ticket, 0, "main", keys)
        end.identity, end.linger = name.encode(), 0
        return Client(end, self.coordinator.ticket.endpoint)

    def heard(self, worker: int) -> int:
        """The contributions that have been taken for that rank's."""
        return self.tally.workers[worker].contributions

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.coordinator.stop()


class Client:
    """One connection, and what becomes of it."""

    def __init__(self, end: zmq.Socket[bytes], endpoint: str) -> None:
        self.end = end
        self._monitor = end.get_monitor_socket(_MADE | _REFUSED | _ENDED)
        self._seen = 0
        end.connect(endpoint)

    def has(self, event: int) -> bool:
        """Has this happened to it, or does it soon?"""
        return until(lambda: bool(self._events() & event))

    def _events(self) -> int:
        while self._monitor.poll(0):
            self._seen |= parse_monitor_message(self._monitor.recv_multipart())["event"]
        return self._seen

    def close(self) -> None:
        self.end.disable_monitor()
        self._monitor.close(linger=0)
        self.end.close()


@pytest.fixture
def port() -> Iterator[Port]:
    port = Port()
    yield port
    port.close()


@contextlib.contextmanager
def speaking(port: Port, name: str, keys: tuple[bytes, bytes] | None) -> Iterator[Client]:
    """Somebody of that name has sent a contribution of rank 0's."""
    client = port.client(name, keys)
    try:
        client.end.send(encode(Contribution(0, 1, 0)))
        yield client
    finally:
        client.close()


def _goes_on(port: Port) -> None:
    """The rank itself is heard."""
    before = port.heard(0)
    with speaking(port, "0/main", port.keys[0]) as rank:
        assert rank.has(_MADE) and until(lambda: port.heard(0) == before + 1)


def test_a_rank_is_heard(port: Port) -> None:
    _goes_on(port)
    assert port.tally.foreign == 0


def test_a_client_without_encryption_is_not_heard(port: Port) -> None:
    with speaking(port, "0/main", None) as stranger:
        assert until(lambda: port.tally.foreign >= 1)
        assert not stranger._events() & _MADE
    assert port.heard(0) == 0
    _goes_on(port)


def test_a_key_that_nobody_has_shown_opens_nothing(port: Port) -> None:
    """The server's key alone, which every rank has seen, does not."""
    with speaking(port, "0/main", zmq.curve_keypair()) as stranger:
        assert stranger.has(_MADE | _REFUSED)
        assert stranger._events() & _REFUSED and not stranger._events() & _MADE
        assert until(lambda: port.tally.foreign >= 1)
    assert port.heard(0) == 0
    _goes_on(port)


def test_nobody_speaks_with_another_ranks_key(port: Port) -> None:
    with speaking(port, "0/main", port.keys[1]) as stranger:
        assert stranger.has(_MADE)
        assert until(lambda: port.tally.foreign >= 1)
    assert port.heard(0) == 0
    _goes_on(port)


@pytest.mark.parametrize("name", ["²/main", "7/main", "0/other", "main"])
def test_names_of_nobody_are_counted(port: Port, name: str) -> None:
    with speaking(port, name, port.keys[0]):
        assert until(lambda: port.tally.foreign == 1)
    assert port.heard(0) == 0


def test_a_long_message_ends_its_connection_before_it_is_taken(port: Port) -> None:
    client = port.client("0/main", port.keys[0])
    client.end.send(encode(Segment(1)).ljust(_LONGEST_MESSAGE - 100, b"\0"))  # no message of ours
    assert until(lambda: port.tally.foreign == 1)
    assert not client._events() & _ENDED
    client.end.send(bytes(_LONGEST_MESSAGE + 100))
    assert client.has(_ENDED)
    client.close()
    _goes_on(port)


def test_nobody_without_a_key_has_the_port_take_what_it_sends(port: Port) -> None:
    """A greeting, and the head of a command that is said to be of 400 MB; then its bytes."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    head = b"\x06" + (400 << 20).to_bytes(8, "big")
    address = ("127.0.0.1", int(port.coordinator.ticket.endpoint.rsplit(":", 1)[1]))
    sent = 0
    with socket.create_connection(address) as stranger:
        stranger.settimeout(20.0)
        stranger.sendall(greeting)
        assert stranger.recv(64)
        stranger.sendall(head)
        with contextlib.suppress(ConnectionError):
            while sent < 400 << 20:
                sent += stranger.send(bytes(1 << 16))
    assert sent < 32 << 20  # what lies in the kernel's buffers on the way
    _goes_on(port)


def test_a_plain_connection_is_dropped(port: Port) -> None:
    address = ("127.0.0.1", int(port.coordinator.ticket.endpoint.rsplit(":", 1)[1]))
    with socket.create_connection(address) as stranger:
        stranger.settimeout(20.0)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(100):
                pass
    assert until(lambda: port.tally.foreign >= 1)
    _goes_on(port)
