"""What torch and Horovod are there, found by trying them in a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

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


def operations(installed: Probe) -> set[str]:
    """What Horovod was built with, by the names that users ask for it."""
    return {name for name in ("gloo", "nccl", "mpi") if (installed.found or {}).get(name)}


def features(installed: Probe) -> str:
    """Version and operations, for people."""
    built = ", ".join(sorted(operations(installed))) or "no operations"
    return f"{(installed.found or {}).get('version')} with {built}"
