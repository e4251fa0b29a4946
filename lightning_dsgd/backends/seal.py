"""By what ranks know that bytes come from a rank of their job, before anything is decoded.

A job may have a secret, the same on all hosts: in the variable `LIGHTNING_DSGD_SECRET`, or in the
file that `LIGHTNING_DSGD_SECRET_FILE` names. Then what ranks send each other before they decode it,
Lightning's pickled objects among it, carries a code (HMAC) that only who has the secret can make.
Without one, everything rests on the network that ranks meet in; see SECURITY.md.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from lightning_dsgd.errors import ConfigurationError, RunError

SECRET = "LIGHTNING_DSGD_SECRET"
SECRET_FILE = "LIGHTNING_DSGD_SECRET_FILE"
_SIZE = hashlib.sha256().digest_size
_SHORTEST = 16
_SEALED = b"\xc1sealed"
"""How it begins; nothing that ranks encode begins like that."""


class Seal:
    """Closes what this rank sends, opens what others have sent."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret

    def __bool__(self) -> bool:
        return self._secret is not None

    def close(self, payload: bytes) -> bytes:
        """The payload with its code in front."""
        return _SEALED + self._code(payload) + payload if self._secret is not None else payload

    def open(self, data: bytes) -> bytes:
        """The payload, if it is from a rank of this job."""
        sealed, ours = data.startswith(_SEALED), self._secret is not None
        if not sealed and not ours:
            return data
        start = len(_SEALED) + _SIZE
        code, payload = data[len(_SEALED) : start], data[start:]
        if not (sealed and ours and hmac.compare_digest(code, self._code(payload))):
            raise RunError(
                "a message does not come from a rank of this job, or ranks have different secrets: "
                f"see that {SECRET} or {SECRET_FILE} holds the same on every host"
            )
        return payload

    def _code(self, payload: bytes) -> bytes:
        assert self._secret is not None
        return hmac.digest(self._secret, payload, "sha256")


def this_seal() -> Seal:
    """As the environment says."""
    text, file = os.environ.get(SECRET), os.environ.get(SECRET_FILE)
    if file:
        try:
            text = Path(file).read_text().strip()
        except OSError as error:
            raise ConfigurationError(
                f"{SECRET_FILE}={file} cannot be read: {error.strerror}"
            ) from None
        if not text:
            raise ConfigurationError(f"{SECRET_FILE}={file} is empty; it is to hold the secret")
    if not text:
        return Seal(None)
    if len(text) < _SHORTEST:
        raise ConfigurationError(
            f"the job's secret has {len(text)} characters; take at least {_SHORTEST}, such as "
            "`openssl rand -hex 32` makes"
        )
    return Seal(text.encode())
