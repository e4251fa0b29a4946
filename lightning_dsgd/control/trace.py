"""A run's events and decisions on disk, and back: one JSON object per line.

The first line says which algorithm decided and with which arguments, so that a reader can make its
policy afresh and feed it the same events.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from lightning_dsgd.errors import DSGDError
from lightning_dsgd.workers.messages import Decision, Event

FILE_NAME = "rounds.jsonl"


class TraceError(DSGDError):
    """A trace that cannot be read; the message says where."""


class Header(msgspec.Struct):
    """Which algorithm decided, and for whom."""

    strategy: str
    """Its name, as it is registered: nothing else of a trace is ever looked up, or called."""
    arguments: dict[str, Any]
    """What its strategy was made with."""
    workers: int
    bytes: int = 0
    """Of one gradient."""
    start: int = 0
    """The version at which the run began."""
    state: dict[str, Any] = msgspec.field(default_factory=dict)
    """What the policy had kept from a checkpoint."""


class Line(msgspec.Struct, omit_defaults=True):
    """One event or one decision at a time."""

    t: float
    event: Event | None = None
    decision: Decision | None = None


class Trace(msgspec.Struct):
    """A whole recorded run."""

    header: Header
    events: list[tuple[float, Event]]
    decisions: list[tuple[float, Decision]]


class TraceWriter:
    """Writes lines as they come; the operating system buffers them.

    A directory in which it cannot begin is an OSError. What goes wrong later, such as a full disk,
    ends the trace and not the run: it is said once.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        header: Header,
        warn: Callable[[str], None] = print,
    ) -> None:
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        self._encode = msgspec.json.Encoder().encode
        self._warn = warn
        self._file = (path / FILE_NAME).open("wb")
        self._write(header)

    def event(self, now: float, event: Event) -> None:
        """Record what came in."""
        self._write(Line(now, event=event))

    def decision(self, now: float, decision: Decision) -> None:
        """Record what went out."""
        self._write(Line(now, decision=decision))

    def _write(self, value: Header | Line) -> None:
        if not self._file.closed:
            self._try(lambda: self._file.write(self._encode(value) + b"\n"))

    def close(self) -> None:
        """Finish the file."""
        self._try(self._file.close)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            with contextlib.suppress(OSError):  # what it could not write it tries again
                self._file.close()
            self._warn(
                f"the trace ends here, and training goes on: {self._file.name} cannot be written "
                f"({error.strerror})"
            )


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace directory or file; TraceError names the line that is wrong."""
    file = Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)
    if not file.exists():
        raise TraceError(f"no trace at {file}; record one with the strategy's `trace` argument")
    content = file.read_bytes()
    if not content.strip():
        raise TraceError(f"{file} is empty; the run that wrote it never started")
    if not content.endswith(b"\n"):
        raise TraceError(f"{file} is truncated: its last line is not complete")
    first, *rest = content.splitlines()
    trace = Trace(_decode(first, Header, file, 1), [], [])
    for number, text in enumerate(rest, start=2):
        line = _decode(text, Line, file, number)
        if line.event is not None:
            trace.events.append((line.t, line.event))
        elif line.decision is not None:
            trace.decisions.append((line.t, line.decision))
    if not trace.events:
        raise TraceError(f"{file} holds no events; the run that wrote it never started")
    return trace


def _decode(text: bytes, kind: Any, file: Path, number: int) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise TraceError(f"{file}, line {number}: {error}") from None
