"""Who may import whom is checked, and breaking it is noticed."""

from __future__ import annotations

import ast
import shutil
import statistics
import subprocess
from pathlib import Path

import pytest

from tests.launching import BIN, ROOT, environment

BREACHES = {
    ("lightning_dsgd/workers/policy.py", "import time"): "know no tensors, no clock",
    ("lightning_dsgd/exchange/desk.py", "import pytorch_lightning"): "imports Lightning",
    ("lightning_dsgd/simulate/clock.py", "import threading"): "reaches no thread",
    ("lightning_dsgd/trainer/rounds.py", "import horovod"): "Only the backends",
    ("lightning_dsgd/control/alarm.py", "import lightning_dsgd.trainer.rounds"): "The rooms",
    ("lightning_dsgd_plugins/k_family.py", "import zmq"): "An algorithm handles",
    ("lightning_dsgd/simulate/runs.py", "import lightning_dsgd_plugins"): "Nobody but their entry",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of both packages with the contracts."""
    for source, target in (("lightning_dsgd", ""), ("plugins", "lightning_dsgd_plugins")):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / source, tmp_path / (target or source), ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def _lint(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "lint-imports"), "--no-cache"],
        cwd=tree,
        env=environment(PYTHONPATH=str(tree), COLUMNS="200"),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_breach_of_each_contract_is_named(tree: Path) -> None:
    assert _lint(tree).returncode == 0
    for (file, line), contract in BREACHES.items():
        path = tree / file
        before = path.read_text()
        path.write_text(before.replace("annotations\n", f"annotations\n\n{line}\n", 1))
        done = _lint(tree)
        broken = [text for text in done.stdout.splitlines() if text.endswith("BROKEN")]
        assert done.returncode == 1 and any(contract in text for text in broken), (file, done)
        path.write_text(before)


def _sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


OURS = ("lightning_dsgd", "plugins")


def test_no_file_is_longer_than_one_can_read() -> None:
    everything = _sources(*OURS, "tests", "benchmarks", "examples")
    lengths = {path: len(path.read_text().splitlines()) for path in everything}
    assert {path: count for path, count in lengths.items() if count > 450} == {}


def test_functions_are_short() -> None:
    trees = [ast.parse(path.read_text()) for path in _sources(*OURS)]
    functions = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    lengths = [f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno is not None]
    assert statistics.median(lengths) <= 8
