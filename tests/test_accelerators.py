"""What is done on accelerators that are not here: which device, which streams, which groups."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dsgd import BackupWorkersStrategy
from lightning_dsgd.backends import on_devices
from lightning_dsgd.backends.streams import Streams
from lightning_dsgd.errors import ConfigurationError

GPU = torch.device("cuda", 1)


class Module:
    """A device's module that remembers what it was told."""

    def __init__(self, devices: int = 4) -> None:
        self.calls: list[Any] = []
        self.device_count = lambda: devices
        self.set_device = lambda device: self.calls.append(("device", device))

    def Stream(self, device: torch.device, priority: int) -> str:
        return f"stream of {device}, priority {priority}"

    def current_stream(self, device: torch.device) -> str:
        return f"current of {device}"

    @contextlib.contextmanager
    def stream(self, stream: str) -> Any:
        self.calls.append(("within", stream))
        yield

    def Event(self, enable_timing: bool) -> Any:
        return SimpleNamespace(
            record=lambda stream: self.calls.append(("record", stream)),
            wait=lambda stream: self.calls.append(("wait", stream)),
        )


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_an_exchange_has_its_device_and_a_stream_that_goes_first(module: Module) -> None:
    streams = Streams(GPU)
    streams.enter()
    with streams.own():
        streams.follow(streams.mark())
    assert module.calls == [
        ("device", GPU),
        ("within", "stream of cuda:1, priority -1"),
        ("record", "current of cuda:1"),
        ("wait", "current of cuda:1"),
    ]


def test_devices_without_streams_are_refused() -> None:
    for device in ("mps", "meta"):
        with pytest.raises(ConfigurationError, match=f"'{device}' have no streams.*'cpu'"):
            Streams(torch.device(device))


class Ranked(BackupWorkersStrategy):
    """One of several ranks on this host."""

    rank = 0

    @property
    def local_rank(self) -> int:
        return self.rank


@pytest.mark.parametrize(
    ("shown", "rank", "expected"),
    [(4, 2, "cuda:2"), (1, 2, "cuda:0"), (1, 0, "cuda:0"), (2, 1, "cuda:1")],
)
def test_a_process_may_see_all_devices_or_its_own(
    monkeypatch: pytest.MonkeyPatch, shown: int, rank: int, expected: str
) -> None:
    """With `devices=1`, as under a launcher, Lightning names the first one."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module(shown))
    strategy = Ranked()
    strategy.rank = rank
    strategy.parallel_devices = [torch.device("cuda", 0)]
    assert strategy.root_device == torch.device(expected)


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module(2))
    strategy = Ranked()
    strategy.rank = 2
    strategy.parallel_devices = [torch.device("cuda", 0)]
    with pytest.raises(ConfigurationError, match=r"local rank 2 .* shows 2 of type 'cuda'"):
        _ = strategy.root_device


class NCCL:
    """What torch's would be made with."""

    class Options:
        pass

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.rank, self.size, self.options = rank, size, options


def test_the_limits_of_nccl_are_far_beyond_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watchdog would end the process before our error, which knows the culprit, is there."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NCCL, raising=False)
    for name in on_devices._QUIET:
        monkeypatch.setenv(name, "1")
    make = on_devices.maker_for(GPU)
    assert make is not None
    group = make(dist.HashStore(), 1, 2, 60.0)
    assert (group.rank, group.size) == (1, 2)
    assert group.options._timeout.total_seconds() == 600.0
    assert group.options.is_high_priority_stream
    assert {os.environ[name] for name in on_devices._QUIET} == {"0"}


def test_without_nccl_gradients_go_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert on_devices.maker_for(GPU) is None
    assert on_devices.maker_for(torch.device("cpu")) is None


def test_a_group_is_made_and_met_on_its_device(module: Module, monkeypatch: Any) -> None:
    """Before the thread is on it, a group could take memory on the first device."""
    monkeypatch.setattr(torch, "zeros", lambda *size, device: SimpleNamespace(device=device))
    monkeypatch.setattr(on_devices, "look_until", lambda mark, nap: True)
    work = SimpleNamespace(wait=lambda: module.calls.append("waited"))
    group = SimpleNamespace(allreduce=lambda tensors: work)

    def make() -> Any:
        module.calls.append("made")
        return group

    assert on_devices.first_used(make, GPU) is group
    kinds = [call if isinstance(call, str) else call[0] for call in module.calls]
    assert kinds == ["device", "within", "made", "waited", "record"]
