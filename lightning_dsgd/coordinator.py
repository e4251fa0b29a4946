"""Rank 0's coordinator: a thread that feeds announcements to the policy and sends its decisions.

The thread `dsgd-coordinator` owns the ROUTER socket, its monitor, the policy, the tally and the
trace; nobody else touches them while it runs. Every rank has three sockets here, one per thread of
its own: `main` (announces), `rounds` (receives decisions) and `life` (receives the end of the run;
its connection is the rank's sign of life).

The port is closed to strangers: CURVE encrypts, the server's key travels over the collective
backend only, and what does not speak it is dropped and counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from lightning_dsgd.policy import Policy
from lightning_dsgd.protocol import (
    Abort,
    Applied,
    Computed,
    Contribution,
    Decision,
    Event,
    Failed,
    Go,
    Goodbye,
    Held,
    Hello,
    Joined,
    KChanged,
    Left,
    Message,
    Note,
    Overdue,
    Passed,
    Round,
    Segment,
    Tick,
    Welcome,
    decode_upward,
    encode,
)
from lightning_dsgd.tally import Tally
from lightning_dsgd.trace import TraceWriter

ROLES = ("main", "rounds", "life")
_EVENTS = (Contribution, Applied, Segment, Joined, Left, Tick, Computed)
_LONGEST_NAP_MS = 500


def identity(rank: int, role: str) -> bytes:
    """The name of one socket of one rank."""
    return f"{rank}/{role}".encode()


class Ticket(msgspec.Struct, frozen=True):
    """What a rank needs to connect; it travels over the collective backend."""

    endpoint: str
    key: bytes
    timeout: float


class Coordinator:
    """Start it with `start`, end it with `stop`; in between it is a thread of its own."""

    def __init__(
        self,
        policy: Policy,
        workers: int,
        address: str,
        *,
        timeout: float,
        trace: TraceWriter | None = None,
        warn: Callable[[str], None] = print,
    ) -> None:
        self.policy = policy
        self.tally = Tally(workers)
        self._workers = workers
        self._timeout = timeout
        self._trace = trace
        self._warn = warn
        self._context = zmq.Context()
        self._socket, key = self._open()
        port = self._bind(address)
        self.ticket = Ticket(f"tcp://{address}:{port}", key, timeout)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        ranks = range(workers)
        self._names = {identity(rank, role): (rank, role) for rank in ranks for role in ROLES}
        self._greeted: set[bytes] = set()
        self._gone: set[int] = set()
        self._connections: dict[int, tuple[int, str]] = {}
        self._aborted = False
        self._began = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dsgd-coordinator", daemon=True)

    def _open(self) -> tuple[zmq.Socket[bytes], bytes]:
        public, secret = zmq.curve_keypair()
        socket = self._context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_secretkey = secret
        socket.linger = 1000
        set_heartbeat(socket, self._timeout)
        return socket, public

    def _bind(self, address: str) -> int:
        try:
            return self._socket.bind_to_random_port(f"tcp://{address}")
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the port; the tally and the policy stay readable."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()
        if self._trace is not None:
            self._trace.close()

    # ----------------------------------------------------------------- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                ready = dict(poller.poll(self._nap_ms()))
                if self._monitor in ready:
                    self._connection_event()
                if self._socket in ready:
                    self._drain()
                self._look_at_the_clock()
        except Exception as error:
            reason = f"the coordinator failed: {type(error).__name__}: {error}"
            self._abort(Abort("broken", None, reason))
            raise

    def _drain(self) -> None:
        for _ in range(64):  # then look at the clock and the connections again
            try:
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._message(name, frames)

    def _message(self, name: zmq.Frame, frames: list[zmq.Frame]) -> None:
        try:
            (body,) = frames
            message = decode_upward(body.buffer)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            self.tally.foreign += 1
            return
        if not self._is_from(message, name.bytes):
            self.tally.foreign += 1
        elif isinstance(message, _EVENTS):
            self._event(message)
        else:
            self._note(message, name)

    def _is_from(self, message: Message, name: bytes) -> bool:
        """A rank speaks for itself alone, and only ranks of this run speak."""
        rank, _ = self._names.get(name, (None, ""))
        return rank is not None and getattr(message, "worker", rank) == rank

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _event(self, event: Event) -> None:
        now = self._now()
        self.tally.event(event)
        if self._trace is not None:
            self._trace.event(now, event)
        self._publish(self.policy.handle(event, now), now)

    def _publish(self, decisions: Iterable[Decision], now: float) -> None:
        for decision in decisions:
            self.tally.decision(decision)
            if self._trace is not None:
                self._trace.decision(now, decision)
            if isinstance(decision, Held):
                self._warn(f"round {decision.number} waits: {decision.reason} (max_lag)")
            elif isinstance(decision, KChanged):
                self._warn(decision.reason)
            elif isinstance(decision, (Round, Passed)):
                self._send_all("rounds", decision)
            else:
                worker = getattr(decision, "worker", None)
                role = "main" if isinstance(decision, Go) else "rounds"
                if worker is not None:
                    self._socket.send_multipart([identity(worker, role), encode(decision)])

    def _send_all(self, role: str, message: Message) -> None:
        body = encode(message)
        for rank in range(self._workers):
            self._socket.send_multipart([identity(rank, role), body])

    # -------------------------------------------------------------- coming and going

    def _note(self, note: Note, name: zmq.Frame) -> None:
        if isinstance(note, Hello):
            self._hello(name)
        elif isinstance(note, Goodbye):
            self._gone.add(note.worker)
        elif isinstance(note, Failed):
            self._gone.add(note.worker)
            reason = f"rank {note.worker} failed: {note.error}"
            self._abort(Abort("failed", note.worker, reason))
        elif isinstance(note, Overdue):
            self._overdue(note.number)

    def _hello(self, name: zmq.Frame) -> None:
        while self._monitor.poll(0):  # of whoever had the same descriptor before
            self._connection_event()
        self._greeted.add(name.bytes)
        self._connections[int(name.get(zmq.SRCFD))] = self._names[name.bytes]
        if len(self._greeted) == self._workers * len(ROLES):
            self._send_all("main", Welcome())

    def _connection_event(self) -> None:
        event = parse_monitor_message(self._monitor.recv_multipart())
        worker, role = self._connections.pop(event["value"], (-1, "stranger"))
        if role == "stranger":
            self.tally.foreign += 1
        elif role == "life" and worker not in self._gone:
            self._gone.add(worker)
            reason = f"rank {worker} is lost: its process has ended or no longer answers"
            self._abort(Abort("lost", worker, reason))

    def _abort(self, why: Abort) -> None:
        if self._aborted:
            return
        self._aborted = True
        self._send_all("life", why)

    # ------------------------------------------------------------------------ time

    def _nap_ms(self) -> int:
        deadline = self.policy.deadline()
        if deadline is None:
            return _LONGEST_NAP_MS
        return int(max(0.0, min(_LONGEST_NAP_MS, (deadline - self._now()) * 1000 + 1.0)))

    def _look_at_the_clock(self) -> None:
        now = self._now()
        deadline = self.policy.deadline()
        if deadline is not None and now >= deadline:
            self._event(Tick())

    def _overdue(self, number: int) -> None:
        """Say for whom a rank waits, unless the decision has been made meanwhile."""
        if self.policy.version < min(number, self.policy.last):
            names = ", ".join(str(rank) for rank in self.policy.missing())
            due = self.policy.version + 1
            text = f"update {due} has waited {self._timeout:g} s (timeout) for rank {names}"
            self._abort(Abort("late", None, text))


def set_heartbeat(socket: zmq.Socket[bytes], timeout: float) -> None:
    """Close the connection of a peer that has not answered for `timeout` seconds."""
    socket.heartbeat_ivl = max(100, int(timeout * 1000 / 4))
    socket.heartbeat_timeout = int(timeout * 1000)
