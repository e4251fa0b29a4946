"""The cache of built wheels: one shelf for everything that a wheel depends on."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from lightning_dsgd.cli.horovod.build import HOROVOD, RECIPE
from lightning_dsgd.cli.horovod.failure import BuildError
from lightning_dsgd.cli.horovod.install import install_working


def wheel_root(chosen: Path | None) -> Path:
    """Where wheels are kept."""
    if chosen is not None:
        return chosen
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "lightning-dsgd" / "wheels"


def cache_key(torch: Mapping[str, object], flags: Mapping[str, str]) -> str:
    """Names everything a built wheel depends on.

    The processor is part of it: Horovod compiles for the machine it is built on, and a home
    directory may be shared by machines of several generations.
    """
    rest = json.dumps([HOROVOD, RECIPE, sorted(flags.items()), _processor()])
    digest = hashlib.sha256(rest.encode()).hexdigest()[:12]
    python = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    return f"{python}-torch{torch['version']}-abi{torch['abi']}-{digest}"


def _processor() -> str:
    """The instruction sets, where Linux tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = (line for line in lines if line.lower().startswith(("flags", "features")))
    return " ".join(sorted(next(wanted, platform.machine()).partition(":")[2].split()))


def install_cached(shelf: Path) -> bool:
    """Install the wheel on `shelf`; false if there is none, or none that works."""
    wheels = sorted(shelf.glob("horovod-*.whl"))
    if not wheels:
        return False
    print(f"using the wheel in {shelf}")
    try:
        install_working(wheels[-1])
        return True
    except BuildError as error:
        print(f"the cached wheel does not work, building anew: {error}", file=sys.stderr)
        return False


def keep(wheel: Path, shelf: Path | None) -> Path:
    """Put a wheel into the cache; never half of one, whoever else is doing the same."""
    if shelf is None:
        return wheel
    try:
        shelf.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=shelf) as beside:
            copy = shutil.copy2(wheel, beside)
            return Path(copy).replace(shelf / wheel.name)
    except OSError as error:
        print(f"the wheel is not kept: {error}", file=sys.stderr)
        return wheel
