"""The control plane: who is lost or fails, what waits, what is malformed; and idle ranks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from lightning_dsgd.control.alarm import Alarm
from lightning_dsgd.control.coordinator import Coordinator
from lightning_dsgd.control.link import Control, Wait
from lightning_dsgd.errors import PeerFailedError, PeerLostError, RoundTimeoutError
from lightning_dsgd.workers.messages import (
    Contribution,
    Decision,
    Event,
    Overdue,
    Segment,
    decode_downward,
)
from lightning_dsgd_plugins.k_family import FirstKPolicy
from tests.launching import ROOT, environment, results

SCENARIOS = ["idle.idle"]


def until(condition: object, seconds: float = 20.0) -> bool:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


class Job:
    """A coordinator and its ranks' controls in one process."""

    def __init__(self, timeout: float = 60.0, ranks: int = 2) -> None:
        self.keys = [zmq.curve_keypair() for _ in range(ranks)]
        public = [key for key, _ in self.keys]
        self.coordinator = Coordinator(public, "127.0.0.1", timeout=timeout, warn=lambda text: None)
        self.coordinator.start()
        self.alarms = [Alarm() for _ in range(ranks)]
        self.controls = [
            Control(self.coordinator.ticket, rank, alarm, self.keys[rank])
            for rank, alarm in enumerate(self.alarms)
        ]
        for control in self.controls:
            control.await_welcome()
        self.policy = FirstKPolicy(ranks, ranks)
        self.coordinator.begin(self.policy)

    def round(self, number: int) -> None:
        self.controls[0].announce(Segment(number))
        for rank, control in enumerate(self.controls):
            control.announce(Contribution(rank, number, number - 1))
        for control in self.controls:
            assert control.rounds.poll(20_000)
            assert decode_downward(control.rounds.recv()).number == number

    def close(self) -> None:
        for control in self.controls:
            control.leave()
        for control in self.controls:
            control.close()
        self.coordinator.stop()


def cut(job: Job, rank: int, role: str) -> None:
    """One connection is lost on the way."""
    ends = {whose: end for end, whose in job.coordinator._connections.items()}
    with socket.socket(fileno=os.dup(ends[rank, role])) as end:
        end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.close()


def port(job: Job) -> int:
    return int(job.coordinator.ticket.endpoint.rsplit(":", 1)[1])


def test_garbage_is_dropped_and_counted(job: Job) -> None:
    job.round(1)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 50, bytes(range(256)) * 20):
        with socket.create_connection(("127.0.0.1", port(job))) as stranger:
            stranger.sendall(garbage)
    assert until(lambda: job.coordinator.tally.foreign >= 1)
    job.round(2)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("role", ["main", "rounds", "life"])
def test_a_rank_is_lost_with_any_of_its_connections(role: str, rank: int) -> None:
    """It is told, too, and blames nobody else."""
    with contextlib.closing(Job(ranks=3)) as job:
        cut(job, rank, role)
        assert until(lambda: all(alarm.error is not None for alarm in job.alarms))
        said = [str(alarm.error) for alarm in job.alarms]
        own = said.pop(rank)
        assert all(f"rank {rank} is lost" in text for text in said)
        alone = "rank 0 is lost" if role == "life" else f"rank {rank} has lost a connection"
        assert alone in own


class Verbose(FirstKPolicy):
    """Gives reasons that fill every buffer on the way."""

    def handle(self, event: Event, now: float) -> Sequence[Decision]:
        return [
            msgspec.structs.replace(decision, reason="r" * 10_000)
            for decision in super().handle(event, now)
        ]


def test_decisions_wait_for_a_rank_that_does_not_listen(job: Job) -> None:
    """None may be dropped on the way, however many are queued."""
    first, second = job.controls
    second.rounds.rcvhwm = 1  # or it would listen in the background
    job.coordinator.begin(Verbose(2, 2))
    for number in range(1, 4001):
        first.announce(Segment(number))
        for rank, control in enumerate(job.controls):
            control.announce(Contribution(rank, number, number - 1))
        assert first.rounds.poll(20_000)
        first.rounds.recv()
    for number in range(1, 4001):
        assert second.rounds.poll(2_000), f"decision {number} was dropped"
        assert decode_downward(second.rounds.recv()).number == number


def test_the_regular_end_of_rank_0_is_no_loss() -> None:
    job = Job()
    job.controls[0].leave()
    job.controls[0].close()
    job.coordinator.stop()
    until(lambda: job.alarms[1].error is not None, 1.0)
    job.controls[1].leave()
    job.controls[1].close()
    assert job.alarms[1].error is None


