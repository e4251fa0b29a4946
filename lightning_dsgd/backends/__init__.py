"""Collectives, behind one small interface, with two implementations.

A *backend* is one job's membership: rank, size, and how to open channels. A *channel* carries the
collectives of one thread; every rank opens the same channels in the same order and issues the same
operations on each. So the communication thread and the training thread never get in each other's
way.

Every wait ends: when the operation is done, when the alarm rings, or after `timeout`.
Nothing outside this package imports horovod.
"""

from __future__ import annotations

import abc
import contextlib
import importlib.util
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import torch
from torch import Tensor

from lightning_dsgd.backends.seal import Seal, this_seal
from lightning_dsgd.backends.streams import LONGEST_LOOK, Mark, happened
from lightning_dsgd.control.alarm import Alarm
from lightning_dsgd.errors import BackendError, RoundTimeoutError, RunError

BackendName = Literal["auto", "horovod", "torch"]
Data = TypeVar("Data")
Edge = tuple[int, int]
"""Two ranks that exchange on their own, the lower one first."""

_SHORTEST_SLEEP = 1e-4
LONGEST_SLEEP = 5e-3
_SLEEP_SHARE = 0.1
"""A wait sleeps a tenth of the time it has lasted: late by 10 %, and next to no wake-ups."""

MEETING_SECONDS = 60.0
"""So long, at least, a rank waits for the others to start."""

_NAMING_PATIENCE = 8.0
"""Seconds to wait for the control plane to name the culprit of a broken collective."""


