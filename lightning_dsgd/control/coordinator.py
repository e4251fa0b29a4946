"""Rank 0's coordinator: a thread that feeds announcements to the policy and sends its decisions.

It serves from a Trainer's first step to its last, so that a rank that fails at any point takes the
others along; between `begin` and `end` it has a policy, and decides.

The thread `dsgd-coordinator` owns the ROUTER socket, its monitor and the doorkeeper; the policy,
the tally and the trace are changed under a lock. Every rank has three sockets here, one per thread
of its own: `main` (announces), `rounds` (receives decisions) and `life` (receives the end of the
run). A connection of any of them that is lost means that the rank is.

The port is closed to strangers: CURVE encrypts, only the keys that the ranks have shown each other
at the start are let in, each for the rank that it belongs to, and what else comes is dropped and
counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from lightning_dsgd.control.door import Door
from lightning_dsgd.control.sockets import Context, set_heartbeat
from lightning_dsgd.control.tally import Tally
from lightning_dsgd.control.trace import TraceWriter
from lightning_dsgd.workers.departures import Departures
from lightning_dsgd.workers.messages import (
    Abort,
    Applied,
    Checksum,
    Computed,
    Contribution,
    Decision,
    Departed,
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
    Over,
    Overdue,
    Passed,
    Round,
    Said,
    Segment,
    Tick,
    Welcome,
    decode_upward,
    encode,
)
from lightning_dsgd.workers.policy import Policy
from lightning_dsgd.workers.replicas import Replicas

ROLES = ("main", "rounds", "life")
_EVENTS = (Contribution, Applied, Segment, Joined, Left, Tick, Computed)
_LONGEST_NAP_MS = 500
_SHORT_NAP_MS = 20
_GOODBYE_SECONDS = 0.5
_HELD_SECONDS = 60.0
_LONGEST_MESSAGE = 1 << 20
"""Bytes; ranks send some hundred."""


def identity(rank: int, role: str) -> bytes:
    """The name of one socket of one rank."""
    return f"{rank}/{role}".encode()


class Ticket(msgspec.Struct, frozen=True):
    """What a rank needs to connect; nothing in it is secret."""

    endpoint: str
    key: bytes
    timeout: float


class Coordinator:
    """Start it with `start`, end it with `stop`; in between it is a thread of its own."""

    def __init__(
        self,
        keys: Sequence[bytes],
        address: str,
        *,
        timeout: float,
        warn: Callable[[str], None] = print,
    ) -> None:
        workers = len(keys)
        self.policy: Policy | None = None
        self.tally = Tally(workers)
        self._replicas = Replicas(workers)
        self._departures = Departures(workers)
        self._workers = workers
        self._timeout = timeout
        self._trace: TraceWriter | None = None
        self._warn = warn
        self._lock = threading.Lock()
        self._context = Context()
        self._door = Door(self._context, keys)
        self._socket, key = self._open()
        port = self._bind(address)
        self.ticket = Ticket(f"tcp://{address}:{port}", key, timeout)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        ranks = range(workers)
        self._names = {identity(rank, role): (rank, role) for rank in ranks for role in ROLES}
        self._greeted: set[bytes] = set()
        self._gone: set[int] = set()
        self._suspects: dict[int, float] = {}
        """Ranks that have lost a connection, and when they are lost themselves unless they have
        said goodbye: that comes by another connection, and may be later."""
        self._connections: dict[int, tuple[int, str]] = {}
        self._aborted = False
        self._began, self._next_held = time.monotonic(), 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dsgd-coordinator", daemon=True)

    def _open(self) -> tuple[zmq.Socket[bytes], bytes]:
        public, secret = zmq.curve_keypair()
        socket = self._context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_secretkey = secret
        socket.linger = 1000
        socket.sndhwm = 0  # a decision is never dropped; what is queued is bounded by max_lag
        socket.maxmsgsize = _LONGEST_MESSAGE
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

    def begin(self, policy: Policy, trace: TraceWriter | None = None) -> Tally:
        """From now on decide, by this policy; the count of what is decided is given back."""
        with self._lock:
            self.policy, self._trace = policy, trace
            self.tally, self._replicas = Tally(self._workers), Replicas(self._workers)
            self._departures = Departures(self._workers)
            self._began, self._next_held = time.monotonic(), 0.0
            return self.tally

    def end(self) -> None:
        """Decide no more."""
        with self._lock:
            self.policy = None
            trace, self._trace = self._trace, None
        if trace is not None:
            trace.close()

    def stop(self, failed: bool = False) -> None:
        """End the thread and close the port; the others are told if this is the regular end."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        if not failed and not self._aborted:
            self._send_all("life", Over())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._door.close()
        self._socket.close()
        self._context.term()
        self.end()

    # ----------------------------------------------------------------- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._door.socket, zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                ready = dict(poller.poll(self._nap_ms()))
                if self._door.socket in ready and not self._door.answer():
                    self.tally.foreign += 1
                if self._monitor in ready:
                    self._connection_event()
                with self._lock:
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
        if not self._is_from(message, name.bytes, body):
            self.tally.foreign += 1
        elif isinstance(message, _EVENTS):
            self._event(message)
        else:
            self._note(message, name)

    def _is_from(self, message: Message, name: bytes, body: zmq.Frame) -> bool:
        """A rank speaks for itself alone, with its own key, and only ranks of this run speak."""
        rank, _ = self._names.get(name, (None, ""))
        if rank is None or body.get("User-Id") != str(rank):
            return False
        return bool(getattr(message, "worker", rank) == rank)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _event(self, event: Event) -> None:
        if self.policy is None:
            return  # a late word of a training that is over
        now = self._now()
        self.tally.event(event)
        if self._trace is not None:
            self._trace.event(now, event)
        self._publish(self.policy.handle(event, now), now)
        if isinstance(event, Contribution):
            self._end_if("left", self._departures.goes_on(event.worker, event.version))

    def _publish(self, decisions: Iterable[Decision], now: float) -> None:
        for decision in decisions:
            self.tally.decision(decision)
            if self._trace is not None:
                self._trace.decision(now, decision)
            if isinstance(decision, Held):
                self._held(decision, now)
            elif isinstance(decision, (KChanged, Said)):
                self._warn(decision.reason)
            elif isinstance(decision, (Round, Passed)):
                self._send_all("rounds", decision)
            else:
                worker = getattr(decision, "worker", None)
                role = "main" if isinstance(decision, Go) else "rounds"
                if worker is not None:
                    self._socket.send_multipart([identity(worker, role), encode(decision)])

    def _held(self, decision: Held, now: float) -> None:
        """Once in a while; who lags does so again and again."""
        if now >= self._next_held:
            self._next_held = now + _HELD_SECONDS
            self._warn(f"round {decision.number} waits: {decision.reason}")

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
        elif isinstance(note, Checksum):
            self._end_if("differs", self._replicas.compare(note.worker, note.version, note.value))
        elif isinstance(note, Departed):
            self._end_if("left", self._departures.leaves(note.worker, note.version))

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
        elif worker not in self._gone:
            self._suspects.setdefault(worker, time.monotonic() + _GOODBYE_SECONDS)

    def _end_if(self, kind: Literal["differs", "left"], reason: str | None) -> None:
        """What concerns all ranks alike ends the run on all of them."""
        if reason is not None:
            self._abort(Abort(kind, None, reason))

    def _abort(self, why: Abort) -> None:
        if self._aborted:
            return
        self._aborted = True
        self._send_all("life", why)

    # ------------------------------------------------------------------------ time

    def _deadline(self) -> float | None:
        return self.policy.deadline() if self.policy is not None else None

    def _nap_ms(self) -> int:
        deadline = self._deadline()
        if self._suspects:
            return _SHORT_NAP_MS
        if deadline is None:
            return _LONGEST_NAP_MS
        return int(max(0.0, min(_LONGEST_NAP_MS, (deadline - self._now()) * 1000 + 1.0)))

    def _look_at_the_clock(self) -> None:
        now = self._now()
        deadline = self._deadline()
        if deadline is not None and now >= deadline:
            self._event(Tick())
        for worker, until in list(self._suspects.items()):
            if worker in self._gone or time.monotonic() >= until:
                del self._suspects[worker]
                self._lose(worker)

    def _lose(self, worker: int) -> None:
        if worker not in self._gone:
            self._gone.add(worker)
            reason = f"rank {worker} is lost: its process has ended or no longer answers"
            self._abort(Abort("lost", worker, reason))

    def _overdue(self, number: int) -> None:
        """Say for whom a rank waits, unless the decision has been made meanwhile."""
        if self.policy is not None and self.policy.version < min(number, self.policy.last):
            names = ", ".join(str(rank) for rank in self.policy.missing())
            due = self.policy.version + 1
            text = f"update {due} has waited {self._timeout:g} s (timeout) for rank {names}"
            self._abort(Abort("late", None, text))
