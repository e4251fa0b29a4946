"""The copy of Lightning that scenarios import: `DSGD_TEST_COPY` says which, and what it is beside.

`lightning` and `pytorch_lightning` stand for a script that imports this one where both are
installed, `lightning alone` and `pytorch_lightning alone` for a machine without the other.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

NAME, _, _alone = os.environ.get("DSGD_TEST_COPY", "pytorch_lightning").partition(" ")
OTHER = {"lightning": "pytorch_lightning", "pytorch_lightning": "lightning"}[NAME]

if _alone:
    sys.modules[OTHER] = None  # type: ignore[assignment]  # so it cannot be imported

pl: Any = importlib.import_module({"lightning": "lightning.pytorch"}.get(NAME, NAME))
