"""A rank's side of the control plane.

Three sockets, each owned by one thread: `Announcer` by the training thread, the `rounds` socket by
the communication thread, the `life` socket by the thread `dsgd-lifeline`, which rings the alarm
when the run is over for everybody or when rank 0 is gone.
"""

from __future__ import annotations

import contextlib
import threading
import time

import zmq

from lightning_dsgd.alarm import Alarm
from lightning_dsgd.coordinator import Ticket, identity, set_heartbeat
from lightning_dsgd.errors import PeerFailedError, PeerLostError, RoundTimeoutError, RunError
from lightning_dsgd.protocol import (
    Abort,
    Failed,
    Goodbye,
    Hello,
    Message,
    Welcome,
    decode_downward,
    encode,
)

_NAP_MS = 200


def dial(
    context: zmq.Context[zmq.Socket[bytes]], ticket: Ticket, rank: int, role: str
) -> zmq.Socket[bytes]:
    """An encrypted connection to the coordinator, already announced."""
    public, secret = zmq.curve_keypair()
    socket = context.socket(zmq.DEALER)
    socket.identity = identity(rank, role)
    socket.curve_serverkey = ticket.key
    socket.curve_publickey = public
    socket.curve_secretkey = secret
    socket.reconnect_ivl = -1
    socket.linger = 1000
    socket.sndhwm = socket.rcvhwm = 0
    set_heartbeat(socket, ticket.timeout)
    return socket


class Control:
    """Everything one rank says to, and hears from, the coordinator outside of rounds."""

    def __init__(self, ticket: Ticket, rank: int, alarm: Alarm) -> None:
        self.rank = rank
        self._alarm = alarm
        self._ticket = ticket
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.rounds = self._connect("rounds")
        self._main = self._connect("main")
        self._life = dial(self._context, ticket, rank, "life")
        self._monitor = self._life.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._life.connect(ticket.endpoint)
        self._life.send(encode(Hello(rank)))
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="dsgd-lifeline", daemon=True)
        self._thread.start()

    def _connect(self, role: str) -> zmq.Socket[bytes]:
        socket = dial(self._context, self._ticket, self.rank, role)
        socket.connect(self._ticket.endpoint)
        socket.send(encode(Hello(self.rank)))
        return socket

    def await_welcome(self) -> None:
        """Wait until every rank is connected; until then a decision could miss one."""
        assert isinstance(self.await_answer(max(self._ticket.timeout, 30.0)), Welcome)

    def await_answer(self, timeout: float) -> Message:
        """What the coordinator says to the training thread; for that thread only."""
        deadline = time.monotonic() + timeout
        while not self._main.poll(_NAP_MS):
            self._alarm.check()
            if time.monotonic() > deadline:
                raise RoundTimeoutError(
                    f"rank {self.rank}: the coordinator at {self._ticket.endpoint} did not answer; "
                    "is that address reachable from this host?"
                )
        answer: Message = decode_downward(self._main.recv())
        return answer

    def announce(self, message: Message) -> None:
        """Tell the coordinator; never blocks. For the training thread only."""
        # without a connection a plain send would wait for one; the lifeline says what is wrong
        with contextlib.suppress(zmq.Again):
            self._main.send(encode(message), zmq.NOBLOCK)

    def leave(self, error: str | None = None) -> None:
        """Say goodbye, or why not, and close; for the training thread only."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        self.announce(Goodbye(self.rank) if error is None else Failed(self.rank, error))

    def close(self) -> None:
        """Join the lifeline and close all sockets; the communication thread must have ended."""
        self._leaving.set()
        self._thread.join(timeout=5.0)
        self._life.disable_monitor()
        for socket in (self._monitor, self.rounds, self._main, self._life):
            socket.close()
        self._context.term()

    # ----------------------------------------------------------------- dsgd-lifeline

    def _listen(self) -> None:
        poller = zmq.Poller()
        poller.register(self._life, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while not self._leaving.is_set() and self._alarm.error is None:
            ready = dict(poller.poll(_NAP_MS))
            if self._life in ready:
                self._hear(decode_downward(self._life.recv()))
            elif self._monitor in ready and not self._leaving.is_set():
                text = "rank 0 is lost: its process has ended or no longer answers"
                self._alarm.ring(PeerLostError(text))

    def _hear(self, message: Message) -> None:
        if not isinstance(message, Abort) or message.worker == self.rank:
            return
        self._alarm.ring(_error_of(message))


def _error_of(abort: Abort) -> RunError:
    if abort.worker is None:
        return RoundTimeoutError(abort.reason)
    kind = PeerFailedError if " failed: " in abort.reason else PeerLostError
    return kind(abort.reason)
