"""The device "lag": asynchronous as a GPU is, in pure Python, for machines that have none.

    import tests.lag as lag                    # registers the device type
    x = torch.ones(3, device="lag")            # queued; the host goes on
    with lag.stream(lag.Stream()): ...         # the interface of torch.cuda

This package is the device's module, `torch.get_device_module("lag")`. Each process has one device.
Every operator is queued on the current stream of the calling thread and runs on the stream's own
thread, on memory that the host does not see. What is missing, a wait for an event for instance,
shows as a wrong number, most of all when kernels are held back at random.

LAG_FUZZ=SEED    hold kernels back at random; the same as `fuzz(seed)`
LAG_POISON=1     fill memory that is freed; the same as `poison(True)`
LAG=1            tests.ranks.toy trains on this device
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.lag import autocast, groups, operators, patches, randomness
from tests.lag.memory import (
    max_memory_allocated,
    memory_allocated,
    poison,
    reset_peak_memory_stats,
)
from tests.lag.streams import (
    Event,
    KernelError,
    Stream,
    current_stream,
    default_stream,
    fuzz,
    host_wait_places,
    host_waits,
    is_in_bad_fork,
    set_stream,
    sleep,
    stream,
    synchronize,
)

__all__ = [
    "Event",
    "KernelError",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device_count",
    "empty_cache",
    "fuzz",
    "get_amp_supported_dtype",
    "get_rng_state",
    "host_wait_places",
    "host_waits",
    "is_available",
    "is_in_bad_fork",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "memory_allocated",
    "poison",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "set_stream",
    "sleep",
    "stream",
    "synchronize",
]


def _is_in_bad_fork() -> bool:
    return is_in_bad_fork()


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    """There is but one."""
    index = device if isinstance(device, int) else torch.device(device).index
    if index:
        raise RuntimeError(f"no such device: {device}")


def empty_cache() -> None:
    """Nothing is kept."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def manual_seed(seed: int) -> None:
    randomness.generator.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    return randomness.generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    randomness.generator.set_state(new_state)


def _register() -> tuple[torch.library.Library, torch.library.Library]:
    set_up: Any = torch.utils.backend_registration._setup_privateuseone_for_python_backend
    set_up("lag", backend_module=sys.modules[__name__])
    library = torch.library.Library("aten", "IMPL")
    fallback = torch.library.Library("_", "IMPL")
    operators.register(library, fallback)
    autocast.register(library, fallback)
    patches.apply()
    groups.register()
    return library, fallback


_LIBRARIES = _register()
"""Kernels are registered as long as these live."""
