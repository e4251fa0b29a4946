"""What is not finite is found, whatever its type; what merely sums up to too much is not."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_dsgd import ConfigurationError, KSyncStrategy
from lightning_dsgd.exchange.finite import check_nonfinite, loss_and_finiteness, sums


def looked_at(loss: torch.Tensor, parts: list[torch.Tensor]) -> tuple[float, bool]:
    return loss_and_finiteness(sums(loss, parts).tolist(), parts)


TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_among_many_is_found(dtype: torch.dtype, value: float) -> None:
    gradient = torch.ones(1000, dtype=dtype)
    assert looked_at(torch.tensor(2.5), [gradient]) == (2.5, True)
    gradient[333] = value
    assert looked_at(torch.tensor(2.5), [torch.ones(3), gradient]) == (2.5, False)


@pytest.mark.parametrize("dtype", TYPES)
def test_large_numbers_are_finite_though_their_sum_is_not(dtype: torch.dtype) -> None:
    gradient = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert looked_at(torch.tensor(1.0), [gradient])[1]


def test_a_loss_that_is_not_finite_says_nothing_of_its_gradient() -> None:
    loss, finite = looked_at(torch.tensor(math.nan), [torch.ones(2)])
    assert math.isnan(loss) and finite


def test_sparse_gradients_are_looked_at_too() -> None:
    sparse = torch.sparse_coo_tensor([[1]], [math.inf], (4,))
    assert not looked_at(torch.tensor(0.0), [sparse])[1]


def test_another_choice_is_refused() -> None:
    check_nonfinite("drop")
    with pytest.raises(ConfigurationError, match="choose raise, drop, ignore"):
        KSyncStrategy(nonfinite="stop")  # type: ignore[arg-type]
