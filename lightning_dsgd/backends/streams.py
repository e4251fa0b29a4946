"""Streams and events of an accelerator, for memory that the threads of a rank use in turn.

An accelerator does what a thread queues on a stream, in order, and later. So that nothing waits for
the training stream, with a slow backward in it, an exchange has a stream of its own, and one rule
holds for all that the two have in common:

    who hands something over marks the moment in its own stream; who takes it up has its own stream
    wait for that mark, and for nothing else.

No host waits for a device here: it looks, now and then, whether a mark has been reached. On a CPU
there are no streams, whatever was done is done, and all of this is empty.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dsgd.errors import ConfigurationError

Mark = Any
"""An event of the device's module, or None on a CPU."""

SHORTEST_LOOK = 1e-4
LONGEST_LOOK = 4e-4
"""Seconds between two looks at a device: what has happened is known half a millisecond later."""


class Streams:
    """One device, and the stream on it that is not the training's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = _module_of(device)
        self._own = None if self._module is None else self._module.Stream(device, priority=-1)

    def enter(self) -> None:
        """The calling thread works on this device; a new thread begins on the first one."""
        if self._module is not None:
            self._module.set_device(self.device)

    def own(self) -> contextlib.AbstractContextManager[Any]:
        """Within it, what the calling thread queues goes to the exchange's own stream."""
        if self._module is None:
            return contextlib.nullcontext()
        return self._module.stream(self._own)  # type: ignore[no-any-return]  # any device's

    def mark(self, timed: bool = False) -> Mark:
        """The present end of the calling thread's current stream."""
        if self._module is None:
            return None
        event = self._module.Event(enable_timing=timed)
        event.record(self._module.current_stream(self.device))
        return event

    def follow(self, mark: Mark) -> None:
        """What the calling thread queues from now on comes after the mark; the host goes on."""
        if mark is not None and self._module is not None:
            mark.wait(self._module.current_stream(self.device))

    def keep(self, tensor: Tensor) -> None:
        """Should its memory be freed: nobody gets it before the current stream is done with it."""
        if self._module is not None:
            tensor.record_stream(self._module.current_stream(self.device))

    def moment(self) -> Moment:
        """When the device comes to what is queued next."""
        return Moment(self.mark(timed=True))

    def reading(self, numbers: Tensor) -> Reading:
        """These numbers, for the host to look at when the device has computed them."""
        if self._module is None:
            return Reading(numbers, None)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        return Reading(host, self.mark(), kept=numbers)


def _module_of(device: torch.device) -> Any:
    if device.type == "cpu":
        return None
    try:
        module = torch.get_device_module(device)
        _ = module.Stream, module.Event, module.current_stream, module.set_device
    except (RuntimeError, AttributeError):
        raise ConfigurationError(
            f"devices of type '{device.type}' have no streams that ranks could exchange on beside "
            "the training; use accelerator='cpu', or 'cuda' where there is one"
        ) from None
    return module


def happened(mark: Mark) -> bool:
    """Has the device come there?"""
    return mark is None or bool(mark.query())


def look_until(mark: Mark, nap: Callable[[float], object]) -> bool:
    """Look until the device has come there; False if a nap says that there is no need any more."""
    began = time.monotonic()
    while not happened(mark):
        if nap(min(max((time.monotonic() - began) / 10, SHORTEST_LOOK), LONGEST_LOOK)):
            return False
    return True


class Moment:
    """A point in time: the device's where there is one, else the host's."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self.host = time.monotonic()

    def seconds_until(self, later: Moment) -> float:
        """Both must have happened."""
        if self.mark is None:
            return later.host - self.host
        return float(self.mark.elapsed_time(later.mark)) / 1000


class Reading:
    """Numbers under way from a device to the host."""

    def __init__(self, host: Tensor, mark: Mark, kept: Tensor | None = None) -> None:
        self.mark = mark
        self._host = host
        self._kept = kept
        """The device's memory, which nobody else is to get before it has been read."""

    def numbers(self) -> Sequence[Any]:
        """After the mark has been reached."""
        self._kept = None
        values = self._host.tolist()
        return values if isinstance(values, list) else [values]
