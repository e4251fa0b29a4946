"""Somebody else's algorithm is a first-class citizen: installed from outside, found by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launching import BIN, ROOT, command, environment

PROGRAM = """
import sys
import lightning_dsgd
import windowed_sgd
from tests.ranks.toy import Toy, digest, loader, trainer_for

by_hand = windowed_sgd.WindowedStrategy(trace=sys.argv[1], timeout=60.0)
for name, strategy in (("by name", "windowed"), ("by hand", by_hand)):
    trainer = trainer_for(strategy, max_steps=12, max_epochs=-1, devices=2)
    module = Toy()
    trainer.fit(module, loader())
    text = f"{name} {trainer.global_step} {digest(module)}"
    print(f"\\nrank {trainer.global_rank}: {text}", flush=True)
if trainer.is_global_zero:
    print(by_hand.tally.table())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed the package."""
    site = tmp_path_factory.mktemp("site")
    source = Path(__file__).parent / "outside"
    line = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    copy = tmp_path_factory.mktemp("source")  # pip leaves its build there
    for file in source.iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    subprocess.run([*line, "--target", str(site), str(copy)], check=True, timeout=120)
    return site


@pytest.fixture(scope="module")
def trace(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks leave behind that have trained with it."""
    out = tmp_path_factory.mktemp("trained")
    (out / "program.py").write_text(PROGRAM)
    said = _run(site, [*command("torchrun", 2), str(out / "program.py"), str(out / "trace")])
    lines = [line.split(": ")[1] for line in said.splitlines() if ": by " in line]
    assert len(lines) == 4 and len(set(lines)) == 2, said  # both ranks with the same weights
    assert all(line.split()[2] == "12" for line in lines)
    assert "12 updates" in said and "mean staleness" in said
    return out / "trace"


def _run(site: Path, line: list[str], code: int = 0) -> str:
    path = os.pathsep.join([str(site), str(ROOT)])
    done = subprocess.run(
        line, env=environment(PYTHONPATH=path), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout if code == 0 else done.stderr


def _command(site: Path, *words: str, code: int = 0) -> str:
    return _run(site, [str(BIN / "lightning-dsgd"), *words], code)


def test_it_is_listed(site: Path) -> None:
    found: list[dict[str, Any]] = json.loads(_command(site, "algorithms", "--json"))
    (mine,) = (algorithm for algorithm in found if algorithm["name"] == "windowed")
    assert mine["distribution"] == "windowed-sgd" and mine["paper"] == "nobody 2026"


def test_it_trains_by_name_and_its_record_replays(site: Path, trace: Path) -> None:
    answer = json.loads(_command(site, "simulate", str(trace), "--json"))
    assert answer["same_decisions"] is True and answer["strategy"] == "windowed"
    assert answer["gradients_per_update"] > 1.0


def test_it_is_simulated_with_its_own_rule_and_policy(site: Path) -> None:
    cluster = str(ROOT / "docs" / "cluster.yaml")
    words = ["simulate", cluster, "--strategy", "windowed", "--updates", "200", "--json"]
    wide, narrow = (
        json.loads(_command(site, *words, "--set", f"window={window}")) for window in (0.5, 0.05)
    )
    assert wide["seconds_per_update"] > narrow["seconds_per_update"]
    assert wide["gradients_per_update"] > narrow["gradients_per_update"] >= 2.0
    refused = _command(site, *words, "--set", "window=0", code=2)
    assert "window=0 must be a positive number" in refused


def test_it_is_planned_and_its_configuration_can_be_used(site: Path, tmp_path: Path) -> None:
    cluster = str(ROOT / "docs" / "cluster.yaml")
    words = ["--strategies", "windowed", "--updates", "200", "--plot", str(tmp_path / "plan.png")]
    text = _command(site, "plan", cluster, *words)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    config = yaml.safe_load(text[text.index("# Trainer") :])["trainer"]["strategy"]
    assert config["class_path"] == "windowed_sgd.WindowedStrategy"
    assert config["init_args"]["window"] > 0
    few = ["--workers", "2", "--updates", "100", "--json"]
    everything = json.loads(_command(site, "plan", cluster, *few))
    assert "windowed" in {option["strategy"] for option in everything["options"]}
