"""A slow rank takes part in proportion to its speed, on both backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Launches
from tests.launching import LAUNCHERS, launch, results


@pytest.fixture(scope="module", params=LAUNCHERS)
def alone(
    request: pytest.FixtureRequest, launches: Launches, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """On a machine with nothing else to do: beside other ranks an update costs more."""
    launches.end()
    out = tmp_path_factory.mktemp("share")
    done = launch(request.param, ["numerics.share_of_slow_rank"], out)
    assert done.returncode == 0, done.stdout[-6000:]
    return out


def test_a_slow_rank_gives_in_proportion_to_its_speed(alone: Path) -> None:
    """Ten times slower, so about a tenth of a fast rank's mini-batches."""
    for name, tally in results(alone, "numerics.share_of_slow_rank")[0].items():
        workers = tally["workers"]
        made = [worker["contributions"] for worker in workers]
        pace = [worker["seconds"] / worker["contributions"] for worker in workers]
        fast = sum(made[:3]) / 3
        speed = sum(pace[:3]) / 3 / pace[3]
        assert made[3] / fast == pytest.approx(speed, rel=0.2), (name, made, pace)
