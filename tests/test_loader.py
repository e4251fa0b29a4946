"""Which loaders give the same batches in every epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from lightning_dsgd.trainer.loader import keeps_order

DATA = TensorDataset(torch.arange(8))


class Own:
    """Deals out batches in an order of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        yield [0, 1]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        yield 1


def test_only_what_plainly_keeps_its_order_is_said_to() -> None:
    def dealt(shuffle: bool) -> DistributedSampler[Any]:
        return DistributedSampler(DATA, num_replicas=2, rank=0, shuffle=shuffle)

    assert keeps_order(DataLoader(DATA))
    assert keeps_order(DataLoader(DATA, sampler=dealt(False)))
    assert keeps_order(
        DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 2, True))
    )
    assert not keeps_order(DataLoader(DATA, shuffle=True))
    assert not keeps_order(DataLoader(DATA, sampler=dealt(True)))
    assert not keeps_order(
        DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 2, True))
    )
    assert not keeps_order(DataLoader(DATA, batch_sampler=Own()))  # type: ignore[arg-type]
    assert not keeps_order(DataLoader(Stream()))
    assert not keeps_order([1, 2])
