"""`lightning-dsgd install-horovod`: build Horovod for the torch that is installed.

Standard library only, like the steps in `horovod`: this command runs where little else works.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lightning_dsgd.cli.horovod.build import build
from lightning_dsgd.cli.horovod.cache import cache_key, install_cached, keep, wheel_root
from lightning_dsgd.cli.horovod.failure import BuildError
from lightning_dsgd.cli.horovod.flags import build_flags, requested
from lightning_dsgd.cli.horovod.install import install_working
from lightning_dsgd.cli.horovod.preflight import Problem, no_module, no_torch, preflight
from lightning_dsgd.cli.horovod.probe import features, operations, probe_horovod, probe_torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = (
        "HOROVOD_* variables are passed to the build; for GPUs set HOROVOD_GPU_OPERATIONS=NCCL."
    )
    parser.add_argument("--force", action="store_true", help="build even if there is no need to")
    parser.add_argument("--no-cache", action="store_true", help="neither use nor keep a wheel")
    parser.add_argument(
        "--wheel-dir", type=Path, metavar="DIR", help="keep wheels here, not in the user's cache"
    )
    parser.add_argument(
        "--jobs", type=_positive, default=_cores(), metavar="N", help="compilers at a time"
    )


def run(args: argparse.Namespace) -> int:
    """Install Horovod, from the cache if it can be, and show that it works."""
    if not args.force and (installed := probe_horovod()).found:
        lacking = requested(os.environ) - operations(installed)
        if not lacking:
            print(f"Horovod already works here: {features(installed)} (--force builds it anew)")
            return 0
        print(f"Horovod works here, but without {', '.join(sorted(lacking))}: building it anew")
    torch = probe_torch()
    if torch.found is None:
        return _refuse([no_torch(torch)])
    flags = build_flags(os.environ)
    shelf = None if args.no_cache else wheel_root(args.wheel_dir) / cache_key(torch.found, flags)
    if missing := no_module():
        return _refuse([missing])
    if not args.force and shelf is not None and install_cached(shelf):
        return 0
    if problems := preflight(os.environ):
        return _refuse(problems)
    try:
        with tempfile.TemporaryDirectory(prefix="horovod-build-") as work:
            wheel = build(Path(work), flags, args.jobs, Path(tempfile.gettempdir()))
            install_working(keep(wheel, shelf))
            return 0
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _cores() -> int:
    """The cores this process may use, which in a container or a job may be few of many."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _refuse(problems: Sequence[Problem]) -> int:
    print("Horovod cannot be built here:", file=sys.stderr)
    for problem in problems:
        print(f"  - {problem}", file=sys.stderr)
    return 1
