"""A rank that makes steps of its own: what it does with a gradient that is not finite."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from lightning_dsgd.backends.streams import Streams, look_until
from lightning_dsgd.control.alarm import Alarm
from lightning_dsgd.exchange.finite import NonFinite, loss_and_finiteness, not_finite, sums
from lightning_dsgd.trainer.telling import say

_LONG = 20
"""So many in a row are no accident."""


class OwnSteps:
    """Judges one rank's gradients, before anything of them gets to the optimizer."""

    def __init__(self, choice: NonFinite, rank: int, streams: Streams, alarm: Alarm) -> None:
        self._choice = choice
        self._streams = streams
        self._alarm = alarm
        self._rank = rank
        self._dropped = self._in_a_row = 0

    def takes(self, parameters: Iterable[nn.Parameter], update: int, loss: Tensor) -> bool:
        """Is there to be a step? If not, no `.grad` is left, and an optimizer moves nothing."""
        if self._choice == "ignore":
            return True
        owners = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [owner.grad for owner in owners if owner.grad is not None]
        reading = self._streams.reading(sums(loss, gradients))
        look_until(reading.mark, self._alarm.wait)
        self._alarm.check()
        number, fine = loss_and_finiteness(reading.numbers(), gradients)
        if fine:
            self._in_a_row = 0
            return True
        if self._choice == "raise":
            raise not_finite(self._rank, update, number)
        for owner in owners:
            owner.grad = None
        self._count(update)
        return False

    def _count(self, update: int) -> None:
        self._dropped += 1
        self._in_a_row += 1
        if self._dropped == 1:
            where = f"rank {self._rank}'s gradient for step {update}"
            say(f"{where} is not finite: it makes no step there, nor with any further such one")
        if self._in_a_row == _LONG:
            say(f"the last {_LONG} gradients of rank {self._rank} were all not finite: it stands")
