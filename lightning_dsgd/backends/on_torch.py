"""Collectives on torch.distributed's process groups, built directly on a store.

The default group stays uninitialised: with it, Lightning would broadcast a flag from rank 0 on
every batch and so tie all ranks to rank 0's pace.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dsgd.backends import MEETING_SECONDS, Backend, Channel, Edge
from lightning_dsgd.backends.forks import FORKS
from lightning_dsgd.backends.hosts import Place, reachable_address, this_place
from lightning_dsgd.backends.meeting import Meeting
from lightning_dsgd.backends.on_devices import first_used, maker_for
from lightning_dsgd.backends.streams import Mark
from lightning_dsgd.backends.wires import Wires, open_sockets
from lightning_dsgd.control.alarm import Alarm
from lightning_dsgd.errors import ConfigurationError, RoundTimeoutError, RunError

_JOBS = itertools.count()
_GRACE = 2.0
"""Seconds for what has been cut off to notice."""
_NAP = timedelta(seconds=0.1)
"""Between two looks at the alarm."""
_INTERFACES = "GLOO_SOCKET_IFNAME"
"""torch's variable for the interfaces that Gloo uses, with commas between them."""
_backends: weakref.WeakSet[TorchBackend] = weakref.WeakSet()
_abandoned: list[object] = []
"""Groups with an operation that never ended: their destructor would wait for it."""
_hosted: dict[tuple[str, int], dist.Store] = {}
"""Rank 0's stores. They serve as long as the process: another rank may be a job ahead."""


class TorchBackend(Backend):
    """One store per job; one process group per channel."""

    name = "torch"

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str,
        port: int,
        device: torch.device,
        alarm: Alarm,
        timeout: float,
        edges: Sequence[Edge] = (),
    ) -> None:
        self._device = device
        self._patience = max(timeout, MEETING_SECONDS)
        store = _store(address, port, rank, world_size, self._patience)
        self._meeting = Meeting(store, next(_JOBS), rank, world_size, self._patience)
        self._store = self._meeting.store
        self._channels: list[TorchChannel] = []
        self._opened = 0
        try:
            super().__init__(rank, world_size, alarm, timeout, edges)
            self._meeting.seal = self.seal
            self._gloo_devices = self._devices_at(address)
        except Exception as error:
            self._meeting.give_word(error)
            raise
        _backends.add(self)

    def _devices_at(self, meeting_point: str) -> list[Any]:
        """The user's, or one at the address by which the others reach this host.

        All ranks show their places, so that some may have an interface chosen for them.
        """
        chosen = _chosen_devices()
        address = self._own_address(meeting_point)
        return chosen or [_device(address)]

    def introduce(self, card: bytes) -> list[bytes]:
        """Through the launcher's store, where each rank leaves its card."""
        return self._meeting.introduce(card, self.alarm)

    def give_word(self, error: BaseException) -> None:
        """For those who wait for this rank's card."""
        self._meeting.give_word(error)

    def _own_address(self, meeting_point: str) -> str:
        """By which the others reach this host."""
        own = this_place(meeting_point)
        cards = self.introduce(msgspec.json.encode(own))
        return reachable_address(own, [msgspec.json.decode(card, type=Place) for card in cards])

    def channel(self, name: str, patience: float = 1.0, on_device: bool = False) -> Channel:
        self._opened += 1
        return self._open(name, self.rank, self.world_size, self.timeout * patience, on_device)

    def pairs(self) -> dict[int, Channel]:
        """A group of two per edge: the wait of a send or receive could not be interrupted."""
        self._opened += 1
        return {
            partner: self._open(
                f"pair {a} and {b}", (a, b).index(self.rank), 2, self.timeout * 2, True
            )
            for partner, (a, b) in self.partners()
        }

    def _open(self, name: str, rank: int, size: int, timeout: float, on_device: bool) -> Channel:
        store = dist.PrefixStore(f"{name}-{self._opened}", self._store)
        groups: dict[str, Any] = {}

        def connect() -> None:
            groups["cpu"] = self._gloo(store, rank, size, timeout)
            make = maker_for(self._device) if on_device else None
            if make is not None:
                own = dist.PrefixStore(self._device.type, store)
                made = functools.partial(make, own, rank, size, timeout)
                groups[self._device.type] = first_used(made, self._device)

        wires = self._interruptibly(connect, timeout)
        channel = TorchChannel(name, groups, self, timeout, wires)
        self._channels.append(channel)
        return channel

    def _interruptibly(self, connect: Callable[[], None], timeout: float) -> Wires:
        """Connect in a thread of its own, `dsgd-connect`: the alarm ends this rank's waiting."""
        woken = threading.Event()
        done: Future[Wires] = Future()
        done.add_done_callback(lambda _: woken.set())

        def run() -> None:
            before = open_sockets()
            try:
                connect()
                done.set_result(Wires(open_sockets() - before))
            except Exception as error:
                done.set_exception(error)

        threading.Thread(target=run, name="dsgd-connect", daemon=True).start()
        self.alarm.listen(woken.set)
        woken.wait(timeout + _GRACE)
        self.alarm.forget(woken.set)
        if not done.done():
            self.alarm.check()
            raise RoundTimeoutError(f"rank {self.rank}: cannot connect within {timeout:g} s")
        return done.result()

    def _gloo(self, store: dist.Store, rank: int, size: int, timeout: float) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # its options carry no types
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = self._gloo_devices
        return gloo(store, rank, size, options)

    def close(self) -> None:
        """Close all channels."""
        for channel in self._channels:
            channel.close()

    def abandon(self) -> None:
        """Cut all connections: what is under way ends at once, here and on the others."""
        groups = [group for channel in self._channels for group in channel.cut()]
        _abandoned.extend(groups)  # an abort may not return, and a destructor would wait for it
        _within_grace([self._meeting.withdraw, *(group.abort for group in groups)])


