"""What the user gets to read: lines of our own, and mistakes without our own frames."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from lightning_dsgd.errors import ConfigurationError

_NOT_THE_USERS = {"lightning", "pytorch_lightning", "lightning_dsgd", "lightning_dsgd_plugins"}
_others = [sys.__excepthook__]


def say(text: str) -> None:
    """A line for the user, from whichever thread."""
    print(f"lightning-dsgd: {text}", flush=True)


def show_only_users_frames() -> None:
    """For a mistake that nobody catches, print the way to it in the user's own code alone."""
    if sys.excepthook is _show:
        return
    _others.append(sys.excepthook)
    sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, ConfigurationError):
        _others[-1](kind, error, trace)
        return
    depth, frames = 0, trace
    while frames is not None and _is_users(frames):
        depth, frames = depth + 1, frames.tb_next
    traceback.print_exception(kind, error, trace, limit=depth, chain=False)


def _is_users(frame: TracebackType) -> bool:
    module = str(frame.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] not in _NOT_THE_USERS
