"""torch's collectives on an accelerator's own memory: NCCL, or what a device's package registers.

A device without any is served through the host's memory, by Gloo.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_dsgd.backends.streams import Streams, look_until

Make = Callable[[dist.Store, int, int, float], Any]

_LONG = 10
"""A library's own time limit is so many times ours: we know the culprit's name, it does not."""
_QUIET = (
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"),
    "TORCH_NCCL_BLOCKING_WAIT",
)
"""Otherwise its watchdog ends the process when a peer is gone, before our error is there, and the
host waits where no alarm is heard. torchrun sets the first one for its workers, so it is no choice
of the user's."""


def maker_for(device: torch.device) -> Make | None:
    """What makes a group for that device's memory; None where only the host's can be sent."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return _nccl if dist.is_nccl_available() else None
    name = dist.Backend.default_device_backend_map.get(device.type, "")
    plugin: Any = dist.Backend._plugins.get(name.upper())
    if plugin is None or plugin.extended_api:
        return None
    create = plugin.creator_fn
    return lambda store, rank, size, limit: create(store, rank, size, _limit(limit))


def _limit(seconds: float) -> timedelta:
    return timedelta(seconds=seconds * _LONG)


def _nccl(store: dist.Store, rank: int, size: int, limit: float) -> Any:
    os.environ.update(dict.fromkeys(_QUIET, "0"))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _limit(limit)
    options.is_high_priority_stream = True
    return dist.ProcessGroupNCCL(store, rank, size, options)


def first_used(make: Callable[[], Any], device: torch.device) -> Any:
    """A group that has met its ranks: libraries leave that to the first operation.

    Runs in the thread `dsgd-connect`, whose waiting the alarm ends.
    """
    streams = Streams(device)
    streams.enter()
    with streams.own():
        group = make()
        group.allreduce([torch.zeros(1, device=device)]).wait()
        met = streams.mark()
    look_until(met, time.sleep)
    return group
