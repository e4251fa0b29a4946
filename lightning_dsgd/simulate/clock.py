"""Simulated time: a heap of things to happen, and nothing else.

Two things at the same instant happen in the order in which they were scheduled: a counter breaks
the tie, so a run depends on its seed alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]


class Clock:
    """The event heap of one simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time: float, action: Action, *arguments: Any) -> None:
        """Let something happen at a time that has not passed yet."""
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, action, arguments))

    def step(self) -> bool:
        """Let the next thing happen; False if there is none."""
        if not self._heap:
            return False
        self.now, _, action, arguments = heapq.heappop(self._heap)
        self.events += 1
        action(*arguments)
        return True
