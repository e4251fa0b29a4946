"""A long run with its output in a log, and how far it is on the screen."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

REPORT_EVERY = 15.0  # seconds between lines where there is no terminal to rewrite one on


class Progress:
    """Seconds and the last line: rewritten on a terminal, now and then in a file."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._flush = out.write, out.flush
        self._terminal = out.isatty()
        self._clock = clock
        self._started = self._shown = clock()

    def show(self, line: str) -> None:
        """Say how far the build is, if it is time to."""
        now = self._clock()
        if not self._terminal and now - self._shown < REPORT_EVERY:
            return
        self._shown = now
        text = f"{now - self._started:4.0f} s  {line}"
        self._write(f"\r{text[:78]:<78}" if self._terminal else f"{text}\n")
        self._flush()

    def end(self) -> None:
        """Leave the terminal's cursor on a new line."""
        if self._terminal:
            self._write("\n")


def run_logged(
    command: Sequence[str], env: Mapping[str, str], log: Path, progress: Progress
) -> int:
    """Run to the end with all output in `log`; an interrupt takes the compilers along."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None:
                time.sleep(0.2)
                progress.show(state_of(log))
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
        finally:
            progress.end()
    return process.returncode


def state_of(log: Path) -> str:
    """The last line of CMake's progress, else the last line at all."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
        lines = file.read().decode(errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    steps = [line for line in said if re.match(r"\[ *\d+%\]", line)]
    return (steps or said or ["starting"])[-1]
