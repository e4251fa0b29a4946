"""One launch per launcher serves all checks of the training scenarios."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import launching
from tests.ranks import training


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Lightning's launcher writes the rank into this process's environment: undo it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session", params=launching.LAUNCHERS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with every training scenario's outcome, for each launcher in turn."""
    out = tmp_path_factory.mktemp(request.param)
    names = training.NAMES
    done = launching.launch(request.param, "training", names, out, timeout=900.0)
    assert done.returncode == 0, done.stdout[-6000:]
    return out


@pytest.fixture(scope="session")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lightning's own DDP on the same problem."""
    out = tmp_path_factory.mktemp("ddp")
    launching.launch("torchrun", "training", ["lightning_ddp"], out)
    return out
