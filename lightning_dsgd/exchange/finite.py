"""Is there a NaN or an infinity in a gradient? Asked before anybody else gets to see it.

A sum tells: what is not finite stays so in it. Only where a sum is suspicious is each number looked
at, since a sum of finite ones may be too large for its type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_dsgd.errors import ConfigurationError, NonFiniteError

NonFinite = Literal["raise", "drop", "ignore"]
_CHOICES = ("raise", "drop", "ignore")


def check_nonfinite(choice: object) -> None:
    """Refuse what says nothing about gradients that are not finite."""
    if choice not in _CHOICES:
        raise ConfigurationError(f"nonfinite={choice!r} is unknown; choose {', '.join(_CHOICES)}")


@torch.no_grad()
def sums(loss: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The loss, and each part's sum: what has to be read to know whether all of them are finite."""
    wide = torch.float64 if loss.dtype == torch.float64 else torch.float32
    each = [_sum(part).to(loss.device, wide) for part in parts]
    return torch.stack([loss.detach().sum().to(wide), *each])


@torch.no_grad()
def loss_and_finiteness(numbers: Sequence[float], parts: Sequence[Tensor]) -> tuple[float, bool]:
    """By what `sums` has told; a device is asked again only where a sum is suspicious."""
    loss, *totals = numbers
    fine = all(math.isfinite(total) for total in totals) or all(map(_all_finite, parts))
    return loss, fine


def not_finite(rank: int, update: int, loss: float) -> NonFiniteError:
    """What ends a run that is not to go on then."""
    return NonFiniteError(
        f"rank {rank}: its gradient for update {update} is not finite (loss {loss:g}); look at "
        "this rank's data and at the learning rate, or go on without such gradients: "
        "nonfinite='drop'"
    )


def _sum(part: Tensor) -> Tensor:
    part = _numbers(part)
    return part.sum(dtype=torch.float32) if part.element_size() < 4 else part.sum()


def _all_finite(part: Tensor) -> bool:
    return bool(torch.isfinite(_numbers(part)).all())


def _numbers(part: Tensor) -> Tensor:
    return part._values() if part.is_sparse else part
