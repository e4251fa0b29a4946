"""Operators on lag tensors: each is queued on the current stream and runs on hidden CPU tensors.

What the host must know at once, it computes without data: sizes and dtypes, on meta tensors. Where
these depend on the data (`nonzero`, an index of booleans) or the result is a number, the host waits
for the stream, runs the operator itself and goes on; so it does where torch has no meta kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.lag import memory, randomness
from tests.lag.memory import DEVICE, allocate, hidden, is_lag
from tests.lag.streams import current_stream, stream_of

aten = torch.ops.aten

_TAKES_HOST_TENSORS = ("aten::index", "aten::_index_put_impl_", "aten::_unsafe_index")
"""As on CUDA: indices may be on the host."""
_MOST_SHAPES = 20_000
_shapes: dict[Any, Any] = {}


# ---------------------------------------------------------------- arguments


@functools.cache
def _tensor_positions(func: Any) -> tuple[int, ...]:
    """Where it wants a tensor, and does not take the number that torch would make one of."""
    name = func.name().split("::")[1].split(".")[0]
    if torch._C._should_allow_numbers_as_tensors(name):
        return ()
    arguments = enumerate(func._schema.arguments)
    return tuple(i for i, a in arguments if str(a.type) == "Tensor" and not a.kwarg_only)


def _with_tensors(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Python's numbers, which do not decide the dtype, as tensors of the dtype that results."""
    given = list(args)
    for i in _tensor_positions(func):
        if i < len(given) and isinstance(given[i], int | float | complex):
            other = next(value for value in args if isinstance(value, Tensor))
            given[i] = torch.tensor(given[i], dtype=torch.result_type(other, given[i]))
    return tuple(given)


def _for_kernel(func: Any, value: Any) -> Any:
    """What a kernel gets: memory of the device, and what the host has as it is now."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "lag" else value
    if not isinstance(value, Tensor):
        return value
    if is_lag(value):
        return hidden(value)
    if value.dim() and not func.name().startswith(_TAKES_HOST_TENSORS):
        raise RuntimeError(
            f"{func.name()}: expected all tensors to be on the same device, but found at least "
            f"two devices, {value.device} and lag"
        )
    return value.clone()


def _for_kernels(func: Any, values: list[Any]) -> list[Any]:
    """The same tensor twice is the same one in the kernel, too: some look whether it is."""
    found = {id(value): _for_kernel(func, value) for value in values}
    return [found[id(value)] for value in values]


def _for_shape(value: Any) -> Any:
    """The same without data."""
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, torch.Generator):
        return None
    if isinstance(value, Tensor) and (is_lag(value) or value.dim()):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return value


def _signature(value: Any) -> Any:
    """What of an argument decides the result's shape."""
    if isinstance(value, Tensor):
        return value.dtype, value.size(), value.stride(), is_lag(value)
    return type(value), value


# ---------------------------------------------------------------- results


class _Unknown:
    """The shape cannot be told without the data."""


def _shape_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.size()), value.stride(), value.dtype
    return value


def _infer(func: Any, flat: list[Any], spec: Any) -> Any:
    try:
        args, kwargs = pytree.tree_unflatten([_for_shape(value) for value in flat], spec)
        result = func(*args, **kwargs)
    except (NotImplementedError, RuntimeError, IndexError, TypeError, ValueError):
        return _Unknown  # or wrong, which the operator itself says best
    leaves, structure = pytree.tree_flatten(result)
    return [_shape_of(leaf) for leaf in leaves], structure


def _inferred(func: Any, flat: list[Any], spec: Any) -> Any:
    """The shapes of what an operator returns; remembered, for the next step asks the same."""
    key = func, spec, tuple(_signature(value) for value in flat)
    try:
        known = _shapes.get(key)
    except TypeError:  # an argument that cannot be a key
        return _infer(func, flat, spec)
    if known is None:
        if len(_shapes) > _MOST_SHAPES:
            _shapes.clear()
        known = _shapes[key] = _infer(func, flat, spec)
    return known


@functools.cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that it writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write)


@functools.cache
def _returns_written(func: Any) -> bool:
    """Does it return nothing but what it was given to write to?"""
    return all(r.alias_info and r.alias_info.is_write for r in func._schema.returns)


@functools.cache
def _returns_tensors(func: Any) -> bool:
    return all("Tensor" in str(r.type) for r in func._schema.returns)


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    given = [args[i] if i < len(args) else kwargs[name] for i, name in _writes(func)]
    count = len(func._schema.returns)
    return None if count == 0 else given[0] if count == 1 else tuple(given[:count])


# ---------------------------------------------------------------- running


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator that has no kernel of its own for this device."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        kwargs = randomness.with_generator(func, args, kwargs)
    args = _with_tensors(func, args)
    _make_room(func, args, kwargs)
    flat, spec = pytree.tree_flatten((args, kwargs))
    given = _for_kernels(func, flat)
    call_args, call_kwargs = pytree.tree_unflatten(given, spec)
    call = functools.partial(func, *call_args, **call_kwargs)
    if _writes(func) and _returns_written(func):
        current_stream().put(call)
        return _written(func, args, kwargs)
    shapes: Any = _inferred(func, flat, spec) if _returns_tensors(func) else _Unknown
    return _now(call) if shapes is _Unknown else _later(call, *shapes)


def _later(call: Any, shapes: list[Any], structure: Any) -> Any:
    results = [allocate(*shape) if isinstance(shape, tuple) else shape for shape in shapes]
    targets = [hidden(result) if is_lag(result) else None for result in results]

    def kernel() -> None:
        values = pytree.tree_leaves(call())
        for target, value in zip(targets, values, strict=True):
            if target is not None and not _left_out(value):
                target.copy_(value)

    current_stream().put(kernel)
    return pytree.tree_unflatten(results, structure)


