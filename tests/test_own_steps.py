"""What a rank that makes steps of its own does with a gradient that is not finite."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_dsgd import NonFiniteError
from lightning_dsgd.backends.streams import Streams
from lightning_dsgd.control.alarm import Alarm
from lightning_dsgd.exchange.finite import NonFinite
from lightning_dsgd.trainer.own_steps import OwnSteps

STANDS = "the last 20 gradients of rank 3 were all not finite: it stands"


class Rank:
    """Number 3, with one parameter."""

    def __init__(self, choice: NonFinite) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(4))
        self._steps = OwnSteps(choice, 3, Streams(torch.device("cpu")), Alarm())
        self._update = 0

    def gives(self, value: float) -> bool:
        """Does a gradient of this value make a step?"""
        self._update += 1
        self.parameter.grad = torch.full((4,), value)
        return self._steps.takes([self.parameter], self._update, torch.tensor(1.5))


def test_twenty_in_a_row_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    rank = Rank("drop")
    for _ in range(19):
        assert not rank.gives(math.nan)
        assert rank.parameter.grad is None
    first = capsys.readouterr().out
    assert first.count("rank 3's gradient for step 1 is not finite") == 1 and STANDS not in first
    rank.gives(math.inf)
    assert STANDS in capsys.readouterr().out
    for _ in range(30):
        rank.gives(math.nan)
    assert capsys.readouterr().out == ""


def test_a_good_one_begins_the_count_anew(capsys: pytest.CaptureFixture[str]) -> None:
    rank = Rank("drop")
    for _ in range(3):
        assert not any(rank.gives(math.nan) for _ in range(19))
        assert rank.gives(0.5) and rank.parameter.grad is not None
    assert STANDS not in capsys.readouterr().out


def test_it_may_end_the_run_or_be_taken_as_it_is() -> None:
    assert Rank("ignore").gives(math.nan)
    with pytest.raises(NonFiniteError, match=r"rank 3: its gradient for update 1 .* \(loss 1.5\)"):
        Rank("raise").gives(-math.inf)
