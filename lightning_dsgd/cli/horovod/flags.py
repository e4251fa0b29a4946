"""The HOROVOD_* settings of a build: the user's, and defaults where the user is silent."""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT_FLAGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}


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
