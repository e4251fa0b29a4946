"""The coordinator's port: garbage, strangers, people who speak for others; and idle ranks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from lightning_dsgd.alarm import Alarm
from lightning_dsgd.control import Control, Wait, dial
from lightning_dsgd.coordinator import Coordinator
from lightning_dsgd.errors import PeerFailedError, PeerLostError, RoundTimeoutError
from lightning_dsgd.protocol import Contribution, Overdue, Segment, decode_downward, encode
from lightning_dsgd_plugins.k_family import FirstKPolicy
from tests.launching import results

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
        self.coordinator = Coordinator(
            FirstKPolicy(ranks, ranks), ranks, "127.0.0.1", timeout=timeout, warn=lambda text: None
        )
        self.coordinator.start()
        self.alarms = [Alarm() for _ in range(ranks)]
        self.controls = [
            Control(self.coordinator.ticket, rank, alarm) for rank, alarm in enumerate(self.alarms)
        ]
        for control in self.controls:
            control.await_welcome()

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


def test_a_client_without_the_key_gets_nowhere(job: Job) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.identity = b"0/main"
        stranger.connect(job.coordinator.ticket.endpoint)
        stranger.send(encode(Contribution(0, 1, 0)))
        assert until(lambda: job.coordinator.tally.foreign >= 1)
    job.round(1)


def test_malformed_messages_and_impersonation_are_counted(job: Job) -> None:
    job.controls[0]._main.send(b"\xff\x00nonsense")
    job.controls[0]._main.send_multipart([b"two", b"frames"])
    job.controls[0].announce(Contribution(1, 1, 0))
    deep = b"\x91" * 5000 + b"\x00"  # a list in a list in a list ...
    job.controls[0]._main.send(b"\x83\xa4type\xa5Hello\xa6worker\x00\xa1x" + deep)
    assert until(lambda: job.coordinator.tally.foreign == 4)
    job.round(1)


@pytest.mark.parametrize("name", ["²/main", "7/main", "0/other", "main"])
def test_names_of_nobody_are_counted(job: Job, name: str) -> None:
    stranger = dial(job.controls[0]._context, job.coordinator.ticket, 0, "main")
    stranger.identity = name.encode()
    stranger.connect(job.coordinator.ticket.endpoint)
    stranger.send(encode(Contribution(0, 1, 0)))
    assert until(lambda: job.coordinator.tally.foreign == 1)
    stranger.close(linger=0)
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
    job = Job(timeout=1.0)
    try:
        job.controls[0].announce(Segment(5))
        job.controls[0].announce(Contribution(0, 1, 0))
        wait = Wait(job.controls[0], 1)
        with pytest.raises(RoundTimeoutError, match=r"update 1 has waited 1 s .* for rank 1"):
            until(lambda: not wait.check())
    finally:
        job.close()


def test_a_decision_that_came_meanwhile_is_no_reason_to_end(job: Job) -> None:
    job.controls[0].announce(Segment(5))
    for rank in range(2):
        job.controls[rank].announce(Contribution(rank, 1, 0))
    assert until(lambda: job.coordinator.policy.version == 1)
    job.controls[0].announce(Overdue(0, 1))
    assert not until(lambda: job.alarms[0].error is not None, 0.5)


def test_threads_are_named_and_gone_at_the_end() -> None:
    job = Job()
    names = {thread.name for thread in threading.enumerate()}
    assert {"dsgd-coordinator", "dsgd-lifeline"} <= names
    job.close()
    assert not {t.name for t in threading.enumerate() if t.name.startswith("dsgd")}


def test_waiting_costs_no_cpu(launched: Path) -> None:
    """Three ranks wait two seconds for the fourth; none uses 5 % of a core meanwhile."""
    for rank, (cpu, waited) in enumerate(results(launched / "idle", "idle")):
        assert waited > 1.5 or rank == 3
        assert rank == 3 or cpu / waited < 0.05, (rank, cpu, waited)