def _left_out(value: Any) -> bool:
    """On the CPU some kernels return nothing where those of other devices keep something."""
    return value is None or value.numel() == 0


def _now(call: Any) -> Any:
    """The host waits for its stream, and does it."""
    current_stream().synchronize()
    return pytree.tree_map_only(Tensor, _to_device, call())


def _to_device(value: Tensor) -> Tensor:
    new = allocate(value.size(), value.stride(), value.dtype)
    hidden(new).copy_(value)
    return new


def _make_room(func: Any, args: Any, kwargs: Any) -> None:
    """An empty tensor that is given for the result gets the result's size."""
    for position, name in _writes(func):
        out = kwargs.get(name)
        if position >= len(args) and isinstance(out, Tensor) and out.numel() == 0:
            flat, spec = pytree.tree_flatten((args, kwargs))
            shapes = _inferred(func, flat, spec)
            if shapes is not _Unknown and len(shapes[0]) == 1:
                size, stride, _ = shapes[0][0]
                if size != tuple(out.size()):
                    memory.resize(out, size)
                    out.as_strided_(size, stride)


# ---------------------------------------------------------------- memory and copies


def _empty(size: Sequence[int], dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    form = memory_format or torch.contiguous_format
    like = torch.empty(size, dtype=dtype, device="meta", memory_format=form)
    return allocate(like.size(), like.stride(), dtype)


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], dtype: Any = None, **_: Any
) -> Tensor:
    return allocate(size, stride, dtype or torch.get_default_dtype())


def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Queued. The host waits where it gets the data, unless it does not want to.

    From the host what is there at this moment is copied; from pinned memory, without blocking, what
    is there when the stream comes to it.
    """
    if source.size() != target.size():
        source = source.expand(target.size())
    late = non_blocking and not is_lag(source) and memory.is_pinned(source)
    data = hidden(source) if is_lag(source) else source.detach() if late else source.clone()
    place = hidden(target) if is_lag(target) else target.detach()
    current_stream().put(functools.partial(place.copy_, data))
    if not is_lag(target) and not non_blocking:
        current_stream().synchronize()
    return target


def _to_copy(
    source: Tensor,
    *,
    dtype: Any = None,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
    **_: Any,
) -> Tensor:
    bare = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="meta")
    like: Tensor = aten._to_copy.default(bare, dtype=dtype, memory_format=memory_format)
    target = torch.device(device or DEVICE)
    if target.type == "lag":
        return copy_(allocate(like.size(), like.stride(), like.dtype), source)
    if target.type != "cpu":
        return like.to(target)
    out = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
    return copy_(out, source, non_blocking)


def _resize_(tensor: Tensor, size: Sequence[int], *, memory_format: Any = None) -> Tensor:
    memory.resize(tensor, size)
    return tensor


def _record_stream(tensor: Tensor, stream: torch.Stream) -> None:
    memory.record_stream(tensor, stream_of(stream))


def _item(tensor: Tensor) -> Any:
    value = hidden(tensor)
    current_stream().synchronize()
    return value.item()


# ---------------------------------------------------------------- composites done as on the CPU


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """By the same kernel as the CPU would choose: its choice does not look at the data."""
    bare = [_description(x) for x in (query, key, value, attn_mask)]
    options = {"scale": scale, "enable_gqa": enable_gqa}
    choose: Any = torch._fused_sdp_choice
    chosen = choose(*bare, dropout_p, is_causal, **options)
    result: tuple[Tensor, ...]
    if chosen == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value:
        options = {"attn_mask": attn_mask, "scale": scale}
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        result = flash(query, key, value, dropout_p, is_causal, **options)
    else:
        plain = aten._scaled_dot_product_attention_math
        result = plain(query, key, value, attn_mask, dropout_p, is_causal, None, **options)
    return result[0]


def _description(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else hidden(tensor).requires_grad_(tensor.requires_grad)


_VIEWS = ("as_strided", "view", "_reshape_alias", "unfold")
_SETS = ("source_Storage_storage_offset", "source_Storage", "source_Tensor", "")
_WHOLE = (
    "convolution",
    "convolution_backward",
    "native_group_norm",
    "native_layer_norm",
    "silu_backward",
)
"""Composites that would take another way, with other roundings, for a device like this."""


def _same_as_cpu(func: Any) -> Any:
    """Kernels that look at a tensor's description only."""
    return functools.partial(func._op_dk, torch._C.DispatchKey.CPU)


def register(library: torch.library.Library, fallback: torch.library.Library) -> None:
    """Give torch all of them."""
    fallback.fallback(run, "PrivateUse1")
    own = {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "copy_": copy_,
        "_to_copy": _to_copy,
        "resize_": _resize_,
        "record_stream": _record_stream,
        "_local_scalar_dense": _item,
        **randomness.KERNELS,
        **{name: functools.partial(run, getattr(aten, name).default) for name in _WHOLE},
        **{name: _same_as_cpu(getattr(aten, name).default) for name in _VIEWS},
    }
    for overload in _SETS:
        name = f"set_.{overload}" if overload else "set_"
        own[name] = _same_as_cpu(getattr(aten.set_, overload or "default"))
    for name, kernel in own.items():
        library.impl(name, kernel, "PrivateUse1")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)
        library.impl("dropout", randomness.dropout, key)
    torch.abs(torch.empty(1, device="meta"), out=torch.empty(0, device="meta"))  # slow at first
    library.impl("_pin_memory", lambda tensor, device=None: memory.pin(tensor), "CPU")
    library.impl("is_pinned", lambda tensor, device=None: memory.is_pinned(tensor), "CPU")
