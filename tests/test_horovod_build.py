"""`install-horovod` without building Horovod: the key, the checks, the cache, the explanations."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_dsgd import cli
from lightning_dsgd.cli import install_horovod as command
from lightning_dsgd.cli.horovod import (
    build,
    cache,
    failure,
    flags,
    install,
    preflight,
    probe,
    progress,
)
from lightning_dsgd.cli.horovod.probe import Probe

TORCH = {"version": "2.13.0", "abi": 1}
NONE = Probe(None, "No module named 'horovod'")
WORKS = Probe({"version": "0.28.1", "gloo": True, "nccl": False, "mpi": False})


def program(directory: Path, name: str, body: str) -> Path:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


# --- the key ------------------------------------------------------------------------------------


def test_the_key_changes_with_all_a_wheel_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = flags.build_flags({})
    keys = {
        cache.cache_key(TORCH, chosen),
        cache.cache_key({**TORCH, "version": "2.12.0"}, chosen),
        cache.cache_key({**TORCH, "abi": 0}, chosen),
        cache.cache_key(TORCH, {**chosen, "HOROVOD_GPU_OPERATIONS": "NCCL"}),
    }
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(cache, "_processor", lambda: "another processor")
        keys.add(cache.cache_key(TORCH, chosen))
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    keys.add(cache.cache_key(TORCH, chosen))
    assert len(keys) == 6


def test_the_key_ignores_the_order_of_flags() -> None:
    chosen = flags.build_flags({})
    reordered = dict(reversed(chosen.items()))
    assert cache.cache_key(TORCH, chosen) == cache.cache_key(TORCH, reordered)


def test_settings_of_the_user_win_over_defaults() -> None:
    chosen = flags.build_flags({"HOROVOD_WITH_MPI": "1", "HOROVOD_WITHOUT_GLOO": "1", "HOME": "/"})
    assert chosen["HOROVOD_WITH_MPI"] == chosen["HOROVOD_WITHOUT_GLOO"] == "1"
    assert not {"HOROVOD_WITHOUT_MPI", "HOROVOD_WITH_GLOO", "HOME"} & chosen.keys()


def test_wheels_go_to_the_cache_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.wheel_root(None) == tmp_path / "lightning-dsgd" / "wheels"
    assert cache.wheel_root(tmp_path / "here") == tmp_path / "here"


# --- the checks before --------------------------------------------------------------------------


def test_each_missing_tool_is_named_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight.sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    problems = preflight.preflight({"PATH": str(tmp_path)})
    said = " ".join(problem.what for problem in problems)
    assert len(problems) == 4
    for what in ("C++ compiler", "make not found", "cmake not found", "headers"):
        assert what in said
    assert all(problem.remedy for problem in problems)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(preflight.NEEDED_MODULES, "no_such_module", "no-such-distribution")
    problem = preflight.no_module()
    assert problem is not None
    assert "no-such-distribution" in problem.what
    assert problem.remedy == "pip install no-such-distribution"


@pytest.mark.parametrize("version, fine", [("3.16.9", False), ("3.17.0", True), ("4.1.2", True)])
def test_cmake_must_be_young_enough(tmp_path: Path, version: str, fine: bool) -> None:
    cmake = program(tmp_path, "cmake", f"echo cmake version {version}")
    problem = preflight._no_cmake({"HOROVOD_CMAKE": str(cmake)}, os.defpath)
    assert (problem is None) == fine


def test_a_refusal_lists_the_problems_and_builds_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "probe_horovod", lambda: NONE)
    monkeypatch.setattr(command, "probe_torch", lambda: Probe(TORCH))
    problem = preflight.Problem("no make", "get make")
    monkeypatch.setattr(command, "preflight", lambda env: [problem])
    monkeypatch.setattr(command, "build", lambda *_: pytest.fail("built"))
    assert cli.main(["install-horovod", "--wheel-dir", str(tmp_path)]) == 1
    assert "no make\n    remedy: get make" in capsys.readouterr().err


def test_without_torch_there_is_nothing_to_build_against(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "probe", lambda program: NONE)
    assert cli.main(["install-horovod"]) == 1
    assert "pip install torch" in capsys.readouterr().err


# --- the launcher -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, passed",
    [
        ("-std=c++14", "-std=c++17"),
        ("-std=gnu++11", "-std=gnu++17"),
        ("-std=c++20", "-std=c++20"),
        ("-std=c99", "-std=c99"),
        ("-DX=-std=c++14", "-DX=-std=c++14"),
    ],
)
def test_the_launcher_raises_old_standards_only(tmp_path: Path, given: str, passed: str) -> None:
    launcher = build.write_launcher(tmp_path)
    line = [launcher, "echo", "-O2", "-g", given, "-gz", "a b"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.stdout == f"-O2 {passed} -gz a b\n", "no debug information, no other change"


# --- the build ----------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A machine on which every check passes; the list fills with the wheels installed."""
    installed: list[Path] = []

    def record(wheel: Path) -> Probe:
        installed.append(wheel)
        return WORKS

    monkeypatch.setattr(command, "probe_horovod", lambda: NONE)
    monkeypatch.setattr(command, "probe_torch", lambda: Probe(TORCH))
    monkeypatch.setattr(command, "preflight", lambda env: [])
    monkeypatch.setattr(install, "install", record)
    return installed


