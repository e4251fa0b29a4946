"""Collectives of the device, as NCCL has them: queued on a stream of the group's own.

That stream first waits for the caller's current one. `work.wait()` has the caller's current stream
wait, and not the host. Underneath is Gloo, on the hidden tensors, by the loopback interface.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dsgd.backends.wires import Wires, open_sockets
from tests.lag.memory import hidden
from tests.lag.streams import Stream, current_stream

_GLANCE = timedelta(seconds=0.1)
"""Between two looks whether the group was aborted."""
_GRACE = timedelta(seconds=2)
"""For an operation that was cut off to notice."""


class AbortedError(RuntimeError):
    """The group was aborted before the operation ended."""


class LagWork(dist._Work):  # type: ignore[misc, name-defined]
    """One collective under way."""

    def __init__(self, tensors: Any, aborted: threading.Event) -> None:
        super().__init__()
        self._tensors = tensors
        self._aborted = aborted
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._ended = threading.Event()

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self._ended.set()
        if error is None:
            self._future.set_result([])
        else:
            self._future.set_exception(error)

    def _pass(self) -> None:
        """On a stream that waits for this; what went wrong never ends, until the group is aborted.

        So it is with NCCL, whose kernels spin when a peer is gone.
        """
        self._ended.wait()
        if self._error is not None:
            self._aborted.wait()

    def wait(self, timeout: timedelta | None = None) -> bool:
        current_stream().put(self._pass)
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def get_future(self) -> Any:
        return self._future

    def result(self) -> Any:
        return self._tensors


@functools.cache
def _loopback() -> Any:
    gloo: Any = dist.ProcessGroupGloo
    return gloo.create_device(hostname="127.0.0.1")


_Group: Any = dist.ProcessGroup


class LagGroup(_Group):  # type: ignore[misc]  # its methods have many more forms
    """Ranks that reduce and gather lag tensors."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout, options._devices = timeout, [_loopback()]
        before = open_sockets()
        self._gloo = gloo(store, rank, size, options)
        self._wires = Wires(open_sockets() - before)
        self._stream = Stream(priority=-1)
        self._aborted = threading.Event()

    def getBackendName(self) -> str:
        return "lagccl"

    def allreduce(self, tensors: Any, opts: Any = None) -> LagWork:
        given = _list(tensors)
        options = opts if isinstance(opts, dist.AllreduceOptions) else dist.AllreduceOptions()
        if isinstance(opts, dist.ReduceOp | dist.ReduceOp.RedOpType):
            options.reduceOp = opts
        data = [hidden(tensor) for tensor in given]
        return self._queue(given, lambda: self._gloo.allreduce(data, options))

    def broadcast(self, tensors: Any, opts: Any = None) -> LagWork:
        given = _list(tensors)
        options = dist.BroadcastOptions() if opts is None else opts
        if isinstance(options, int):
            options = dist.BroadcastOptions()
            options.rootRank = opts
        data = [hidden(tensor) for tensor in given]
        return self._queue(given, lambda: self._gloo.broadcast(data, options))

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None) -> LagWork:
        given = _list(tensors)
        lists = outputs if isinstance(outputs[0], list) else [outputs]
        into = [[hidden(tensor) for tensor in each] for each in lists]
        data = [hidden(tensor) for tensor in given]
        return self._queue((outputs, given), lambda: self._gloo.allgather(into, data))

    def barrier(self, opts: Any = None) -> LagWork:
        return self._queue([], lambda: self._gloo.barrier())

    def abort(self) -> None:
        """End what is under way; what comes later fails at once."""
        self._aborted.set()
        self._wires.cut()

    shutdown = abort

    def _queue(self, tensors: Any, start: Callable[[], Any]) -> LagWork:
        work = LagWork(tensors, self._aborted)
        self._stream.wait_stream(current_stream())
        self._stream.put(functools.partial(self._run, work, start))
        return work

    def _run(self, work: LagWork, start: Callable[[], Any]) -> None:
        try:
            if not self._aborted.is_set():
                self._finish(start())
        except Exception as error:
            work.end(AbortedError("the group was aborted") if self._aborted.is_set() else error)
        else:
            work.end(AbortedError("the group was aborted") if self._aborted.is_set() else None)

    def _finish(self, inner: Any) -> None:
        """Gloo's own thread wakes us; a callback of ours might come when Python is gone."""
        while not inner.is_completed() and not self._aborted.is_set():
            with contextlib.suppress(RuntimeError):  # not yet, or failed: then it is completed
                inner.wait(_GLANCE)
        inner.wait(_GRACE if self._aborted.is_set() else _GLANCE)


def _list(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def register() -> None:
    dist.Backend.register_backend("lagccl", LagGroup, devices=["lag"])
