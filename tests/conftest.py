"""One launch per launcher serves every test file of a run, and one on the test device.

`--repetitions 20` has the ranks do everything twenty times, and every test look at each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

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


class Launches:
    """Each launcher is started once, for all scenarios that its tests ask for; all at a time.

    Ranks sleep more than they compute.
    """

    def __init__(self, session: pytest.Session, tmp: pytest.TempPathFactory) -> None:
        self._count = session.config.getoption("repetitions")
        self._pool = ThreadPoolExecutor(len(launching.KINDS))
        asked = {kind: _scenarios(session, kind) for kind in launching.KINDS}
        self._futures: dict[str, Future[Path]] = {
            kind: self._pool.submit(self._launch, kind, names, tmp.mktemp(kind))
            for kind, names in asked.items()
            if names
        }

    def _launch(self, kind: str, names: list[str], out: Path) -> Path:
        places = [f"{number}/{name}" for number in range(self._count) for name in names]
        done = launching.launch(kind, places, out, timeout=1500.0 * self._count)
        assert done.returncode == 0, done.stdout[-6000:]
        return out

    def out(self, kind: str) -> Path:
        """What its ranks have left, when they have ended."""
        return self._futures[kind].result()

    def end(self) -> None:
        """Nothing of this runs any more."""
        self._pool.shutdown()


def asked(session: pytest.Session, fixture: str) -> list[Any]:
    """With what the collected tests ask for such a fixture; each once, in order."""
    calls = [getattr(item, "callspec", None) for item in session.items]
    params = [call.params[fixture] for call in calls if call and fixture in call.params]
    return [param for number, param in enumerate(params) if param not in params[:number]]


def _scenarios(session: pytest.Session, kind: str) -> list[str]:
    """What the collected tests look at that ranks of this kind have done."""
    calls = [(item, getattr(item, "callspec", None)) for item in session.items]
    params = [(item, call.params.get("launched")) for item, call in calls if call is not None]
    files: dict[Any, None] = dict.fromkeys(
        item.module for item, given in params if given is not None and given[0] == kind
    )
    names = dict.fromkeys(name for file in files for name in getattr(file, "SCENARIOS", ()))
    # a process whose last training has failed says so with its exit code
    return sorted(names, key=lambda name: not name.startswith("refusals."))


@pytest.fixture(scope="session")
def launches(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Launches]:
    """Begin with the first test that needs one of them."""
    every = Launches(request.session, tmp_path_factory)
    yield every
    every.end()


@pytest.fixture(scope="session")
def launched(request: pytest.FixtureRequest, launches: Launches) -> Path:
    """The directory with the outcome of one repetition of all scenarios."""
    kind, number = request.param
    return launches.out(kind) / str(number)