def pretend(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let the build be a shell script; `$0` is the directory the wheel belongs in."""
    monkeypatch.setattr(build, "_pip_wheel", lambda work: ["sh", "-c", script, str(work)])


WHEEL = 'touch "$0/horovod-0.28.1-py3-none-any.whl"'


def test_a_wheel_is_built_once(
    machine: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, WHEEL)
    assert cli.main(["install-horovod", "--wheel-dir", str(tmp_path)]) == 0
    pretend(monkeypatch, "exit 3")
    assert cli.main(["install-horovod", "--wheel-dir", str(tmp_path)]) == 0
    assert machine[0] == machine[1]
    assert machine[0].is_relative_to(tmp_path)
    assert list(machine[0].parent.iterdir()) == [machine[0]]


@pytest.mark.parametrize("option", ["--force", "--no-cache"])
def test_the_cache_can_be_passed_by(
    machine: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    pretend(monkeypatch, WHEEL)
    assert cli.main(["install-horovod", "--wheel-dir", str(tmp_path)]) == 0
    pretend(monkeypatch, "exit 3")
    assert cli.main(["install-horovod", "--wheel-dir", str(tmp_path), option]) == 1


def test_without_the_cache_no_wheel_is_kept(
    machine: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, WHEEL)
    assert cli.main(["install-horovod", "--wheel-dir", str(tmp_path), "--no-cache"]) == 0
    assert len(machine) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_cached_wheel_that_does_not_work_is_built_again(
    machine: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shelf = tmp_path / cache.cache_key(TORCH, flags.build_flags(os.environ))
    shelf.mkdir()
    (shelf / "horovod-0.28.1-py3-none-any.whl").write_text("broken")
    broken = lambda wheel: Probe(None, "undefined symbol") if wheel.read_text() else WORKS  # noqa: E731
    monkeypatch.setattr(install, "install", broken)
    pretend(monkeypatch, WHEEL)
    assert cli.main(["install-horovod", "--wheel-dir", str(tmp_path)]) == 0


def test_a_cached_wheel_is_not_installed_without_what_it_imports(
    machine: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, WHEEL)
    assert cli.main(["install-horovod", "--wheel-dir", str(tmp_path)]) == 0
    monkeypatch.setitem(preflight.NEEDED_MODULES, "no_such_module", "no-such-distribution")
    assert cli.main(["install-horovod", "--wheel-dir", str(tmp_path)]) == 1
    assert len(machine) == 1


def test_a_cache_that_cannot_be_written_does_not_matter(
    machine: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, WHEEL)
    (tmp_path / "file").write_text("in the way")
    assert cli.main(["install-horovod", "--wheel-dir", str(tmp_path / "file")]) == 0
    assert len(machine) == 1


def test_a_horovod_that_works_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "probe_horovod", lambda: WORKS)
    assert cli.main(["install-horovod"]) == 0
    assert "already works here: 0.28.1 with gloo" in capsys.readouterr().out


@pytest.mark.parametrize(
    "setting", ["HOROVOD_GPU_OPERATIONS=NCCL", "HOROVOD_GPU_ALLREDUCE=MPI", "HOROVOD_WITH_MPI=1"]
)
def test_a_horovod_without_what_the_settings_ask_for_is_built_anew(
    machine: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    setting: str,
) -> None:
    pretend(monkeypatch, WHEEL)
    monkeypatch.setattr(command, "probe_horovod", lambda: WORKS)
    monkeypatch.setenv(*setting.split("="))
    assert cli.main(["install-horovod", "--wheel-dir", str(tmp_path)]) == 0
    assert len(machine) == 1
    assert "but without " in capsys.readouterr().out


def test_a_failed_build_says_why_and_keeps_the_log(
    machine: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command.tempfile, "tempdir", str(tmp_path))
    errors = "\n".join(f"x.cc:{n}: error: number {n}" for n in range(9))
    pretend(monkeypatch, f"echo '[ 50%] Building'; echo '{errors}'; exit 1")
    assert cli.main(["install-horovod", "--no-cache"]) == 1
    said = capsys.readouterr().err
    (log,) = tmp_path.glob("*.log")
    assert "error: number 0" in said
    assert "error: number 5" not in said
    assert str(log) in said
    assert machine == []


def test_a_killed_compiler_points_at_memory(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("c++: fatal error: Killed signal terminated program cc1plus\n")
    assert "--jobs 1" in failure.explain(log, 1)


def test_a_log_without_errors_shows_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {n}" for n in range(100)))
    assert "line 99" in failure.explain(log, 1)


def test_the_build_does_not_inherit_the_flags_of_an_outer_make(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MAKEFLAGS", "w --jobserver-auth=3,4")
    monkeypatch.setenv("MAKELEVEL", "1")
    env = build._build_env(tmp_path, {"HOROVOD_GPU_OPERATIONS": "NCCL"}, jobs=3)
    assert env["MAKEFLAGS"] == "-j3"
    assert "MAKELEVEL" not in env
    assert env["HOROVOD_GPU_OPERATIONS"] == "NCCL"


def test_an_interrupt_takes_the_compilers_along(tmp_path: Path) -> None:
    class Interrupted(progress.Progress):
        def show(self, line: str) -> None:
            if line.isdigit():  # the grandchild's id: it is running
                raise KeyboardInterrupt

    log = tmp_path / "log"
    script = ["sh", "-c", "sleep 600 & echo $!; wait"]
    with pytest.raises(KeyboardInterrupt):
        progress.run_logged(script, os.environ, log, Interrupted(io.StringIO()))
    assert not alive(int(log.read_text()))


def alive(pid: int) -> bool:
    """Whether a process still runs, given a while to end; one that nobody reaped does not."""
    for _ in range(200):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return False
        time.sleep(0.05)
    return True


# --- progress and probes ------------------------------------------------------------------------


def test_progress_is_the_last_step_of_cmake(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("starting\n[ 10%] Building a.cc\n[ 45%] Building b.cc\nwarning: something\n")
    assert progress.state_of(log) == "[ 45%] Building b.cc"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "out, shown", [(io.StringIO(), ["  16 s  two\n"]), (Terminal(), ["one", "two"])]
)
def test_progress_is_rare_in_a_file_and_steady_on_a_terminal(
    out: io.StringIO, shown: list[str]
) -> None:
    times = iter([0.0, 1.0, 16.0])
    display = progress.Progress(out, clock=lambda: next(times))
    display.show("one")
    display.show("two")
    text = out.getvalue()
    assert all(part in text for part in shown)
    assert ("one" in text) == out.isatty()


def test_a_probe_reports_the_last_line_of_an_error() -> None:
    found = probe.probe("raise ImportError('undefined symbol: x')")
    assert found == Probe(None, "ImportError: undefined symbol: x")


def test_a_probe_survives_a_crash() -> None:
    found = probe.probe("import os; os.abort()")
    assert found.found is None
    assert "exit code" in found.error


def test_a_probe_does_not_join_the_job_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "3")
    found = probe.probe("import os, json; print(json.dumps({'r': os.getenv('HOROVOD_RANK')}))")
    assert found.found == {"r": None}


def test_the_torch_probe_needs_no_more_than_torch() -> None:
    pytest.importorskip("torch")
    found = probe.probe_torch().found
    assert found is not None
    assert set(found) == {"version", "abi"}


STEPS = sorted(Path(probe.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("file", [Path(command.__file__), *STEPS], ids=lambda file: file.stem)
def test_importing_the_command_needs_only_the_standard_library(file: Path) -> None:
    """It repairs installations; what it imports may be what is broken."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    others = {name for name in names if not name.startswith("lightning_dsgd.cli.horovod.")}
    assert {name.split(".")[0] for name in others} <= set(sys.stdlib_module_names)
