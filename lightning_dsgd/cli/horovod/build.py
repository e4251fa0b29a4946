"""The build of the wheel, by pip and Horovod's own build files.

The last Horovod release asks the compiler for C++14, which the headers of torch since 2.1 refuse.
The build here puts a small compiler launcher in between that raises the standard and leaves out
debug information, a third of the time and most of the wheel; it is otherwise Horovod's own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from lightning_dsgd.cli.horovod.failure import BuildError, explain
from lightning_dsgd.cli.horovod.preflight import search_path
from lightning_dsgd.cli.horovod.progress import Progress, run_logged

HOROVOD = "0.28.1"
RECIPE = 2  # part of the cache key: raise it when the build changes

LAUNCHER = """\
import os, re, sys
old = re.compile(r"^-std=(c|gnu)[+][+](0x|11|1y|14)$")
command = [old.sub(r"-std=\\1++17", word) for word in sys.argv[1:] if word != "-g"]
os.execvp(command[0], command)
"""


def build(work: Path, flags: Mapping[str, str], jobs: int, logs: Path) -> Path:
    """Build the wheel in `work`; the log outlives a failure in `logs`."""
    log = logs / f"horovod-build-{os.getpid()}.log"
    print(f"building Horovod {HOROVOD}, which takes some minutes (log: {log})", flush=True)
    started = time.monotonic()
    code = run_logged(_pip_wheel(work), _build_env(work, flags, jobs), log, Progress(sys.stdout))
    wheels = sorted(work.glob("horovod-*.whl"))
    if code != 0 or not wheels:
        raise BuildError(explain(log, code))
    log.unlink()
    print(f"built in {time.monotonic() - started:.0f} s")
    return wheels[0]


def _pip_wheel(work: Path) -> list[str]:
    """Never from pip's own wheel cache, which does not know for which torch a wheel was built."""
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--no-binary", "horovod"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-v"]
    return [*pip, *options, "-w", str(work), f"horovod=={HOROVOD}"]


def _build_env(work: Path, flags: Mapping[str, str], jobs: int) -> dict[str, str]:
    """The user's environment, less the flags of a `make` around this one.

    CMake 4 takes Gloo's old build files only with a policy version set; older ones ignore it.
    """
    env = {k: v for k, v in os.environ.items() if k not in ("MFLAGS", "MAKELEVEL")}
    launcher = {"CMAKE_CXX_COMPILER_LAUNCHER": str(write_launcher(work))}
    policy = {"CMAKE_POLICY_VERSION_MINIMUM": env.get("CMAKE_POLICY_VERSION_MINIMUM", "3.5")}
    common = {"PATH": search_path(env), "MAKEFLAGS": f"-j{jobs}", "PYTHONUNBUFFERED": "1"}
    return {**env, **common, **policy, **launcher, **flags}


def write_launcher(directory: Path) -> Path:
    """The program CMake runs the compiler through; `-E`: no user setting changes this Python."""
    script = directory / "raise-cxx-standard.py"
    script.write_text(LAUNCHER)
    wrapper = directory / "raise-cxx-standard"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -E "{script}" "$@"\n')
    wrapper.chmod(0o755)
    return wrapper
