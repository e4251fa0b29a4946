"""`lightning-dsgd doctor`: what is installed, what works, and what to do about the rest."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from lightning_dsgd.backends.hosts import address_of, leaves_host
from lightning_dsgd.backends.seal import SECRET, SECRET_FILE
from lightning_dsgd.cli.horovod.preflight import NEEDED_MODULES
from lightning_dsgd.cli.horovod.probe import Probe, probe_horovod

DISTRIBUTIONS = (
    "lightning-dsgd",
    "torch",
    "pytorch-lightning",
    "lightning",
    "horovod",
    "pyzmq",
    "msgspec",
)
REQUIRED = {"torch": "torch", "zmq": "pyzmq", "msgspec": "msgspec", "numpy": "numpy"}

# The variable by which each launcher is known, the first that is set decides: torchrun and
# horovodrun may themselves have been started by SLURM or MPI.
LAUNCHERS = {
    "HOROVOD_RANK": "horovodrun",
    "TORCHELASTIC_RUN_ID": "torchrun",
    "OMPI_COMM_WORLD_RANK": "mpirun",
    "SLURM_PROCID": "SLURM",
}


@dataclass(frozen=True)
class Finding:
    """A problem and its remedy; a fatal one means that no strategy can run."""

    problem: str
    remedy: str
    fatal: bool = False


@dataclass
class Report:
    """All the doctor knows, as it is printed and as it is written as JSON."""

    versions: dict[str, str | None] = field(default_factory=dict)
    backends: dict[str, str] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)
    host: str = ""
    launched_by: str = "plain python"
    secret: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def can_run(self) -> bool:
        """Whether some strategy can run on some backend."""
        return not any(finding.fatal for finding in self.findings)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 when nothing can run."""
    report = examine(os.environ)
    text = json.dumps(asdict(report) | {"can_run": report.can_run}, indent=2)
    print(text if args.json else as_text(report))
    return 0 if report.can_run else 1


def examine(env: Mapping[str, str]) -> Report:
    """Look at everything; nothing here raises, whatever is broken."""
    torch_error, horovod = try_gloo(), probe_horovod()
    gpus = gpu_names()
    name = socket.gethostname()
    address = address_of(name)
    findings = [*_missing(), *_lightning(), *_backends(torch_error, horovod, bool(gpus))]
    if horovod.found is not None and not leaves_host(address):
        findings.append(_inward(name))
    return Report(
        versions={"python": platform.python_version(), **{d: _version(d) for d in DISTRIBUTIONS}},
        backends={"torch": torch_error or "works, gloo", "horovod": describe_horovod(horovod)},
        gpus=gpus,
        host=f"{name}, {address or 'which leads to no address'}",
        launched_by=launched_by(env),
        secret=describe_secret(env),
        findings=findings,
    )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _import_error(module: str) -> str:
    """Empty when the module imports; a broken binary package fails only when it is tried."""
    try:
        import_module(module)
    except Exception as error:  # a broken installation raises whatever it likes
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def try_gloo() -> str:
    """Reduce a tensor in a group of one, which is not the default group; empty when it works."""
    try:
        import torch
        from torch import distributed

        group = distributed.ProcessGroupGloo(
            distributed.HashStore(), 0, 1, timeout=timedelta(seconds=10)
        )
        group.allreduce([torch.ones(1)]).wait()  # type: ignore[attr-defined]  # not in the stub
    except Exception as error:  # builds of torch without it lack the very names
        return f"does not work: {type(error).__name__}: {error}".splitlines()[0]
    return ""


def gpu_names() -> list[str]:
    """The GPUs torch sees."""
    if _import_error("torch"):
        return []
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def describe_horovod(horovod: Probe) -> str:
    """What Horovod was built with, or why it cannot be used."""
    if horovod.found is None:
        return f"does not work: {horovod.error}"
    built = [name for name in ("gloo", "nccl", "mpi") if horovod.found.get(name)]
    return f"works, {', '.join(built)}"


def launched_by(env: Mapping[str, str]) -> str:
    """How this process was started, as far as the environment tells."""
    for variable, launcher in LAUNCHERS.items():
        if variable in env:
            return f"{launcher} ({variable}={env[variable]})"
    return "plain python"


def _missing() -> list[Finding]:
    errors = {dist: _import_error(module) for module, dist in REQUIRED.items()}
    return [
        Finding(f"{dist} cannot be imported: {error}", f"pip install {dist}", fatal=True)
        for dist, error in errors.items()
        if error
    ]


def _lightning() -> list[Finding]:
    """One copy of Lightning is enough; a second that is installed must work too."""
    errors = {name: _import_error(name) for name in ("pytorch_lightning", "lightning.pytorch")}
    if all(errors.values()):
        reason = errors["pytorch_lightning"]
        return [Finding(f"no Lightning: {reason}", "pip install pytorch-lightning", fatal=True)]
    return [
        Finding(f"{name} is installed but broken: {error}", "reinstall it")
        for name, error in errors.items()
        if error and not error.startswith("ModuleNotFoundError")
    ]


def _backends(torch_error: str, horovod: Probe, gpus: bool) -> list[Finding]:
    """Horovod is optional while torch's own backend works, and the other way round."""
    install = "lightning-dsgd install-horovod"
    found = []
    if torch_error:
        remedy = "install a torch built with Gloo"
        fatal = horovod.found is None
        found.append(Finding(f"torch.distributed {torch_error}", remedy, fatal=fatal))
    if horovod.found is None:
        absent = _version("horovod") is None
        problem = "Horovod is not installed" if absent else f"Horovod fails: {horovod.error}"
        remedy = f"{install}{'' if absent else ' --force'} (only `horovodrun` needs it)"
        needs = re.search(r"No module named '(\w+)'", horovod.error)
        if not absent and needs and needs[1] in NEEDED_MODULES:
            remedy = f"pip install {NEEDED_MODULES[needs[1]]}"
        found.append(Finding(problem, remedy))
    elif gpus and not horovod.found.get("nccl"):
        remedy = f"HOROVOD_GPU_OPERATIONS=NCCL {install} --force"
        found.append(Finding("Horovod was built without NCCL, but there are GPUs", remedy))
    return found


def _inward(name: str) -> Finding:
    """Horovod looks a host up by its own name."""
    problem = f"the name {name!r} leads to no address that other hosts reach"
    remedy = "for horovodrun on several hosts, let it lead to one, in /etc/hosts"
    return Finding(problem, remedy)


def describe_secret(env: Mapping[str, str]) -> str:
    """By what ranks on several hosts know each other."""
    if env.get(SECRET) or env.get(SECRET_FILE):
        return "set"
    return f"none: ranks trust the network they meet in (set {SECRET}; see SECURITY.md)"


def as_text(report: Report) -> str:
    """The report for people."""
    rows = {name: value or "not installed" for name, value in report.versions.items()}
    rows |= {f"backend {name}": state for name, state in report.backends.items()}
    rows["GPUs"] = ", ".join(report.gpus) or "none"
    rows["host"] = report.host
    rows["launched by"] = report.launched_by
    rows["job's secret"] = report.secret
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
    for finding in report.findings:
        mark = "ERROR" if finding.fatal else "note"
        lines += ["", f"{mark}: {finding.problem}", f"  remedy: {finding.remedy}"]
    ready = "ready to train; `lightning-dsgd selftest` tries it, with real ranks"
    verdict = ready if report.can_run else "nothing can run here"
    return "\n".join([*lines, "", verdict])
