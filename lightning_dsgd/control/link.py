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

from lightning_dsgd.control.alarm import Alarm
from lightning_dsgd.control.children import forget_in_children, needs_no_forgetting
from lightning_dsgd.control.coordinator import Ticket, identity
from lightning_dsgd.control.sockets import Context, set_heartbeat
from lightning_dsgd.errors import (
    EpochLeftError,
    PeerFailedError,
    PeerLostError,
    ReplicasDifferError,
    RoundTimeoutError,
    RunError,
)
from lightning_dsgd.workers.messages import (
    Abort,
    Failed,
    Goodbye,
    Hello,
    Message,
    Over,
    Overdue,
    Welcome,
    decode_downward,
    encode,
)

_NAP_MS = 200


Keys = tuple[bytes, bytes]
"""A rank's public key, which it shows the others, and its secret one."""


def dial(context: Context, ticket: Ticket, rank: int, role: str, keys: Keys) -> zmq.Socket[bytes]:
    """An encrypted connection to the coordinator, not connected yet."""
    public, secret = keys
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


class Wait:
    """The training thread waits for a decision, and does not wait for ever.

    After `timeout` it tells the coordinator, which can say for whom. After twice that it gives up.
    """

    def __init__(self, control: Control, number: int) -> None:
        self._control = control
        self._number = number
        self._deadline = time.monotonic() + control.timeout
        self._told = False

    def check(self) -> float:
        """Raise what has ended the run; otherwise for how long to sleep at most."""
        self._control.alarm.check()
        left = self._deadline - time.monotonic()
        if left > 0:
            return left
        if self._told:
            raise RoundTimeoutError(
                f"rank {self._control.rank}: update {self._number} did not come within "
                f"{2 * self._control.timeout:g} s, and the coordinator does not say why"
            )
        self._told = True
        self._deadline += self._control.timeout
        self._control.announce(Overdue(self._control.rank, self._number))
        return self._control.timeout


class Control:
    """Everything one rank says to, and hears from, the coordinator outside of rounds."""

    def __init__(self, ticket: Ticket, rank: int, alarm: Alarm, keys: Keys) -> None:
        self.rank = rank
        self.alarm = alarm
        self.timeout = ticket.timeout
        self.told: RunError | None = None
        """Why the run is over, if the control plane said so: then every rank knows."""
        self._ticket = ticket
        self._keys = keys
        self._context = Context()
        self.rounds = self._connect("rounds")
        self._main = self._connect("main")
        forget_in_children(ticket.endpoint)
        self._life = dial(self._context, ticket, rank, "life", keys)
        self._monitor = self._life.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._life.connect(ticket.endpoint)
        self._life.send(encode(Hello(rank)))
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="dsgd-lifeline", daemon=True)
        self._thread.start()

    def _connect(self, role: str) -> zmq.Socket[bytes]:
        socket = dial(self._context, self._ticket, self.rank, role, self._keys)
        socket.connect(self._ticket.endpoint)
        socket.send(encode(Hello(self.rank)))
        return socket

    def await_welcome(self) -> None:
        """Wait until every rank is connected; until then a decision could miss one."""
        answer = self.await_answer(
            max(self._ticket.timeout, 30.0),
            f"the coordinator at {self._ticket.endpoint} did not answer; is that address reachable "
            "from this host?",
        )
        if not isinstance(answer, Welcome):
            raise RunError(f"rank {self.rank}: the coordinator said {answer} instead of welcome")

    def await_answer(self, timeout: float, otherwise: str) -> Message:
        """What the coordinator says to the training thread; for that thread only."""
        deadline = time.monotonic() + timeout
        while not self._main.poll(_NAP_MS):
            self.alarm.check()
            if time.monotonic() > deadline:
                raise RoundTimeoutError(f"rank {self.rank}: {otherwise}")
        answer: Message = decode_downward(self._main.recv())
        return answer

    def announce(self, message: Message) -> None:
        """Tell the coordinator; never blocks. For the training thread only."""
        # without a connection a plain send would wait for one; the lifeline says what is wrong
        with contextlib.suppress(zmq.Again):
            self._main.send(encode(message), zmq.NOBLOCK)

    def announce_exchange(self, message: Message) -> None:
        """The same, for the communication thread only."""
        with contextlib.suppress(zmq.Again):
            self.rounds.send(encode(message), zmq.NOBLOCK)

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
        needs_no_forgetting(self._ticket.endpoint)

    # ----------------------------------------------------------------- dsgd-lifeline

    def _listen(self) -> None:
        poller = zmq.Poller()
        poller.register(self._life, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while not self._leaving.is_set() and self.alarm.error is None:
            ready = dict(poller.poll(_NAP_MS))
            if self._life in ready:
                self._hear(decode_downward(self._life.recv()))
            elif self._monitor in ready and not self._life.poll(_NAP_MS):
                # nor has it said before that it would go
                text = "rank 0 is lost: its process has ended or no longer answers"
                if not self._leaving.is_set():
                    self._ring(PeerLostError(text))

    def _hear(self, message: Message) -> None:
        if isinstance(message, Over):
            self._leaving.set()
        if self._leaving.is_set() or not isinstance(message, Abort):
            return
        if message.worker == self.rank:  # it lives, and can still be told
            text = f"rank {self.rank} has lost a connection to rank 0: the others go without it"
            self._ring(PeerLostError(text))
        else:
            self._ring(_ERRORS[message.kind](message.reason))

    def _ring(self, error: RunError) -> None:
        self.told = error
        self.alarm.ring(error)


_ERRORS = {
    "lost": PeerLostError,
    "failed": PeerFailedError,
    "late": RoundTimeoutError,
    "left": EpochLeftError,
    "differs": ReplicasDifferError,
    "broken": RunError,
}
