"""On an asynchronous device: right numbers, nobody held by another's kernels, no host that waits.

The device is `tests.lag`, a stand-in for a GPU: what it computes, and when, is real. Most of what
ranks do on it are the scenarios of other files, which are launched on it as well.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Launches
from tests.launching import launch, results
from tests.ranks.device import KERNEL, QUIET, SAME, SEEDS, TOLERANT

REPEATED = {"launched": ("device",)}
SCENARIOS = [
    "device.kernels_held_back",
    "device.host_waits",
    "device.gossip_waits",
    "device.memory",
]
TIMED = [
    "device.slow_kernels",
    "device.slow_kernels_in_the_way",
    "device.slowed_by_a_factor",
    "device.cancelled_kernels",
    "device.gossip_beside_a_slow_kernel",
]
FAST = range(3)
"""The ranks that are not slow."""


@pytest.mark.parametrize("name", SAME)
def test_weights_are_the_cpus_whenever_kernels_run(launched: Path, name: str) -> None:
    for found in results(launched, "device.kernels_held_back"):
        assert len(found[name]["device"]) == SEEDS
        assert found[name]["device"] == [found[name]["cpu"]] * SEEDS


@pytest.mark.parametrize("name", [*QUIET, "ad_psgd"])
def test_the_training_thread_never_waits_for_the_device(launched: Path, name: str) -> None:
    scenario = "gossip_waits" if name == "ad_psgd" else "host_waits"
    for found in results(launched, f"device.{scenario}"):
        assert len(found[name]["counts"]) >= 6
        assert sum(found[name]["counts"]) == 0, found[name]["places"]


def test_what_a_rank_holds_stays_within_its_bound(launched: Path) -> None:
    ranks = results(launched, "device.memory")
    assert max(found["held"] for found in ranks) >= ranks[0]["lag"], "somebody did lag"
    for found in ranks:
        assert found["steps"] == 1000 and found["lag"] < 64
        assert found["held"] <= found["bound"]
        assert found["grown"] <= found["bound"] + 1


@pytest.fixture(scope="module")
def timed(launches: Launches, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On a machine with nothing else to do."""
    launches.end()
    out = tmp_path_factory.mktemp("timed")
    done = launch("device", TIMED, out, LAG_FUZZ="")
    assert done.returncode == 0, done.stdout[-6000:]
    return out


@pytest.mark.parametrize("name", TOLERANT)
def test_a_slow_kernel_holds_nobody_else(timed: Path, name: str) -> None:
    """By each rank's own gradients: of updates there are fewer where one rank gives nothing."""
    for found in results(timed, "device.slow_kernels")[: FAST.stop]:
        paces = found[name]
        assert paces[10.0]["gradient"] < 1.3 * paces[1.0]["gradient"]
        if name == "backup_workers":
            assert paces[10.0]["update"] < 1.3 * paces[1.0]["update"]


@pytest.mark.parametrize("name", TOLERANT)
def test_what_kernels_take_is_counted_and_not_what_queueing_takes(timed: Path, name: str) -> None:
    paces = results(timed, "device.slow_kernels")[0][name]
    assert paces[1.0]["told"] >= KERNEL and paces[10.0]["told"] >= 10 * KERNEL


def test_a_factor_multiplies_what_kernels_take(timed: Path) -> None:
    *fast, slow = results(timed, "device.slowed_by_a_factor")[0]
    assert slow > 2 * max(fast) and min(fast) >= KERNEL


def test_with_the_old_order_of_streams_it_holds_everybody(timed: Path) -> None:
    """A test of the test above."""
    for found in results(timed, "device.slow_kernels_in_the_way")[: FAST.stop]:
        assert found[10.0]["update"] > 3 * found[1.0]["update"]


def test_cancelling_stops_a_device_within_a_few_layers(timed: Path) -> None:
    """Of 40 slow layers it still computes the few that are queued; an epoch's first gradient is not
    cancelled, and others may begin it late."""
    tally, *_ = (found["tally"] for found in results(timed, "device.cancelled_kernels"))
    slow = tally["workers"][3]
    assert slow["cancelled"] > 2 and slow["batches"] <= 1
    assert slow["cancelled_seconds"] / slow["cancelled"] < 0.5 * 40 * 0.02


def test_a_partner_s_slow_kernel_holds_nobody(timed: Path) -> None:
    for found in results(timed, "device.gossip_beside_a_slow_kernel")[: FAST.stop]:
        assert found["10.0"]["gradient"] < 1.3 * found["1.0"]["gradient"]
