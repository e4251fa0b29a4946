"""A model's gradients as flat buffers, one per dtype, with `.grad` as views into them.

Backward writes straight into the buffer that the collective sends; a result is handed to the
optimizer by pointing `.grad` at it. Nothing is copied on the way.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_dsgd.errors import ConfigurationError

Flat = list[Tensor]
"""One buffer per dtype."""


class FlatLayout:
    """Where each parameter lies in the flat buffers."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._all = list(parameters)
        self.parameters = [p for p in self._all if p.requires_grad]
        if not self.parameters:
            raise ConfigurationError("the model has no parameter to train")
        groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in self.parameters:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self._groups = groups

    @property
    def nbytes(self) -> int:
        """Size of one gradient."""
        return sum(p.numel() * p.element_size() for p in self.parameters)

    def fits(self, parameters: Iterable[nn.Parameter] | None = None) -> bool:
        """Is it still these that are trained, of those given or of those it was made of?"""
        trained = [p for p in parameters or self._all if p.requires_grad]
        same = (a is b for a, b in zip(trained, self.parameters, strict=False))
        return len(trained) == len(self.parameters) and all(same)

    def carry(self, flat: Flat, old: FlatLayout, onto: Flat | None = None) -> Flat:
        """Another layout's buffers as this one's; what it did not know stays as in `onto`, or 0."""
        new = self.zeros() if onto is None else onto
        targets = {id(parameter): view for parameter, view in self.views(new)}
        for parameter, view in old.views(flat):
            if id(parameter) in targets:
                targets[id(parameter)].copy_(view)
        return new

    def zeros(self) -> Flat:
        """Fresh buffers, all zero."""
        return [
            torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=device)
            for (dtype, device), members in self._groups.items()
        ]

    def views(self, flat: Flat) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its part of the buffers, shaped like it."""
        pairs: list[tuple[nn.Parameter, Tensor]] = []
        for buffer, members in zip(flat, self._groups.values(), strict=True):
            parts = buffer.split([p.numel() for p in members])
            pairs.extend((p, _like(p, part)) for p, part in zip(members, parts, strict=True))
        return pairs


def _like(parameter: Tensor, part: Tensor) -> Tensor:
    """With the parameter's own strides where it fills its memory: fused optimizers rely on that."""
    strides = parameter.stride()
    if parameter.is_contiguous() or torch.empty_like(parameter).stride() != strides:
        return part.view_as(parameter)
    return part.as_strided(parameter.size(), strides)


def check_unchanged(layout: FlatLayout) -> None:
    """Refuse what one rank does while others are at another update."""
    if not layout.fits():
        raise ConfigurationError(
            "parameters were frozen or freed within an epoch, while ranks are at different "
            "updates; change `requires_grad` in on_train_epoch_start, as BaseFinetuning does"
        )


class FlatGradients:
    """Points the parameters' `.grad` at one set of buffers or another."""

    def __init__(self, layout: FlatLayout) -> None:
        self.layout = layout
        self._views: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}

    def attach(self, flat: Flat) -> None:
        """From now on `.grad` is this memory."""
        for parameter, view in self._views_of(flat):
            parameter.grad = view

    def _views_of(self, flat: Flat) -> list[tuple[nn.Parameter, Tensor]]:
        views = self._views.get(id(flat))
        if views is None or views[0][1]._base is not flat[0]:
            if len(self._views) > 256:
                self._views.clear()
            views = self._views[id(flat)] = self.layout.views(flat)
        return views

    @torch.no_grad()
    def collect(self, flat: Flat) -> None:
        """Take in gradients that were replaced where they should have been written to."""
        for parameter, view in self._views_of(flat):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)

    def detach(self) -> None:
        """Nobody may write to what `.grad` was: it has been given away."""
        for parameter in self.layout.parameters:
            parameter.grad = None


class FlatPool:
    """Recycles buffers, so that a run allocates only as many as were ever in use at once."""

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self._free: list[Flat] = []

    def zeroed(self) -> Flat:
        """Buffers full of zeros."""
        try:
            flat = self._free.pop()
        except IndexError:
            return self._layout.zeros()
        for buffer in flat:
            buffer.zero_()
        return flat

    def give_back(self, flat: Flat) -> None:
        """These are not needed any more."""
        self._free.append(flat)
