"""Replicas are told apart by one bit, and the odd one is named."""

from __future__ import annotations

import pytest
import torch

from lightning_dsgd.exchange.checksum import checksum
from lightning_dsgd.workers.replicas import Replicas, difference

WHOLE = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32,
         torch.float64: torch.int64}  # fmt: skip


def test_the_last_rank_to_tell_completes_the_comparison() -> None:
    replicas = Replicas(3)
    for version in (100, 200):
        assert replicas.compare(0, version, 7) is None
        assert replicas.compare(2, version, 7) is None
    assert replicas.compare(1, 100, 7) is None
    found = replicas.compare(1, 200, 8)
    assert found is not None and "after update 200" in found
    assert "rank 1 differs from the other 2" in found


def test_without_a_majority_all_are_named() -> None:
    assert difference(9, dict.fromkeys(range(4), 1)) is None
    assert "rank 0 differs from rank 1" in str(difference(9, {0: 1, 1: 2}))
    assert "rank 0, 1 differs from rank 2, 3" in str(difference(9, {0: 1, 1: 1, 2: 5, 3: 5}))
    assert "ranks 1, 3 differ from the other 3" in str(
        difference(9, {0: 1, 1: 6, 2: 1, 3: 7, 4: 1})
    )


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("shape", [(), (3,), (4, 6), (2, 3, 4, 5)])
def test_every_bit_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    first, second = torch.randn(5), torch.randn(shape).to(dtype)
    if len(shape) == 4:
        second = second.to(memory_format=torch.channels_last)
    before = checksum([first, second])
    flat = second.as_strided((second.numel(),), (1,)).view(WHOLE[dtype])
    for place in range(0, flat.numel(), 7):
        for bit in range(0, 8 * second.element_size() - 1, 5):
            flat[place] ^= 1 << bit
            assert checksum([first, second]) != before
            flat[place] ^= 1 << bit
    assert checksum([first, second]) == before


def test_equal_parts_elsewhere_are_not_the_same() -> None:
    ones, twos = torch.ones(4), torch.full((4,), 2.0)
    assert checksum([ones, twos]) != checksum([twos, ones])


def test_where_a_parameter_lies_makes_no_difference() -> None:
    buffer = torch.randn(11)
    parts = [buffer[:1], buffer[1:5], buffer[5:11:2]]
    assert checksum(parts) == checksum([part.clone() for part in parts])
    image = torch.randn(2, 3, 4, 5)
    assert checksum([image]) == checksum([image.to(memory_format=torch.channels_last)])
