"""A model's gradients as flat buffers, one per dtype, with `.grad` as views into them.

Backward writes straight into the buffer that the collective sends; a result is handed to the
optimizer by pointing `.grad` at it. Nothing is copied on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_dsgd.backends.streams import Mark, Streams, happened
from lightning_dsgd.errors import ConfigurationError

_NARROW = (torch.float16, torch.bfloat16)


def is_narrow(buffer: Tensor) -> bool:
    """A sum of several such buffers may not fit where their mean does: divide before summing."""
    return buffer.dtype in _NARROW


class Flat(list[Tensor]):
    """A gradient, or a model, as flat memory: one buffer per dtype.

    Two threads use it in turn: `hand_over`, then `take_up`.
    """

    __slots__ = ("mark", "views")

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        super().__init__(buffers)
        self.mark: Mark = None
        self.views: list[tuple[nn.Parameter, Tensor]] = []
        """Each parameter's part, where it has served as the model's `.grad`."""

    def hand_over(self, streams: Streams) -> Mark:
        """The calling thread has queued all that it does with it."""
        self.mark = streams.mark()
        return self.mark

    def take_up(self, streams: Streams) -> Flat:
        """The calling thread's stream waits for whoever had it."""
        streams.follow(self.mark)
        return self

    @property
    def free(self) -> bool:
        """Who had it is done with it."""
        return happened(self.mark)

    def part_with(self, streams: Streams) -> None:
        """Its memory may go as soon as the calling thread's stream is done with it."""
        for buffer in self:
            streams.keep(buffer)


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
        return Flat(
            [
                torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=device)
                for (dtype, device), members in self._groups.items()
            ]
        )

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

    def attach(self, flat: Flat) -> None:
        """From now on `.grad` is this memory."""
        for parameter, view in self._views_of(flat):
            parameter.grad = view

    def _views_of(self, flat: Flat) -> list[tuple[nn.Parameter, Tensor]]:
        flat.views = flat.views or self.layout.views(flat)
        return flat.views

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
