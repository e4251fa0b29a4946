"""Where torch asks its C++ half and Python has no say: the device is patched in.

Storages are made by C++ allocators, pinned memory too; and the autograd engine knows of streams
only what C++ tells it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from tests.lag import memory, streams
from tests.lag.streams import Stream

# ---------------------------------------------------------------- backward


class _Backwards:
    """Which stream the autograd engine's thread works on: that of who called `backward`.

    CUDA takes each forward operation's own stream and lets the caller's wait for it in the end;
    here all goes to the caller's. The engine tells its thread only the number of the task.
    """

    def __init__(self) -> None:
        self._calls: dict[int, Stream] = {}
        self._tasks: dict[int, int] = {}
        self._errors: dict[int, Exception] = {}
        self._numbers = itertools.count()

    def _call(self) -> int | None:
        """Which call of `backward` this thread of the engine works for; None in other threads."""
        task = torch._C._current_graph_task_id()
        if task == -1 or not self._calls:
            return None
        if task not in self._tasks:
            free = [call for call in self._calls if call not in self._tasks.values()]
            self._tasks[task] = (free or list(self._calls))[0]
        return self._tasks[task]

    def stream(self) -> Stream | None:
        call = self._call()
        return _NOWHERE if call in self._errors else self._calls.get(call)  # type: ignore[arg-type, return-value]  # as a stream

    def hook(self, hook: Any, *args: Any) -> Any:
        """A hook that raises ends the backward, as on other devices.

        Through C++ its error would end the process: torch's way back from it calls Python, with the
        error still pending. So the error waits here, no kernel and no hook comes after it, and
        whoever called `backward` gets it.
        """
        call = self._call()
        if call is None:
            return hook(*args)
        if call not in self._errors:
            try:
                return hook(*args)
            except Exception as error:
                self._errors[call] = error
        return None

    def run(self, engine: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(out, Tensor) and memory.is_lag(out) for out in outputs):
            return engine(outputs, *args, **kwargs)
        call = next(self._numbers)
        self._calls[call] = streams.current_stream()
        try:
            found = engine(outputs, *args, **kwargs)
            if call in self._errors:
                raise self._errors[call]
            return found
        finally:
            del self._calls[call]
            self._errors.pop(call, None)
            self._tasks = {t: c for t, c in self._tasks.items() if c != call}


class _Nowhere:
    """What is queued here never runs."""

    def put(self, kernel: Any) -> None:
        return

    def synchronize(self) -> None:
        return


_NOWHERE = _Nowhere()


def _register(backwards: _Backwards, plain: Any, tensor: Tensor, hook: Any) -> Any:
    return plain(tensor, functools.partial(backwards.hook, hook))


# ---------------------------------------------------------------- storages


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _clone(plain: Any, storage: Any) -> Any:
    if storage.device.type != "lag":
        return plain(storage)
    return _bytes(storage).clone().untyped_storage()


def _to(plain: Any, storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
    if torch.device(device).type != "lag":
        return plain(storage, device=device, non_blocking=non_blocking)
    return _bytes(storage).to(device).untyped_storage()


# ---------------------------------------------------------------- modules


def _apply(plain: Any, module: Any, fn: Any, recurse: bool = True) -> Any:
    """A parameter that moves to another device stays the same object, as between CPU and CUDA.

    torch lets parameters of its own devices take other data; one that goes to or from this device
    it replaces. Here the two then change places, if nothing else holds on to their insides.
    """
    before = dict(module._parameters)
    plain(module, fn, recurse)
    for name, old in before.items():
        new = module._parameters[name]
        if new is not old and old is not None and "lag" in (old.device.type, new.device.type):
            with contextlib.suppress(RuntimeError):
                torch._C._swap_tensor_impl(old, new)
                module._parameters[name] = old
    return module


# ---------------------------------------------------------------- pinned memory

_MAKERS = ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like")


def _make(plain: Any, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
    new: Tensor = plain(*args, **kwargs)
    return new.pin_memory() if pin_memory else new


def _move(plain: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to` forgets `non_blocking` on the way where C++ knows of no pinned memory."""
    new: Tensor = plain(tensor, *args, **kwargs)
    if kwargs.get("non_blocking") and memory.is_lag(new) and not memory.is_lag(tensor):
        new.detach().copy_(tensor.detach(), non_blocking=True)
    return new


def _around(function: Any, plain: Any) -> Any:
    """`function` with what it replaces as its first argument."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(plain, *args, **kwargs)

    return call


def apply() -> None:
    backwards = _Backwards()
    streams.backward_stream = backwards.stream
    engine: Any = torch.autograd.graph._engine_run_backward
    run = _around(backwards.run, engine)
    torch.autograd.graph._engine_run_backward = run
    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        register = functools.partial(_register, backwards)
        setattr(torch.Tensor, name, _around(register, getattr(torch.Tensor, name)))
    base: Any = torch.storage._StorageBase
    base.clone = _around(_clone, base.clone)
    base.to = _around(_to, base.to)
    torch.nn.Module._apply = _around(_apply, torch.nn.Module._apply)  # type: ignore[method-assign]
    torch.Tensor.to = _around(_move, torch.Tensor.to)  # type: ignore[method-assign]
    for name in _MAKERS:
        setattr(torch, name, _around(_make, getattr(torch, name)))
