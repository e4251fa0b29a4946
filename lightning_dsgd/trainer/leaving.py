"""How a process ends after a failure, and the ranks that it has started with it.

Where plain `python` is the launcher, rank 0 has started the others, and Lightning looks after them.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

_LAST_CHANCE = 5.0
"""Seconds for the ranks that this process has started to end by themselves after a failure."""

_children: list[subprocess.Popen[bytes]] = []
_leaving = False
_failed = False


def end_at_exit(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ranks that this process has started are of no use without it, wherever they wait."""
    if children and not _children:
        atexit.register(_end_children)
    _children.extend(child for child in children if child not in _children)


def exit_without_destructors() -> None:
    """After a failure a collective may never end, and its destructor would wait for it."""
    global _failed, _leaving
    _failed = True
    if not _leaving:
        _leaving = True
        atexit.register(_leave)


def all_is_well() -> None:
    """A later training has succeeded: an earlier failure, if any, was somebody's who handled it."""
    global _failed
    _failed = False
    _children.clear()


def _leave() -> None:
    _end_children()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if _failed or hasattr(sys, "last_value") else 0)


def _end_children() -> None:
    """A stopped process would stay for ever, one that waits for us for minutes."""
    deadline = time.monotonic() + _LAST_CHANCE
    for child in _children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()


class Started:
    """A rank that this process has started; its failure shows a while after it has come.

    Lightning looks now and then, and kills this process at once: what has become of the other rank
    is to be said before.
    """

    def __init__(self, process: Any) -> None:
        self._process = process
        self._failed: float | None = None
        """Since when that is known."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.returncode
        if not code:
            return code
        if self._failed is None:
            self._failed = time.monotonic()
        return code if time.monotonic() - self._failed > _LAST_CHANCE else None

    def poll(self) -> int | None:
        self._process.poll()
        return self.returncode


def let_failures_be_said(children: list[Any]) -> None:
    """Of those that Lightning looks after, in the list that it looks at."""
    children[:] = [c if isinstance(c, Started) else Started(c) for c in children]
