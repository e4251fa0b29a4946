"""Every error this package raises on purpose.

::

    DSGDError
    ├── ConfigurationError      what was asked for cannot work; says which argument, and what to do
    │   └── BackendError        the collective backend asked for is not there
    └── RunError                a run that had started had to end
        ├── PeerLostError       a rank's process or host is gone, or has stopped answering
        ├── PeerFailedError     a rank has raised an error of its own
        ├── RoundTimeoutError   a rank did not come within `timeout`
        ├── EpochLeftError      a rank has left an epoch before the others
        ├── NonFiniteError      this rank's gradient holds a NaN or an infinity
        └── ReplicasDifferError the ranks' parameters should be the same, and are not
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


class EpochLeftError(RunError):
    """A rank has left an epoch with which the others go on; the message names it."""


class NonFiniteError(RunError):
    """This rank's gradient is not finite; the message names the rank, the update and the loss."""


class ReplicasDifferError(RunError):
    """The parameters of some rank are not those of the others; the message names it."""
