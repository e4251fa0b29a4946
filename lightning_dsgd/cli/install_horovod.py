"""`lightning-dsgd install-horovod`: build Horovod for the torch that is installed.

The last Horovod release asks the compiler for C++14, which the headers of torch since 2.1 refuse.
The build here puts a small compiler launcher in between that raises the standard and leaves out
debug information, a third of the time and most of the wheel; it is otherwise Horovod's own.
Standard library only: this command runs where little else works.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

HOROVOD = "0.28.1"
RECIPE = 2  # part of the cache key: raise it when the build changes
OLDEST_CMAKE = (3, 17)  # the first to read the compiler launcher from the environment
REPORT_EVERY = 15.0  # seconds between lines where there is no terminal to rewrite one on
SHOWN_ERRORS = 5

DEFAULT_FLAGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}

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

LAUNCHER = """\
import os, re, sys
old = re.compile(r"^-std=(c|gnu)[+][+](0x|11|1y|14)$")
command = [old.sub(r"-std=\\1++17", word) for word in sys.argv[1:] if word != "-g"]
os.execvp(command[0], command)
"""

TORCH_PROBE = """\
import json, torch
print(json.dumps({"version": torch.__version__, "abi": int(torch._C._GLIBCXX_USE_CXX11_ABI)}))
"""

HOROVOD_PROBE = """\
import json, horovod, torch, horovod.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(1), name="probe", op=hvd.Sum)
hvd.shutdown()
print(json.dumps({"version": horovod.__version__, "gloo": bool(hvd.gloo_built()),
                  "nccl": bool(hvd.nccl_built()), "mpi": bool(hvd.mpi_built())}))
"""


@dataclass(frozen=True)
class Probe:
    """What a short program in a fresh interpreter found, or why it could not."""

    found: dict[str, object] | None
    error: str = ""


@dataclass(frozen=True)
class Problem:
    """Something missing, and what to do about it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}\n    remedy: {self.remedy}"


class BuildError(Exception):
    """The build failed; the message is the explanation to show."""


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
        lacking = requested(os.environ) - _operations(installed)
        if not lacking:
            print(f"Horovod already works here: {_features(installed)} (--force builds it anew)")
            return 0
        print(f"Horovod works here, but without {', '.join(sorted(lacking))}: building it anew")
    torch = probe_torch()
    if torch.found is None:
        return _refuse([_torch_problem(torch)])
    flags = build_flags(os.environ)
    shelf = None if args.no_cache else wheel_root(args.wheel_dir) / cache_key(torch.found, flags)
    if missing := _no_module():
        return _refuse([missing])
    if not args.force and shelf is not None and install_cached(shelf):
        return 0
    if problems := preflight(os.environ):
        return _refuse(problems)
    try:
        with tempfile.TemporaryDirectory(prefix="horovod-build-") as work:
            wheel = build(Path(work), flags, args.jobs, Path(tempfile.gettempdir()))
            return _finish(install(keep(wheel, shelf)))
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


# --- what is there ------------------------------------------------------------------------------


def probe(program: str) -> Probe:
    """Run `program` by itself: a library built for another torch may end the whole process.

    Launcher variables are taken away, else Horovod would try to join the job around it.
    """
    launcher = ("HOROVOD_", "OMPI_", "PMI_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return Probe(None, "did not answer within 120 s")
    if done.returncode == 0:
        return Probe(json.loads(done.stdout.splitlines()[-1]))
    said = done.stderr.strip().splitlines()
    return Probe(None, said[-1] if said else f"ended with exit code {done.returncode}")


def probe_torch() -> Probe:
    """The installed torch's version and C++ ABI."""
    return probe(TORCH_PROBE)


def probe_horovod() -> Probe:
    """Whether Horovod imports and reduces a tensor, and what it was built with."""
    return probe(HOROVOD_PROBE)


def _torch_problem(torch: Probe) -> Problem:
    return Problem(f"torch cannot be imported: {torch.error}", "pip install torch")


def preflight(env: Mapping[str, str]) -> list[Problem]:
    """What the build would fail for, found in a second rather than in minutes."""
    path = _search_path(env)
    found = [_no_module(), _no_compiler(env, path), _no_make(path), _no_cmake(env, path)]
    return [problem for problem in [*found, _no_headers()] if problem]


def _search_path(env: Mapping[str, str]) -> str:
    """PATH with this environment's own programs first: pip's cmake is one of them."""
    return os.pathsep.join([sysconfig.get_path("scripts"), env.get("PATH", os.defpath)])


def _no_module() -> Problem | None:
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


def _refuse(problems: Sequence[Problem]) -> int:
    print("Horovod cannot be built here:", file=sys.stderr)
    for problem in problems:
        print(f"  - {problem}", file=sys.stderr)
    return 1


# --- the cache ----------------------------------------------------------------------------------


def build_flags(env: Mapping[str, str]) -> dict[str, str]:
    """The defaults, less those the user's HOROVOD_* settings contradict, plus those settings."""
    given = {name: value for name, value in env.items() if name.startswith("HOROVOD_")}
    defaults = {k: v for k, v in DEFAULT_FLAGS.items() if _opposite(k) not in given}
    return {**defaults, **given}


def requested(env: Mapping[str, str]) -> set[str]:
    """The operations that the user's settings ask for by name."""
    asked = {name for name in ("gloo", "mpi") if env.get(f"HOROVOD_WITH_{name.upper()}") == "1"}
    gpu = {value.lower() for name, value in env.items() if name.startswith("HOROVOD_GPU_")}
    return asked | (gpu & {"nccl", "mpi"})


def _opposite(flag: str) -> str:
    without = "HOROVOD_WITHOUT_"
    if flag.startswith(without):
        return flag.replace(without, "HOROVOD_WITH_")
    return flag.replace("HOROVOD_WITH_", without)


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
        return _finish(install(wheels[-1])) == 0
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


# --- the build ----------------------------------------------------------------------------------


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
    common = {"PATH": _search_path(env), "MAKEFLAGS": f"-j{jobs}", "PYTHONUNBUFFERED": "1"}
    return {**env, **common, **policy, **launcher, **flags}


def write_launcher(directory: Path) -> Path:
    """The program CMake runs the compiler through; `-E`: no user setting changes this Python."""
    script = directory / "raise-cxx-standard.py"
    script.write_text(LAUNCHER)
    wrapper = directory / "raise-cxx-standard"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -E "{script}" "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


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


# --- the installation ---------------------------------------------------------------------------


def install(wheel: Path) -> Probe:
    """Install a wheel and try it."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    command = [*pip, "--no-deps", "--force-reinstall", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{wheel.name} could not be installed:\n{done.stderr.strip()}")
    return probe_horovod()


def _finish(installed: Probe) -> int:
    if installed.found is None:
        raise BuildError(f"Horovod was installed but does not work: {installed.error}")
    print(f"Horovod works: {_features(installed)}")
    return 0


def _operations(installed: Probe) -> set[str]:
    return {name for name in ("gloo", "nccl", "mpi") if (installed.found or {}).get(name)}


def _features(installed: Probe) -> str:
    built = ", ".join(sorted(_operations(installed))) or "no operations"
    return f"{(installed.found or {}).get('version')} with {built}"
