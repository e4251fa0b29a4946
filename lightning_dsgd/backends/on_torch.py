"""Collectives on torch.distributed's process groups, built directly on a store.

The default group stays uninitialised: with it, Lightning would broadcast a flag from rank 0 on
every batch and so tie all ranks to rank 0's pace.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dsgd.alarm import Alarm
from lightning_dsgd.backends import Backend, Channel, Edge
from lightning_dsgd.errors import ConfigurationError, RoundTimeoutError, RunError
from lightning_dsgd.hosts import Place, reachable_address, this_place

_JOBS = itertools.count()
_MEETING_SECONDS = 60.0
"""A start takes its time, however short `timeout` is."""
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
        super().__init__(rank, world_size, alarm, timeout, edges)
        self._device = device
        patience = max(timeout, _MEETING_SECONDS)
        store = _store(address, port, rank, world_size, patience)
        self._store = dist.PrefixStore(f"lightning-dsgd/{next(_JOBS)}", store)
        self._address = _own_address(self._store, rank, world_size, address, patience)
        self._channels: list[TorchChannel] = []
        _backends.add(self)
        self._opened = 0

    def channel(self, name: str, patience: float = 1.0) -> Channel:
        self._opened += 1
        return self._open(name, self.rank, self.world_size, self.timeout * patience)

    def pairs(self) -> dict[int, Channel]:
        """A group of two per edge: the wait of a send or receive could not be interrupted."""
        self._opened += 1
        return {
            partner: self._open(f"pair {a} and {b}", (a, b).index(self.rank), 2, self.timeout * 2)
            for partner, (a, b) in self.partners()
        }

    def _open(self, name: str, rank: int, size: int, timeout: float) -> Channel:
        store = dist.PrefixStore(f"{name}-{self._opened}", self._store)
        groups: dict[str, Any] = {"cpu": self._gloo(store, rank, size, timeout)}
        if self._device.type == "cuda" and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout)
            cuda = dist.PrefixStore("cuda", store)
            groups["cuda"] = dist.ProcessGroupNCCL(cuda, rank, size, options)
        channel = TorchChannel(name, groups, self, timeout)
        self._channels.append(channel)
        return channel

    def _gloo(self, store: dist.Store, rank: int, size: int, timeout: float) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # its options carry no types
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = [_device("" if "GLOO_SOCKET_IFNAME" in os.environ else self._address)]
        return gloo(store, rank, size, options)

    def close(self) -> None:
        """Close all channels."""
        for channel in self._channels:
            channel.close()

    def abandon(self) -> None:
        _abandoned.extend(channel.groups for channel in self._channels)


class TorchChannel(Channel):
    """Process groups, one per type of device, whose waits can be interrupted."""

    def __init__(
        self, name: str, groups: dict[str, Any], backend: TorchBackend, timeout: float
    ) -> None:
        super().__init__(name, backend.rank, backend.world_size, backend.alarm, timeout)
        self.groups = groups
        self.busy = False
        """An operation has been started and has not ended."""
        self.stream = torch.cuda.Stream(backend._device) if "cuda" in groups else None

    def close(self) -> None:
        """End the groups' threads; not in an operation."""
        if not self.busy:
            self.groups = {}

    def sum_(self, tensor: Tensor) -> None:
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
        group = self.groups.get(tensor.device.type, self.groups["cpu"])
        try:
            if tensor.is_cuda:
                self._on_stream(group, start)
            else:
                self._wait(start(group))
        except RuntimeError as error:
            if error is self.alarm.error:
                raise
            raise self.broken(error) from error

    def _on_stream(self, group: Any, start: Callable[[Any], Any]) -> None:
        """What was queued for the tensor comes first; the result is there on return."""
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            start(group).wait()  # in the stream: the host goes on
        done = self.stream.record_event()
        self.busy = True
        self.poll(done.query)
        self.busy = False

    def _wait(self, work: Any) -> None:
        """Sleep until the operation ends or the alarm rings: the group's own thread wakes us."""
        woken, ended = threading.Event(), threading.Event()

        def end(_: object) -> None:
            ended.set()
            woken.set()

        work.get_future().add_done_callback(end)
        self.alarm.listen(woken.set)
        self.busy = True
        woken.wait(self.timeout)
        self.alarm.forget(woken.set)
        if ended.is_set():
            self.busy = False
            work.wait()  # done in a moment, if not already: raises what went wrong
            return
        _abandoned.append(work)
        self.alarm.check()
        self.alarm.ring(self.late())
        self.alarm.check()


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


def _own_address(
    store: dist.Store, rank: int, world_size: int, meeting_point: str, patience: float
) -> str:
    """By which the others reach this host; a collective of its own, before there is any group."""
    own = this_place(meeting_point)
    keys = [f"place-{other}" for other in range(world_size)]
    store.set(keys[rank], json.dumps(own))
    try:
        found = store.multi_get(keys)
    except dist.DistStoreError:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        raise RoundTimeoutError(
            f"rank {rank} has waited {patience:g} s for rank {', '.join(missing)} to start"
        ) from None
    return reachable_address(own, [Place(*json.loads(place)) for place in found])


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
