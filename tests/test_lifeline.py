"""Who fails before training, or where nothing is trained, takes the others along at once."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from lightning_dsgd import BackupWorkersStrategy
from lightning_dsgd.control.alarm import Alarm
from lightning_dsgd.errors import RoundTimeoutError
from lightning_dsgd.exchange.gossip import GossipExchange, SharedModel
from lightning_dsgd.exchange.gradients import Flat
from tests.launching import ROOT, environment, results
from tests.ranks.lifeline import MISTAKE, STAGES, VICTIM
from tests.test_control_plane import Job
from tests.test_narrow import STREAMS

SCENARIOS = [f"lifeline.{n}" for n in ("stages", "before_the_meeting", "one_chosen_interface")]
SOON = 20.0
"""Seconds; the `timeout` is 60."""


@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_outside_training_is_named_on_all_ranks(launched: Path, stage: str) -> None:
    for rank, found in enumerate(results(launched, "lifeline.stages")):
        run = found[stage]
        kind = "ValueError" if rank == VICTIM else f"PeerFailedError: rank {VICTIM} failed"
        assert run["end"].startswith(kind) and MISTAKE in run["end"], (rank, run)
        assert run["seconds"] < SOON, (rank, run)


def test_who_fails_before_the_ranks_meet_is_named(launched: Path) -> None:
    if launched.parent.name.startswith("horovodrun"):
        pytest.skip("Horovod meets by itself, and has interfaces of its own")
    for rank, run in enumerate(results(launched, "lifeline.before_the_meeting")):
        kind = "" if rank == VICTIM else f"PeerFailedError: rank {VICTIM} failed: "
        assert run["end"].startswith(f"{kind}ConfigurationError: GLOO_SOCKET_IFNAME=nowhere"), run
        assert run["seconds"] < SOON, run


def test_an_interface_may_be_chosen_on_one_rank_alone(launched: Path) -> None:
    runs = results(launched, "lifeline.one_chosen_interface")
    assert {run["end"] for run in runs} == {"finished"}, runs


def test_gossip_blames_rank_0_and_no_network_when_that_does_not_answer() -> None:
    with contextlib.closing(Job()) as job:
        job.coordinator.end()  # it listens, and decides no more
        exchange = GossipExchange(
            1, {}, job.controls[1], SharedModel(Flat([]), STREAMS), lambda: Flat([]), Alarm(),
            STREAMS, active=True, timeout=0.5,
        )  # fmt: skip
        exchange.computed()
        with pytest.raises(RoundTimeoutError) as caught:
            exchange.may_go_on()
        exchange.close()
    assert str(caught.value) == (
        "rank 1: rank 0 has not answered for 0.5 s (timeout); its process is busy, stopped or "
        "swapped out"
    )


class SIGTERMException(SystemExit):
    """As Lightning raises it, of either copy."""


@pytest.mark.parametrize("lost", [True, False])
def test_who_is_ended_by_the_launcher_is_not_blamed_for_a_lost_rank(lost: bool) -> None:
    with contextlib.closing(Job()) as job:
        strategy = BackupWorkersStrategy()
        strategy._control, strategy.alarm = job.controls[1], job.controls[1].alarm
        left: list[str | None] = []
        if lost:
            job.coordinator._lose(0)  # it takes a while to be known
        with mock.patch.object(strategy.control, "leave", left.append):
            strategy.on_exception(SIGTERMException())
        assert left == ([None] if lost else ["SIGTERMException: "])


HALF_WAY = """
import os, socket, sys, threading
from lightning_dsgd.trainer import coordinated
from tests.ranks.toy import Toy, loader, trainer_for

class Meeting:
    seal, came = None, False
    def introduce(self, card):
        if not self.came:
            self.came = True
            return [card, card]
        print("open", *listening())
        raise RuntimeError("the other rank is gone")
    def __getattr__(self, name):
        return lambda *given: None

def listening():
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield copy.getsockname()[1]
        except OSError:
            pass

coordinated.CoordinatedStrategy._connect = lambda self: Meeting()
trainer = trainer_for("backup_workers", devices=2, max_epochs=1)
try:
    trainer.fit(Toy(), loader())
except RuntimeError as error:
    print("error", error)
print("threads", *(t.name for t in threading.enumerate() if t.name.startswith("dsgd")))
print("left", *listening(), flush=True)
"""


def test_a_failure_while_the_control_plane_comes_up_leaves_no_port() -> None:
    """The coordinator listens already, and there is no connection to it yet."""
    launched = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "2"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    done = subprocess.run(
        [sys.executable, "-c", HALF_WAY],
        cwd=ROOT,
        env=environment(**launched, **meeting, LOCAL_WORLD_SIZE="2"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    assert said["error"] == "the other rank is gone", done.stderr
    assert said["open"] and not said["left"] and not said["threads"], said
