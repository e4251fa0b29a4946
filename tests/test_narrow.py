"""Sums of 16-bit numbers: a mean that fits its type is found, though the sum would not fit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lightning_dsgd as dsgd
from lightning_dsgd.backends.streams import Streams
from lightning_dsgd.control.alarm import Alarm
from lightning_dsgd.exchange.gossip import GossipExchange, SharedModel
from lightning_dsgd.exchange.gradients import Flat
from lightning_dsgd.exchange.pipeline import Pipeline
from lightning_dsgd.workers.messages import Pair

STREAMS = Streams(torch.device("cpu"))
OTHER = 3.0
"""The other rank has this times as much."""


class Two:
    """Two ranks' sums, in the type that is sent; the other's numbers follow from this one's."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.timeout, self.alarm = 0, 2, 20.0, Alarm()

    def sum_(self, tensor: torch.Tensor) -> None:
        tensor.add_(tensor * OTHER)

    def wait_for(self, mark: Any) -> None:
        return

    def close(self) -> None:
        return


def control(word: bool) -> Any:
    """Of a rank that is told that it may go on, or nothing at all."""

    def poll(_: int) -> bool:
        time.sleep(0.01)
        return word

    rounds = SimpleNamespace(poll=poll, recv=lambda: b"")
    return SimpleNamespace(
        rank=0, alarm=Alarm(), timeout=20.0, rounds=rounds, announce_exchange=lambda message: None
    )


def large(dtype: torch.dtype) -> torch.Tensor:
    """Both ranks' mean fits into the type, and their sum does not."""
    return torch.full((5,), 0.3 * torch.finfo(dtype).max, dtype=dtype)


def expected(dtype: torch.dtype) -> torch.Tensor:
    return (large(dtype).double() * (1 + OTHER) / 2).to(dtype)


def test_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy: Any = dsgd.KSyncStrategy()
    monkeypatch.setattr(type(strategy), "world_size", 2)
    strategy._main = Two()
    found = strategy.reduce(large(torch.float16))
    torch.testing.assert_close(found, expected(torch.float16))


@contextlib.contextmanager
def closing(thing: Any) -> Iterator[Any]:
    try:
        yield thing
    finally:
        thing.close()


def averaged(flat: Flat) -> torch.Tensor:
    """By the pipeline, without a wire of its own."""
    channel: Any = Two()
    with closing(Pipeline(channel, control(True), STREAMS, wire="full", version=0)) as pipeline:
        pipeline.start(flat)
        pipeline.finish()
    return flat[0]


def gossiped(flat: Flat) -> torch.Tensor:
    """By a pair of ranks."""
    channel: Any = Two()
    empty = lambda: Flat([torch.zeros_like(buffer) for buffer in flat])  # noqa: E731 # as it is called
    exchange = GossipExchange(
        0, {1: channel}, control(False), SharedModel(flat, STREAMS), empty, Alarm(), STREAMS,
        active=True, timeout=20.0,
    )  # fmt: skip
    with closing(exchange):
        exchange._average(Pair(0, 1, 1, True, 0))
    return flat[0]


@pytest.mark.parametrize("exchange", [averaged, gossiped])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models(exchange: Any, dtype: torch.dtype) -> None:
    found = exchange(Flat([large(dtype)]))
    torch.testing.assert_close(found, expected(dtype))


@pytest.mark.parametrize("exchange", [averaged, gossiped])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_numbers_are_summed_first(exchange: Any, dtype: torch.dtype) -> None:
    """Down to the smallest, of which a half would be lost."""
    least = torch.nextafter(torch.zeros(5, dtype=dtype), torch.ones(5, dtype=dtype))
    assert exchange(Flat([least.clone()])).equal(2 * least)
