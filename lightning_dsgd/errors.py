"""Every error this package raises on purpose.

::

    DSGDError
    ├── ConfigurationError      what was asked for cannot work; says which argument, and what to do
    │   └── BackendError        the collective backend asked for is not there
    └── RunError                a run that had started had to end
        ├── PeerLostError       a rank's process or host is gone, or has stopped answering
        ├── PeerFailedError     a rank has raised an error of its own
        └── RoundTimeoutError   a rank did not come within `timeout`
"""

from __future__ import annotations

import sys
import traceback
from types import TracebackType


class DSGDError(RuntimeError):
    """Base of all errors of lightning-dsgd."""


class ConfigurationError(DSGDError, ValueError):
    """What was asked for cannot work; the message names the argument and the remedy."""


class BackendError(ConfigurationError):
    """The collective backend that was asked for is not usable here."""


class RunError(DSGDError):
    """A run that had started had to end."""


class PeerLostError(RunError):
    """A rank's process or host is gone, or has stopped answering."""


class PeerFailedError(RunError):
    """Another rank has raised an error; this one ends with it."""


class RoundTimeoutError(RunError):
    """A rank that an update waits for did not come within `timeout`."""


_NOT_THE_USERS = {"lightning", "pytorch_lightning", "lightning_dsgd", "lightning_dsgd_plugins"}


def show_only_users_frames() -> None:
    """For a mistake that nobody catches, print the way to it in the user's own code alone."""
    if sys.excepthook is _show:
        return
    _others.append(sys.excepthook)
    sys.excepthook = _show


_others = [sys.__excepthook__]


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
