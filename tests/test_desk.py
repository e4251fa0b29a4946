"""Where a rank's two threads meet: nobody sleeps through a word for it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_dsgd.backends.streams import Streams
from lightning_dsgd.control.alarm import Alarm
from lightning_dsgd.exchange.desk import Desk
from lightning_dsgd.exchange.gradients import FlatLayout
from lightning_dsgd.workers.machine import Finished, WorkerMachine
from lightning_dsgd.workers.messages import Contribution, Passed, Segment
from lightning_dsgd_plugins.cyclic_delay import TurnRule

TURNS = 500
PROMPT = 0.25
"""Seconds; a wait that is not woken lasts until a deadline, which is far longer."""


def waiting_desk(announced: list[Any]) -> Desk:
    """Of a worker that has accumulated all it may, and has not the token."""
    machine = WorkerMachine(TurnRule(most=1), 0, 2, token=1)
    control: Any = SimpleNamespace(alarm=Alarm(), timeout=60.0, rank=0, announce=announced.append)
    layout = FlatLayout(nn.Linear(2, 2).parameters())
    desk = Desk(machine, control, layout, Streams(torch.device("cpu")))
    desk.tell(Segment(10**9))
    desk.receive()
    desk.tell(Finished())
    return desk


def test_a_wait_ends_as_soon_as_the_token_comes() -> None:
    """The word comes at any moment around the beginning of the wait."""
    late = []
    for turn in range(TURNS):
        announced: list[Any] = []
        desk, came = waiting_desk(announced), threading.Event()

        def training(desk: Desk = desk, came: threading.Event = came) -> None:
            came.set()
            assert desk.await_move(desk.next())  # to compute the next one

        thread = threading.Thread(target=training)
        thread.start()
        came.wait()
        time.sleep((turn % 10) * 2e-5)
        began = time.monotonic()
        desk.heard(Passed(1, 0, "it was too slow"))
        thread.join(PROMPT)
        late += [turn] * (thread.is_alive() or time.monotonic() - began > PROMPT)
        desk._control.alarm.ring(RuntimeError("over"))
        thread.join()
        assert [type(message) for message in announced] == [Contribution]
    assert not late
