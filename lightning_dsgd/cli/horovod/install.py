"""The installation of a wheel, and the proof that it works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lightning_dsgd.cli.horovod.failure import BuildError
from lightning_dsgd.cli.horovod.probe import Probe, features, probe_horovod


def install(wheel: Path) -> Probe:
    """Install a wheel and try it."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    command = [*pip, "--no-deps", "--force-reinstall", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{wheel.name} could not be installed:\n{done.stderr.strip()}")
    return probe_horovod()


def install_working(wheel: Path) -> None:
    """Install a wheel and say what it can do; one that does not work is a failure, not a result."""
    installed = install(wheel)
    if installed.found is None:
        raise BuildError(f"Horovod was installed but does not work: {installed.error}")
    print(f"Horovod works: {features(installed)}")
