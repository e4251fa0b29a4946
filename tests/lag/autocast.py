"""`torch.autocast("lag")`: the operators that count for speed in the lower precision.

The lists are CUDA's as far as the tests' models come; all other operators take what they are given.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_KEY = "AutocastPrivateUse1"
_LOWER = ("addmm", "baddbmm", "bmm", "conv1d", "conv2d", "linear", "matmul", "mm")
_FLOAT32 = (
    "binary_cross_entropy_with_logits",
    "cross_entropy_loss",
    "layer_norm",
    "log_softmax.int",
    "mse_loss",
    "nll_loss",
    "softmax.int",
    "sum",
)
_excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    castable = isinstance(value, Tensor) and value.device.type == "lag"
    if castable and value.is_floating_point() and value.dtype is not torch.float64:
        return value.to(dtype)
    return value


def _run(func: Any, fixed: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
    dtype = fixed or torch.get_autocast_dtype("lag")
    with torch._C._ExcludeDispatchKeyGuard(_excluded):
        given = pytree.tree_map(functools.partial(_cast, dtype=dtype), (args, kwargs))
        return func(*given[0], **given[1])


def register(library: torch.library.Library, fallback: torch.library.Library) -> None:
    fallback.fallback(torch.library.fallthrough_kernel, _KEY)
    for names, dtype in ((_LOWER, None), (_FLOAT32, torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            func = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, functools.partial(_run, func, dtype), _KEY)
