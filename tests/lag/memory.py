"""Device memory: storages that only the streams' threads may look into.

A lag tensor is an ordinary tensor on PrivateUse1. Its storage begins at an address that this module
owns; the same bytes are a *hidden* CPU storage, which kernels work on. A kernel holds the hidden
storage and not the tensor, as on CUDA: it does not keep the tensor's memory for the tensor.

With LAG_POISON=1 memory is filled with ones (NaN, for floats) when it is taken, and again when its
last tensor dies: in the order of the stream that it was taken on, which is where CUDA would give it
to the next one. Another stream that still reads it reads that, unless `record_stream` named it.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.lag.streams import Stream, current_stream

DEVICE = torch.device("privateuseone", 0)
_CPU = torch._C.DispatchKey.CPU
_SET = torch.ops.aten.set_.source_Storage_storage_offset

poisoned = os.environ.get("LAG_POISON") == "1"


def poison(on: bool) -> None:
    """Fill memory that is taken or freed from now on, or leave it."""
    global poisoned
    poisoned = on


class _Block:
    """The memory of one storage."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.hidden = torch.UntypedStorage(max(nbytes, 1))
        self.stream = current_stream() if poisoned else None
        self.users: list[Stream] = []

    def fill(self) -> None:
        torch.empty(0, dtype=torch.uint8).set_(self.hidden).fill_(255)


_blocks: dict[int, _Block] = {}
_lock = threading.RLock()  # a block may die, by garbage collection, where another is taken
_live, _peak = 0, 0


def _take(nbytes: int) -> torch.UntypedStorage:
    global _live, _peak
    block = _Block(nbytes)
    if block.stream is not None:
        block.stream.put(block.fill)
    address = block.hidden.data_ptr()
    storage = torch._C._construct_storage_from_data_pointer(address, DEVICE, nbytes)
    with _lock:
        _blocks[address] = block
        _live += nbytes
        _peak = max(_peak, _live)
    weakref.finalize(storage, _free, address).atexit = False
    return storage


def _free(address: int) -> None:
    global _live
    with _lock:
        block = _blocks.pop(address)
        _live -= block.nbytes
    if block.stream is not None:
        for user in block.users:
            block.stream.wait_stream(user)
        block.stream.put(block.fill)


def record_stream(tensor: Tensor, stream: Stream) -> None:
    """Its memory is not for others before this stream has done what it has to do by then."""
    _blocks[tensor.untyped_storage().data_ptr()].users.append(stream)


def is_lag(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "lag"


def place(
    storage: torch.UntypedStorage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """A lag tensor over this storage."""
    bare = torch._C._acc.create_empty_tensor([0], dtype)
    _SET._op_dk(_CPU, bare, storage, offset, list(size), list(stride))
    return bare


def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A lag tensor over fresh memory."""
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    nbytes = 0 if 0 in size else extent * dtype.itemsize
    return place(_take(nbytes), 0, size, stride, dtype)


def hidden(tensor: Tensor) -> Tensor:
    """The CPU tensor behind a lag tensor: for kernels, nobody else."""
    storage = _blocks[tensor.untyped_storage().data_ptr()].hidden
    bare = torch.empty(0, dtype=tensor.dtype)
    return bare.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def resize(tensor: Tensor, size: Sequence[int]) -> None:
    """Another size, contiguous; with memory of its own if it does not fit where it is."""
    stride = torch.empty(size, device="meta").stride()
    old, storage = hidden(tensor), tensor.untyped_storage()
    needed = (tensor.storage_offset() + size_of(size)) * tensor.element_size()
    if needed > storage.nbytes():
        storage = _take(needed)
        new = torch.empty(0, dtype=torch.uint8).set_(_blocks[storage.data_ptr()].hidden)
        bytes_before = torch.empty(0, dtype=torch.uint8).set_(old.untyped_storage())
        kept = min(tensor.untyped_storage().nbytes(), needed)
        current_stream().put(functools.partial(new[:kept].copy_, bytes_before[:kept]))
    _SET._op_dk(_CPU, tensor, storage, tensor.storage_offset(), list(size), list(stride))


def size_of(size: Sequence[int]) -> int:
    return functools.reduce(lambda a, b: a * b, size, 1)


def memory_allocated(device: object = None) -> int:
    """Bytes of all storages that live, each counted once however many views it has."""
    return _live


def max_memory_allocated(device: object = None) -> int:
    return _peak


def reset_peak_memory_stats(device: object = None) -> None:
    global _peak
    _peak = _live


# ---------------------------------------------------------------- pinned memory of the host

_pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def pin(tensor: Tensor) -> Tensor:
    """A copy whose transfers need no copy on the host: what is in it when they run is sent."""
    copy = tensor.clone()
    _pinned.add(copy.untyped_storage())
    return copy


def is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage() in _pinned
