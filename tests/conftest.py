"""One launch per launcher serves every test file of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import launching


@pytest.fixture(scope="session", params=launching.LAUNCHERS)
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the outcome of all scenarios that the collected test files ask for."""
    files = dict.fromkeys(item.module for item in request.session.items)
    names = [name for file in files for name in getattr(file, "SCENARIOS", ())]
    out = tmp_path_factory.mktemp(request.param)
    done = launching.launch(request.param, list(dict.fromkeys(names)), out, timeout=900.0)
    assert done.returncode == 0, done.stdout[-6000:]
    return out


@pytest.fixture
def trained(launched: Path) -> Path:
    """The outcome of the rounds strategies' scenarios."""
    return launched / "training"