def test_connections_that_nobody_has_closed_do_not_hold_up_the_garbage_collector() -> None:
    program = """
import gc
from tests.test_control_plane import Job
job = Job()
job.coordinator.stop(failed=True)
for control in job.controls:
    control._thread.join(20)
job.itself = job
del control, job
gc.collect()
"""
    line = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(line, cwd=ROOT, env=environment(), timeout=60, check=False)
    assert done.returncode == 0


def test_a_second_training_is_decided_by_its_own_policy(job: Job) -> None:
    job.round(1)
    job.coordinator.end()
    job.controls[0].announce(Contribution(0, 9, 0))  # a late word
    job.policy = FirstKPolicy(2, 2)
    tally = job.coordinator.begin(job.policy)
    job.round(1)
    assert tally.rounds == 1


def test_a_forked_child_does_not_keep_its_parents_connections() -> None:
    """A DataLoader's worker outlives a rank that is killed; the others notice all the same."""
    with contextlib.closing(Job()) as job:
        parent, child = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=_list_ports, args=(child,))
        process.start()
        inherited = parent.recv()
        process.join(20)
        assert port(job) not in inherited


def _list_ports(pipe: Any) -> None:
    ports = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as copy:
            if copy.family == socket.AF_INET:
                ports.append(copy.getsockname()[1])
                ports.append(copy.getpeername()[1])
    pipe.send(ports)


def test_malformed_messages_and_impersonation_are_counted(job: Job) -> None:
    job.controls[0]._main.send(b"\xff\x00nonsense")
    job.controls[0]._main.send_multipart([b"two", b"frames"])
    job.controls[0].announce(Contribution(1, 1, 0))
    deep = b"\x91" * 5000 + b"\x00"  # a list in a list in a list ...
    job.controls[0]._main.send(b"\x83\xa4type\xa5Hello\xa6worker\x00\xa1x" + deep)
    assert until(lambda: job.coordinator.tally.foreign == 4)
    job.round(1)


def test_the_port_is_not_open_to_all_interfaces(job: Job) -> None:
    assert job.coordinator.ticket.endpoint.startswith("tcp://127.0.0.1:")


def test_a_rank_that_fails_is_named_to_the_others(job: Job) -> None:
    job.controls[1].leave("ValueError: oh")
    assert until(lambda: job.alarms[0].error is not None)
    assert isinstance(job.alarms[0].error, PeerFailedError)
    assert str(job.alarms[0].error) == "rank 1 failed: ValueError: oh"


def test_a_rank_that_vanishes_is_named_to_the_others(job: Job) -> None:
    job.controls.pop().close()
    assert until(lambda: job.alarms[0].error is not None)
    assert isinstance(job.alarms[0].error, PeerLostError)
    assert "rank 1 is lost" in str(job.alarms[0].error)


def test_a_round_that_waits_too_long_names_who_is_missing() -> None:
    with contextlib.closing(Job(timeout=1.0)) as job:
        job.controls[0].announce(Segment(5))
        job.controls[0].announce(Contribution(0, 1, 0))
        wait = Wait(job.controls[0], 1)
        with pytest.raises(RoundTimeoutError, match=r"update 1 has waited 1 s .* for rank 1"):
            until(lambda: not wait.check())


def test_a_decision_that_came_meanwhile_is_no_reason_to_end(job: Job) -> None:
    job.controls[0].announce(Segment(5))
    for rank in range(2):
        job.controls[rank].announce(Contribution(rank, 1, 0))
    assert until(lambda: job.policy.version == 1)
    job.controls[0].announce(Overdue(0, 1))
    assert not until(lambda: job.alarms[0].error is not None, 0.5)


def test_threads_are_named_and_gone_at_the_end() -> None:
    job = Job()
    names = {thread.name for thread in threading.enumerate()}
    assert {"dsgd-coordinator", "dsgd-lifeline"} <= names
    job.close()
    assert not {t.name for t in threading.enumerate() if t.name.startswith("dsgd")}


def test_waiting_costs_no_cpu(launched: Path) -> None:
    """Three ranks wait for the fourth, five times; usually none uses 5 % of a core meanwhile."""
    for waits in results(launched / "idle", "idle")[:3]:
        assert len(waits) == 5 and all(waited > 0.7 for _, waited in waits), waits
        assert statistics.median(cpu / waited for cpu, waited in waits) < 0.05, waits
