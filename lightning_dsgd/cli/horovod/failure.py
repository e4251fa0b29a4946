"""Why there is no Horovod that works: the error, and what a log says of its cause."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

SHOWN_ERRORS = 5


class BuildError(Exception):
    """The build failed; the message is the explanation to show."""


def explain(log: Path, code: int) -> str:
    """Why a build failed: the first errors, for those after them mostly follow from them."""
    lines = log.read_text(errors="replace").splitlines()
    wanted = re.compile(r"\b(error:|CMake Error)|^No space left|Killed signal|: not found$", re.I)
    errors = list(dict.fromkeys(line.strip() for line in lines if wanted.search(line)))
    shown = errors[:SHOWN_ERRORS] or [line.strip() for line in lines[-SHOWN_ERRORS:]]
    head = f"the Horovod build failed (exit code {code}):"
    hint = [_out_of_memory(lines)] if _out_of_memory(lines) else []
    return "\n".join([head, *(f"  {line}" for line in shown), *hint, f"whole log: {log}"])


def _out_of_memory(lines: Sequence[str]) -> str:
    """A compiler killed by the kernel says little; the remedy is to run fewer of them."""
    killed = any("Killed signal" in line or "cc1plus' killed" in line for line in lines)
    return (
        "  the compiler was killed, most likely for lack of memory: try --jobs 1" if killed else ""
    )
