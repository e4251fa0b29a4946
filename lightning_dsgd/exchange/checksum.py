"""A model's parameters as one number of 64 bits, for replicas to be compared by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_dsgd.backends import Channel
from lightning_dsgd.errors import ReplicasDifferError, RunError
from lightning_dsgd.workers.replicas import difference

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@torch.no_grad()
def checksum(parameters: Iterable[Tensor]) -> Tensor:
    """Whatever single bit differs, it differs: every tensor's bits are summed, and weighed oddly.

    Sums wrap around. One number, on the parameters' device.
    """
    sums = [_words(parameter).sum() for parameter in parameters]
    together = torch.stack([part.to(sums[0].device) for part in sums])
    weights = torch.arange(len(sums), device=together.device) * 2 + 1
    return (together * weights).sum()


def require_same(channel: Channel, version: int, parameters: Iterable[Tensor]) -> None:
    """Compare with all other ranks; collective. What differs is raised on every rank."""
    checksums = channel.gather(checksum(parameters).reshape(1)).flatten().tolist()
    found = difference(version, dict(enumerate(checksums)))
    if found is not None:
        with contextlib.suppress(RunError):  # who knows it first would end the others' gathering
            channel.barrier()
        raise ReplicasDifferError(found)


def _words(parameter: Tensor) -> Tensor:
    """Its numbers' bits as whole numbers, as long as possible: those are summed fastest.

    Where they lie in memory makes no difference.
    """
    tensor, size = parameter.detach().contiguous(), parameter.element_size()
    if tensor.numel() * size % 8:
        return tensor.view(-1).view(_WHOLE[size])
    if tensor.storage_offset() * size % 8:
        tensor = tensor.clone()
    return tensor.view(-1).view(torch.int64)