def _within_grace(acts: Iterable[Callable[[], object]]) -> None:
    """All at a time, each in a thread `dsgd-abandon`; what takes longer is left to itself."""

    def run(act: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):
            act()

    threads = [
        threading.Thread(target=run, args=(act,), name="dsgd-abandon", daemon=True) for act in acts
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _GRACE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


class TorchChannel(Channel):
    """Process groups, one per type of device, whose waits can be interrupted."""

    def __init__(
        self,
        name: str,
        groups: dict[str, Any],
        backend: TorchBackend,
        timeout: float,
        wires: Wires,
    ) -> None:
        super().__init__(
            name, backend.rank, backend.world_size, backend.alarm, timeout, backend.seal
        )
        self.groups = groups
        self.busy = False
        """An operation has been started and has not ended."""
        self._wires = wires
        self._pending: Any = None

    def close(self) -> None:
        """End the groups' threads; not in an operation."""
        if not self.busy:
            groups, self.groups = self.groups, {}
            for group in _on_devices(groups):
                end = (
                    getattr(group, "shutdown", None) or group._shutdown
                )  # its name up to torch 2.6
                end()

    def cut(self) -> list[Any]:
        """End the operation under way, if any, by its connections, and then the groups.

        Those of a device are given back: they are to be aborted.
        """
        self._wires.cut()
        pending = self._pending
        if pending is not None:
            with contextlib.suppress(RuntimeError):  # as it should
                pending.wait(timedelta(seconds=_GRACE))
            self.busy = not pending.is_completed()
        if self.busy:
            _abandoned.append((self.groups, pending))
        groups, self.groups, self._pending = self.groups, {}, None
        return _on_devices(groups)

    def reaches(self, device: torch.device) -> bool:
        return device.type in self.groups

    def _sum(self, tensor: Tensor) -> None:
        self._finish(tensor, lambda group: group.allreduce([tensor]))

    def _broadcast(self, data: Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._finish(data, lambda group: group.broadcast([data], options))

    def _gather(self, data: Tensor) -> Tensor:
        out = data.new_empty((self.world_size, *data.shape))
        self._finish(data, lambda group: group.allgather([list(out.unbind(0))], [data]))
        return out

    def _finish(self, tensor: Tensor, start: Callable[[Any], Any]) -> None:
        self.alarm.check()
        group = self.groups[tensor.device.type]
        with self._naming_culprits():
            if tensor.device.type == "cpu":
                with FORKS.apart():
                    self._wait(start(group))
            else:
                self.busy = True
                start(group).wait()  # the thread's current stream waits, the host goes on

    def wait_for(self, mark: Mark) -> None:
        """An operation on a device that fails does not end; the alarm says why."""
        super().wait_for(mark)
        self.busy = False

    @contextlib.contextmanager
    def _naming_culprits(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if error is self.alarm.error:
                raise
            raise self.broken(error) from error

    def _wait(self, work: Any) -> None:
        """Sleep until the operation ends, as the group itself wakes us, or the alarm rings.

        A callback would run on the group's own thread, at a time that is not ours: see `forks`.
        """
        self.busy, self._pending = True, work
        deadline = time.monotonic() + self.timeout
        while not work.is_completed():
            if self.alarm.error is not None or time.monotonic() > deadline:
                self.alarm.ring(self.late())  # unless it has rung
                self.alarm.check()
            with contextlib.suppress(RuntimeError):  # not yet; or it has failed, and is completed
                work.wait(_NAP)
        self.busy, self._pending = False, None
        work.wait()  # raises what went wrong


def _on_devices(groups: dict[str, Any]) -> list[Any]:
    return [group for kind, group in groups.items() if kind != "cpu"]


def _store(address: str, port: int, rank: int, world_size: int, patience: float) -> dist.Store:
    """The launcher's store under torchrun; otherwise one that rank 0 opens."""
    if port == 0:
        raise ConfigurationError(
            "MASTER_PORT=0 is no port to meet at; give torchrun --standalone or a --master-port"
        )
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            address,
            port,
            world_size,
            is_master=rank == 0 and not hosted,
            timeout=timedelta(seconds=patience),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        reason = str(error).partition("\n")[0]
        raise RunError(
            f"rank {rank}: ranks cannot meet at {address}:{port}, which MASTER_ADDR and "
            f"MASTER_PORT or the launcher chose: {reason}"
        ) from None
    if rank == 0 and not hosted:
        _hosted.setdefault((address, port), store)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt-{attempt}", store)


@functools.cache
def _device(address: str) -> Any:
    """Gloo's sockets there; without an address it looks up the host's name, wherever that leads.

    One serves all groups of a process: its thread looks around a hundred times a second.
    """
    gloo: Any = dist.ProcessGroupGloo
    return gloo.create_device(hostname=address) if address else gloo.create_default_device()


def _chosen_devices() -> list[Any]:
    """One per interface that the user names. torch heeds the variable only where it makes the
    group's options itself; its default device does not."""
    names = (name.strip() for name in os.environ.get(_INTERFACES, "").split(","))
    return [_device_on(name) for name in names if name]


@functools.cache
def _device_on(interface: str) -> Any:
    """Gloo's sockets on that interface; a wrong name is refused before anything is sent."""
    gloo: Any = dist.ProcessGroupGloo
    try:
        return gloo.create_device(interface=interface)
    except RuntimeError as error:
        there = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigurationError(
            f"{_INTERFACES}={os.environ[_INTERFACES]}: this host has no interface '{interface}' "
            f"with an address; its interfaces are {there}"
        ) from error


@atexit.register
def _close_all() -> None:
    """While the interpreter still lives: a group's thread that outlives it aborts the process."""
    for backend in list(_backends):
        backend.close()


_held: list[TorchBackend] = []
"""What no garbage collector may destroy around a fork."""


def _hold() -> None:
    """A forked child, such as a DataLoader's worker, has the groups but not their threads: a group
    that its garbage collector destroyed would wait for them. It may run as soon as the child does,
    so they are held from before the fork."""
    _held.extend(_backends)


os.register_at_fork(before=_hold, after_in_parent=_held.clear)
