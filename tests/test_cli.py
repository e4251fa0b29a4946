"""The command line: commands, exit codes, and what is said about broken plugins."""

from __future__ import annotations

import json
import socket
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from lightning_dsgd import cli, registry
from lightning_dsgd.cli import algorithms, doctor
from lightning_dsgd.cli.horovod.probe import Probe
from lightning_dsgd.errors import ConfigurationError, RunError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A command module in the place of `plan`."""
    module = types.ModuleType("lightning_dsgd.cli.plan")
    module.add_arguments = lambda parser: parser.add_argument("--workers", type=int)  # type: ignore[attr-defined]
    module.run = lambda args: args.workers  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_command_module_gets_its_arguments_and_gives_the_exit_code(
    command: types.ModuleType,
) -> None:
    assert cli.main(["plan", "--workers", "7"]) == 7


@pytest.mark.parametrize("error, code", [(ConfigurationError, 2), (RunError, 1)])
def test_our_errors_end_without_a_traceback(
    command: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
    error: type[Exception],
    code: int,
) -> None:
    def fail(args: object) -> int:
        raise error("no such thing")

    command.run = fail  # type: ignore[attr-defined]
    assert cli.main(["plan"]) == code
    assert capsys.readouterr().err == "lightning-dsgd: error: no such thing\n"


@pytest.mark.parametrize(
    "words", [[], ["dctor"], ["doctor", "--jsn"], ["install-horovod", "--jobs", "0"]]
)
def test_a_usage_error_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "usage: lightning-dsgd" in capsys.readouterr().err


def test_help_lists_every_command_and_imports_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "import_module", lambda name: pytest.fail(f"imported {name}"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in cli.COMMANDS)


def entry(value: str) -> EntryPoint:
    return EntryPoint("some_algorithm", value, registry.GROUP)


class Plugin:
    paper = "Someone, Some Paper, 2016"
    summary = "goes on without the slowest"


def test_an_algorithm_tells_its_summary_and_paper() -> None:
    found = algorithms.describe(entry(f"{__name__}:Plugin"))
    assert (found.summary, found.paper, found.error) == (Plugin.summary, Plugin.paper, "")
    assert algorithms.as_text([found]).splitlines() == [
        "some_algorithm  goes on without the slowest",
        "                Someone, Some Paper, 2016",
    ]


def test_a_broken_plugin_is_one_line_among_the_others() -> None:
    broken = algorithms.describe(entry("no_such_package_at_all:Strategy"))
    fine = algorithms.describe(entry(f"{__name__}:Plugin"))
    lines = algorithms.as_text([broken, fine]).splitlines()
    assert lines[0].startswith("some_algorithm  cannot be loaded: ModuleNotFoundError")
    assert lines[1] == "some_algorithm  goes on without the slowest"


def test_algorithms_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry(f"{__name__}:Plugin")])
    assert cli.main(["algorithms", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["paper"] == Plugin.paper


def test_no_usable_algorithm_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry("no_such_package:X")])
    assert cli.main(["algorithms"]) == 1


@pytest.mark.parametrize(
    "env, expected",
    [
        ({}, "plain python"),
        ({"SLURM_PROCID": "2"}, "SLURM (SLURM_PROCID=2)"),
        ({"SLURM_PROCID": "2", "TORCHELASTIC_RUN_ID": "x"}, "torchrun (TORCHELASTIC_RUN_ID=x)"),
        ({"HOROVOD_RANK": "0"}, "horovodrun (HOROVOD_RANK=0)"),
    ],
)
def test_the_doctor_knows_the_launcher(env: dict[str, str], expected: str) -> None:
    assert doctor.launched_by(env) == expected


@pytest.fixture
def no_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_horovod", lambda: Probe(None, "no horovod"))


@pytest.mark.usefixtures("no_horovod")
def test_without_horovod_torch_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "install-horovod" in said
    assert "ready to train" in said and "selftest" in said


@pytest.mark.usefixtures("no_horovod")
def test_with_no_backend_the_doctor_fails_and_names_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "try_gloo", lambda: "does not work: no gloo")
    assert cli.main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    fatal = [finding for finding in report["findings"] if finding["fatal"]]
    assert not report["can_run"]
    assert fatal[0]["remedy"] == "install a torch built with Gloo"


@pytest.mark.usefixtures("no_horovod")
def test_a_missing_requirement_is_fatal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(doctor.REQUIRED, "no_such_package", "no-such-package")
    assert cli.main(["doctor"]) == 1
    assert "pip install no-such-package" in capsys.readouterr().out


def test_a_horovod_that_lacks_a_package_needs_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Probe(None, "ModuleNotFoundError: No module named 'yaml'")
    monkeypatch.setattr(doctor, "probe_horovod", lambda: broken)
    monkeypatch.setattr(doctor, "_version", lambda name: "0.28.1")
    assert [f.remedy for f in doctor.examine({}).findings] == ["pip install pyyaml"]


def test_gpus_without_nccl_are_worth_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    built = Probe({"version": "0.28.1", "gloo": True, "nccl": False, "mpi": False})
    monkeypatch.setattr(doctor, "probe_horovod", lambda: built)
    monkeypatch.setattr(doctor, "gpu_names", lambda: ["a GPU"])
    report = doctor.examine({})
    assert report.can_run
    assert any("NCCL" in finding.remedy for finding in report.findings)


def test_a_name_that_leads_inward_is_worth_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    built = Probe({"version": "0.28.1", "gloo": True, "nccl": False, "mpi": False})
    monkeypatch.setattr(doctor, "probe_horovod", lambda: built)
    for name, expected in (("localhost", 1), ("192.0.2.1", 0)):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        report = doctor.examine({})
        assert report.can_run and report.host.startswith(name)
        assert sum("several hosts" in finding.remedy for finding in report.findings) == expected


def test_every_package_directory_is_in_the_wheel() -> None:
    """The list is written by hand, since `plugins/` has another name when installed."""
    text = (ROOT / "pyproject.toml").read_text()
    inits = (ROOT / "lightning_dsgd").rglob("__init__.py")
    packages = [".".join(init.parent.relative_to(ROOT).parts) for init in inits]
    assert [name for name in packages if f'"{name}"' not in text] == []