class Channel(abc.ABC):
    """Collectives for one thread. All of them work in place on contiguous tensors.

    On the host's memory they block until they are done. On a device's they are queued on the
    thread's current stream: what it queues afterwards comes after them, and `wait_for` waits for
    them. Memory of a device that the channel cannot reach goes through the host's.
    """

    def __init__(
        self, name: str, rank: int, world_size: int, alarm: Alarm, timeout: float, seal: Seal
    ) -> None:
        self.name = name
        self._seal = seal
        self.rank = rank
        self.world_size = world_size
        self.alarm = alarm
        self.timeout = timeout

    @abc.abstractmethod
    def reaches(self, device: torch.device) -> bool:
        """Are there collectives for this device's memory?"""

    @abc.abstractmethod
    def _sum(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over all ranks."""

    @abc.abstractmethod
    def _broadcast(self, data: Tensor, root: int) -> None:
        """Replace these bytes by the root's."""

    @abc.abstractmethod
    def _gather(self, data: Tensor) -> Tensor:
        """All ranks' bytes, a row each."""

    def sum_(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over all ranks."""
        with self._reachable(tensor) as memory:
            self._sum(memory)

    def broadcast_(self, tensor: Tensor, root: int) -> None:
        """Replace the tensor by the root's, whatever its type."""
        if tensor.numel():
            with self._reachable(tensor) as memory:
                self._broadcast(_bytes_of(memory), root)

    def gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors of one shape and any type, stacked along a new first dimension.

        They are on this rank's device, wherever they come from.
        """
        if not tensor.numel():
            return tensor.new_empty((self.world_size, *tensor.shape))
        memory = tensor if self.reaches(tensor.device) else tensor.cpu()
        rows = self._gather(_bytes_of(memory)).to(tensor.device)
        return rows.view(tensor.dtype).reshape(self.world_size, *tensor.shape)

    @contextlib.contextmanager
    def _reachable(self, tensor: Tensor) -> Iterator[Tensor]:
        """The tensor itself, or a copy in the host's memory that is written back."""
        if self.reaches(tensor.device):
            yield tensor
        else:
            copy = tensor.cpu()
            yield copy
            tensor.copy_(copy)

    def wait_for(self, mark: Mark) -> None:
        """Until a device has done what was queued before the mark; looks at it now and then."""
        self.poll(lambda: happened(mark), longest=LONGEST_LOOK)

    def close(self) -> None:
        """No rank will use it again: give back what it holds."""
        return

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sum_(torch.zeros(1))

    # ----------------------------------------------------------- more than one tensor

    def broadcast_bytes(self, payload: bytes, root: int = 0) -> bytes:
        """The root's bytes; what the others give does not matter."""
        data = _tensor_of(self._seal.close(payload) if self.rank == root else b"")
        size = torch.tensor([data.numel()])
        self.broadcast_(size, root)
        data = data if self.rank == root else torch.zeros(int(size), dtype=torch.uint8)
        self.broadcast_(data, root)
        return payload if self.rank == root else self._seal.open(data.numpy().tobytes())

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order."""
        data = _tensor_of(self._seal.close(payload))
        sizes = self.gather(torch.tensor([data.numel()])).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = self.gather(padded).numpy()
        return [
            self._seal.open(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)
        ]

    def gather_data(self, value: Data, kind: Any) -> list[Data]:
        """Every rank's plain data of that type, in rank order."""
        decode = msgspec.msgpack.Decoder(kind).decode
        return [decode(data) for data in self.gather_bytes(msgspec.msgpack.encode(value))]

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, of whatever shape and type, on this rank's device."""
        header = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        plain = tensor.detach().cpu().contiguous()
        data = _bytes_of(plain).numpy().tobytes() if tensor.numel() else b""
        packed = msgspec.msgpack.encode((header, data))
        return [_unpacked(row).to(tensor.device) for row in self.gather_bytes(packed)]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Any picklable object of the root, on all ranks; for what Lightning itself hands over."""
        data = self.broadcast_bytes(pickle.dumps(value) if self.rank == root else b"", root)
        return value if self.rank == root else pickle.loads(data)

    def poll(self, done: Callable[[], bool], longest: float = LONGEST_SLEEP) -> None:
        """Look now and then until it is done, the alarm rings, or time is up."""
        start = time.monotonic()
        while not done():
            self.alarm.check()
            waited = time.monotonic() - start
            if waited > self.timeout:
                self.alarm.ring(self.late())
            time.sleep(min(max(waited * _SLEEP_SHARE, _SHORTEST_SLEEP), longest))

    def late(self) -> RunError:
        """The error of an operation that did not end in time."""
        return RoundTimeoutError(
            f"rank {self.rank}: not every rank joined the collective '{self.name}' within "
            f"{self.timeout:g} s; raise `timeout` if a rank may really take that long"
        )

    def broken(self, error: Exception) -> RunError:
        """The error of an operation that failed; names the culprit if the control plane knows."""
        if self.alarm.wait(_NAMING_PATIENCE) and self.alarm.error is not None:
            return self.alarm.error
        return RunError(f"rank {self.rank}: the collective '{self.name}' failed: {error}")


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0).byte()


_Packed = tuple[tuple[str, tuple[int, ...]], bytes]
_decode_packed = msgspec.msgpack.Decoder(_Packed).decode


def _unpacked(row: bytes) -> Tensor:
    (dtype, shape), data = _decode_packed(row)
    if not data:
        return torch.zeros(shape, dtype=getattr(torch, dtype))
    return _tensor_of(data).view(getattr(torch, dtype)).reshape(shape)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The same memory: no library can send every type that torch knows."""
    return tensor.reshape(-1).view(torch.uint8)


class Backend(abc.ABC):
    """A job's membership."""

    name: str

    def __init__(
        self, rank: int, world_size: int, alarm: Alarm, timeout: float, edges: Sequence[Edge] = ()
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.alarm = alarm
        self.timeout = timeout
        self.edges = sorted(edges)
        self.seal = this_seal()

    def partners(self) -> list[tuple[int, Edge]]:
        """This rank's edges, in the order that is the same everywhere, with who is at the end."""
        return [(sum(edge) - self.rank, edge) for edge in self.edges if self.rank in edge]

    @abc.abstractmethod
    def introduce(self, card: bytes) -> list[bytes]:
        """All ranks' cards, in rank order: a collective for which no channel is needed yet."""

    @abc.abstractmethod
    def channel(self, name: str, patience: float = 1.0, on_device: bool = False) -> Channel:
        """Open a channel; a collective operation itself. It waits `patience` times `timeout`.

        Only an exchange's channel is `on_device`: what a device's libraries do on two of theirs at
        a time must come in the same order on all ranks, and nobody could promise that.
        """

    @abc.abstractmethod
    def pairs(self) -> dict[int, Channel]:
        """Open a channel of two per edge of this rank, by partner; only `sum_` is for use.

        They wait twice `timeout`, so that the control plane can say first who is missing.
        """

    def give_word(self, error: BaseException) -> None:
        """Tell who waits for this rank's card, if there is a way, that it will not come."""
        return

    @abc.abstractmethod
    def abandon(self) -> None:
        """Leave without the others, after a failure, so that they notice at once."""


def horovod_launched() -> bool:
    """Was this process started by horovodrun?"""
    return "HOROVOD_RANK" in os.environ and "HOROVOD_SIZE" in os.environ


def horovod_installed() -> bool:
    """Is there a Horovod to import? (It is not imported for the answer.)"""
    return importlib.util.find_spec("horovod") is not None


def choose_backend(name: BackendName) -> Literal["horovod", "torch"]:
    """The backend to use; 'auto' goes by how the process was launched."""
    if name not in ("auto", "horovod", "torch"):
        raise BackendError(f"backend={name!r} is unknown; choose 'auto', 'horovod' or 'torch'")
    if name == "horovod" and not horovod_installed():
        raise BackendError(
            "backend='horovod', but Horovod is not installed; run "
            "`lightning-dsgd install-horovod`, or use backend='torch'"
        )
    if name == "horovod" and not horovod_launched():
        raise BackendError(
            "backend='horovod', but this process was not started by horovodrun; launch with "
            "`horovodrun -np N python train.py`, or use backend='torch'"
        )
    if name == "auto":
        return "horovod" if horovod_launched() and horovod_installed() else "torch"
    return name


def connect(
    name: Literal["horovod", "torch"],
    *,
    rank: int,
    world_size: int,
    address: str,
    port: int,
    device: torch.device,
    alarm: Alarm,
    timeout: float,
    edges: Sequence[Edge] = (),
) -> Backend:
    """Join the job with the backend of that name."""
    if name == "horovod":
        from lightning_dsgd.backends.on_horovod import HorovodBackend

        return HorovodBackend(rank, world_size, alarm, timeout, edges)
    from lightning_dsgd.backends.on_torch import TorchBackend

    return TorchBackend(rank, world_size, address, port, device, alarm, timeout, edges)
