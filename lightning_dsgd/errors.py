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
