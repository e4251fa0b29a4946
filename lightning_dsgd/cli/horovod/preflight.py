"""What the build needs and is not there, each with its remedy."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_dsgd.cli.horovod.probe import Probe

OLDEST_CMAKE = (3, 17)  # the first to read the compiler launcher from the environment

# Import name and distribution name of what building and importing Horovod takes.
NEEDED_MODULES = {
    "setuptools": "setuptools",
    "wheel": "wheel",
    "packaging": "packaging",
    "cffi": "cffi",
    "cloudpickle": "cloudpickle",
    "psutil": "psutil",
    "yaml": "pyyaml",
}


@dataclass(frozen=True)
class Problem:
    """Something missing, and what to do about it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}\n    remedy: {self.remedy}"


def no_torch(torch: Probe) -> Problem:
    """Without torch there is nothing to build against."""
    return Problem(f"torch cannot be imported: {torch.error}", "pip install torch")


def preflight(env: Mapping[str, str]) -> list[Problem]:
    """What the build would fail for, found in a second rather than in minutes."""
    path = search_path(env)
    found = [no_module(), _no_compiler(env, path), _no_make(path), _no_cmake(env, path)]
    return [problem for problem in [*found, _no_headers()] if problem]


def search_path(env: Mapping[str, str]) -> str:
    """PATH with this environment's own programs first: pip's cmake is one of them."""
    return os.pathsep.join([sysconfig.get_path("scripts"), env.get("PATH", os.defpath)])


def no_module() -> Problem | None:
    """By itself too: a wheel from the cache needs no compiler, but all of these packages."""
    names = {"pip": "pip", **NEEDED_MODULES}
    missing = [dist for name, dist in names.items() if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    if "pip" in missing:
        return Problem("pip is not in this environment", "python -m ensurepip")
    what = f"Python packages the build needs are missing: {', '.join(missing)}"
    return Problem(what, f"pip install {' '.join(missing)}")


def _no_compiler(env: Mapping[str, str], path: str) -> Problem | None:
    names = [env["CXX"].split()[0]] if env.get("CXX", "").strip() else ["c++", "g++", "clang++"]
    if any(shutil.which(name, path=path) for name in names):
        return None
    what = f"no C++ compiler found (looked for {', '.join(names)})"
    return Problem(what, "install one, e.g. apt install g++, or set CXX")


def _no_make(path: str) -> Problem | None:
    if shutil.which("make", path=path):
        return None
    return Problem("make not found", "install it, e.g. apt install make")


def _no_cmake(env: Mapping[str, str], path: str) -> Problem | None:
    """CMake must be there and young enough to take the launcher."""
    oldest = ".".join(map(str, OLDEST_CMAKE))
    remedy = "pip install 'cmake<4', or set HOROVOD_CMAKE to one"
    cmake = shutil.which(env.get("HOROVOD_CMAKE", "cmake"), path=path)
    if cmake is None:
        return Problem("cmake not found", remedy)
    said = subprocess.run([cmake, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"version (\d+)\.(\d+)", said)
    if match and (int(match[1]), int(match[2])) >= OLDEST_CMAKE:
        return None
    return Problem(f"{cmake} is not CMake {oldest} or newer", remedy)


def _no_headers() -> Problem | None:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.exists():
        return None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Problem(f"Python's C headers are missing ({header})", f"apt install python{version}-dev")
