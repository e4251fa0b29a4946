"""`lightning-dsgd selftest`, with real ranks: where all is well, and where it is not."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest

from lightning_dsgd.cli.selfcheck.checks import CHECKS, LAST
from lightning_dsgd.cli.selftest import REMEDIES
from tests.launching import BIN, ROOT, environment

LAG = ["--accelerator", "lag", "--import"]


def selftest(*words: str, code: int = 0) -> str:
    line = [str(BIN / "lightning-dsgd"), "selftest", *words]
    done = subprocess.run(
        line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=400
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout if code < 2 else done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--devices", "2", "--backend", "horovod"],
        ["--devices", "3", *LAG, "tests.lag.accelerator"],
    ],
    ids=["horovod", "an asynchronous device"],
)
def test_all_is_well(words: list[str]) -> None:
    found: dict[str, Any] = json.loads(selftest("--json", *words))
    assert found["ok"] and found["torch"]
    assert [line["check"] for line in found["checks"]] == [*CHECKS, LAST]
    assert all(line["ok"] and line["text"] for line in found["checks"])
    assert sum(line["seconds"] for line in found["checks"]) < 120.0
    device = "cpu, on the device" if "horovod" in words else "lag:0, on the device"
    assert found["checks"][0]["text"] == device


def test_a_rank_that_waits_behind_anothers_kernel_is_found() -> None:
    said = selftest("--devices", "3", *LAG, "tests.ranks.in_the_way", code=1)
    assert "ok      as DDP" in said
    (line,) = (line for line in said.splitlines() if line.startswith("FAILED"))
    assert line.split("  ")[1] == "slow kernel, backup_workers"
    assert re.search(r"rank \d: a gradient took [0-9.]+ s instead of [0-9.]+", line)
    assert f"remedy: {REMEDIES['slow kernel']}" in said and "not all is well" in said


def test_ranks_that_cannot_begin_are_shown() -> None:
    said = selftest("--devices", "2", "--import", "no_such_module", code=1)
    assert "FAILED  collectives" in said and "ended without a word" in said
    assert "No module named 'no_such_module'" in said


def test_what_cannot_be_tried_is_refused() -> None:
    assert "at least 2 ranks" in selftest("--devices", "1", code=2)
    assert "this host has 0 GPUs" in selftest("--accelerator", "cuda", code=2)


def test_every_check_has_a_remedy() -> None:
    for check in (*CHECKS, LAST):
        assert any(check.startswith(name) for name in REMEDIES)
