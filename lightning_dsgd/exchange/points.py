"""Where the replicas stand: the last point they had in common, and the step that led away from it.

Two flat buffers of the model's size, and no more, take turns in holding

===================  ====================  =============================================
moment               `base`                `step`
===================  ====================  =============================================
after `mark`         the common point      free
after `stepped`      the common point      this rank's own step
after the exchange   the common point      the mean of all ranks' steps
after `rejoin`       the new common point  the distance moved: mean step minus own step
===================  ====================  =============================================

The new common point is computed as *base + mean step*, both of which are the same on every rank, so
it is the same too, bit for bit; adding the distance to each rank's own point would round
differently.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_dsgd.exchange.gradients import Flat, FlatLayout


class Points:
    """The arithmetic of points and steps on one model's parameters, all of it in place."""

    def __init__(self, layout: FlatLayout) -> None:
        self.layout = layout
        self.base: Flat = layout.zeros()
        self.step: Flat = layout.zeros()
        self.own_step = torch.zeros(())
        """After `rejoin`: the largest number in this rank's own step."""
        bases, steps = layout.views(self.base), layout.views(self.step)
        self._views: list[tuple[nn.Parameter, Tensor, Tensor]] = [
            (parameter, base, step)
            for (parameter, base), (_, step) in zip(bases, steps, strict=True)
        ]

    @torch.no_grad()
    def mark(self) -> None:
        """Take the parameters, as they are now, for the common point."""
        for parameter, base, _ in self._views:
            base.copy_(parameter)

    @torch.no_grad()
    def stepped(self) -> Flat:
        """How far the parameters have moved since `mark`."""
        for parameter, base, step in self._views:
            torch.sub(parameter, base, out=step)
        return self.step

    @torch.no_grad()
    def rejoin(self) -> None:
        """With the mean step in `step`: move to the new common point, keep the distance moved."""
        for parameter, base, step in self._views:
            parameter.sub_(base)  # the own step, exactly as it was sent
            base.add_(step)
            step.sub_(parameter)
        self.own_step = largest([parameter for parameter, _, _ in self._views])
        for parameter, base, _ in self._views:
            parameter.copy_(base)

    def corrigible(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """After `rejoin`, for each parameter with a gradient: it, the distance, and room to work.

        The room is `base`, which the next `mark` fills again.
        """
        return [
            (parameter.grad, step, base)
            for parameter, base, step in self._views
            if parameter.grad is not None
        ]

    def distance(self) -> Tensor:
        """After `rejoin`: the length of the move."""
        return length(self.step)

    def moved(self, precision: float) -> Tensor:
        """After `rejoin`: is the move more than what rounding makes of equal steps?"""
        return largest(self.step) > precision * self.own_step


def length(parts: list[Tensor]) -> Tensor:
    """The 2-norm of one vector that lies in several tensors."""
    norm: Tensor = torch.linalg.vector_norm(_norms(parts, 2.0))
    return norm


def largest(parts: list[Tensor]) -> Tensor:
    """The largest absolute value in several tensors."""
    return _norms(parts, float("inf")).amax()


def _norms(parts: list[Tensor], order: float) -> Tensor:
    norms = [torch.linalg.vector_norm(part, order) for part in parts]
    wide = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    return torch.stack([norm.to(wide) for norm in norms])
