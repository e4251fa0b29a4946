"""One launch per launcher serves every test file of a run.

`--repetitions 20` has the ranks do everything twenty times, and every test look at each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import launching

REPEATED = {"launched": launching.LAUNCHERS}
"""Fixtures that stand for what ranks have done, and the kinds of each."""


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "how often ranks do what the tests look at"
    parser.addoption("--repetitions", type=int, default=1, metavar="N", help=text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Kinds times repetitions; a test file may have such fixtures of its own."""
    for name, kinds in {**REPEATED, **getattr(metafunc.module, "REPEATED", {})}.items():
        if name in metafunc.fixturenames:
            count = metafunc.config.getoption("repetitions")
            params = [(kind, number) for number in range(count) for kind in kinds]
            ids = [launching.label(kind) + (f"-{n}" if count > 1 else "") for kind, n in params]
            metafunc.parametrize(name, params, ids=ids, indirect=True, scope="session")


@pytest.fixture(scope="session")
def launch_all(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Starts a launcher once, for all scenarios that the collected test files ask for."""
    files = dict.fromkeys(item.module for item in request.session.items)
    asked = dict.fromkeys(name for file in files for name in getattr(file, "SCENARIOS", ()))
    # a process whose last training has failed says so with its exit code
    names = sorted(asked, key=lambda name: not name.startswith("refusals."))
    count = request.config.getoption("repetitions")
    places = [f"{number}/{name}" for number in range(count) for name in names]

    @functools.cache
    def start(launcher: str) -> Path:
        out = tmp_path_factory.mktemp(launcher)
        done = launching.launch(launcher, places, out, timeout=900.0 * count)
        assert done.returncode == 0, done.stdout[-6000:]
        return out

    return start


@pytest.fixture(scope="session")
def launched(request: pytest.FixtureRequest, launch_all: Callable[[str], Path]) -> Path:
    """The directory with the outcome of one repetition of all scenarios."""
    launcher, number = request.param
    return launch_all(launcher) / str(number)
