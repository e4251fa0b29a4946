"""Random numbers of the device.

They come from one generator, which `torch.manual_seed` seeds as it seeds that of the CPU. Where the
parameters are numbers (dropout, `randn`, initialisation) they are drawn when the host calls, in the
order of its calls, whatever the streams do, as CUDA's counters are; and they are the numbers that
the CPU would have drawn from the same state. So a program gives the same results on both, bit for
bit, if all its random numbers since the seed are drawn on the device: what the host draws in
between, to shuffle data for instance, comes from the CPU's generator here and moves it there.

Where they depend on data (`multinomial`, `bernoulli` of a tensor) the stream draws them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tests.lag import memory
from tests.lag.memory import hidden
from tests.lag.streams import current_stream

aten = torch.ops.aten

generator = torch.Generator()
"""The device's own."""


def with_generator(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call with the device's generator instead of none."""
    if kwargs.get("generator") is not None:
        raise RuntimeError("a generator for lag tensors must be of lag, which has but its own")
    names = [a.name for a in func._schema.arguments if a.kwarg_only]
    return {**kwargs, "generator": generator} if "generator" in names else kwargs


def _draw(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Drawn now, copied when the stream comes to it."""
    target = hidden(tensor)
    drawn = torch.empty_like(target)
    func(drawn, *args, **with_generator(func, args, kwargs))
    current_stream().put(functools.partial(target.copy_, drawn))
    return tensor


def _randperm(n: int, *, generator: Any = None, out: Tensor) -> Tensor:
    kwargs = with_generator(aten.randperm.generator_out, (n,), {"generator": generator})
    drawn = torch.randperm(n, dtype=out.dtype, **kwargs)
    memory.resize(out, [n])
    current_stream().put(functools.partial(hidden(out).copy_, drawn))
    return out


def dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    """As torch does it on the CPU; the fused one would round otherwise."""
    if p == 0 or not train or tensor.numel() == 0:
        return tensor
    if p == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype)
    noise = torch.empty_like(tensor, requires_grad=False).bernoulli_(1 - p).div_(1 - p)
    return tensor * noise


_FILLS = (
    "bernoulli_.float",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "random_.from",
    "random_.to",
    "uniform_",
)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


KERNELS: dict[str, Any] = {
    **{name: functools.partial(_draw, _overload(name)) for name in _FILLS},
    "randperm.generator_out": _randperm,
}
