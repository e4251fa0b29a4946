"""How the step of a stale gradient is made smaller.

- `inverse`: a gradient that is τ updates old counts 1/(1 + τ).
- `distance`: the rule of Dutta et al., a learning rate of min(C/‖w_j - w_τ‖², η_max) for an update
  at w_j made of gradients computed at w_τ; η_max is the optimizer's own rate. An update has one
  rate, so the farthest of its gradients sets it. Every replica keeps the last versions and
  computes it alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.exchange.gradients import FlatLayout

Damping = Literal["none", "inverse", "distance"]


def check_damping(damping: object, constant: float, max_staleness: int | None) -> None:
    """Refuse what cannot work, at construction."""
    if damping not in ("none", "inverse", "distance"):
        raise ConfigurationError(
            f"damping={damping!r} is unknown; choose 'none', 'inverse' or 'distance'"
        )
    if damping != "distance":
        return
    if not constant > 0:
        raise ConfigurationError(f"damping_constant={constant} must be positive")
    if max_staleness is None:
        raise ConfigurationError(
            "damping='distance' keeps one copy of the parameters per version back to the oldest "
            "gradient; bound that with max_staleness, for example max_staleness=8"
        )


def scale_of(damping: object) -> Callable[[int], float] | None:
    """The weight of a gradient by its age, where it depends on that alone."""
    return _inverse if damping == "inverse" else None


def _inverse(age: int) -> float:
    return 1.0 / (1 + age)


class DistanceDamping:
    """Remembers the parameters of the last versions and shrinks far updates."""

    def __init__(self, layout: FlatLayout, constant: float, max_staleness: int) -> None:
        self._parameters = layout.parameters
        self._constant = constant
        self._depth = max_staleness + 1
        self._history: dict[int, Tensor] = {}

    @torch.no_grad()
    def remember(self, version: int) -> None:
        """Keep the present parameters as those of `version`."""
        self._history[version] = torch.cat(
            [p.detach().flatten().double() for p in self._parameters]
        )
        self._history.pop(version - self._depth, None)

    @torch.no_grad()
    def apply(self, update: Any, optimizer: Optimizer) -> None:
        """Scale the update's gradient; the parameters are those just before it."""
        version = update.round.number - 1
        self.remember(version)
        now = self._history[version]
        ages = {v for v in update.round.versions if v in self._history and v < version}
        if not ages:
            return
        squares = [(now - self._history[v]).square().sum() for v in sorted(ages)]
        rate = float(optimizer.param_groups[0]["lr"])
        factor = damping_factor(torch.stack(squares).amax(), self._constant, rate)
        for buffer in update.gradient:
            buffer.mul_(factor)


def damping_factor(square: Tensor, constant: float, rate: float) -> Tensor:
    """min(C/d², η_max) as a multiple of η_max; the device works it out, and no host waits."""
    far = square * rate
    return torch.where(far <= constant, torch.ones_like(far), constant / far)
