"""A model whose backward keeps the device busy for a given time: a slow kernel, not a slow host."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dsgd.backends.streams import Streams, look_until
from lightning_dsgd.trainer.worlds import installed_copies

pl: Any = importlib.import_module(installed_copies()[0])

_PROBE = 10_000_000
"""Of a GPU's cycles: long enough to be measured."""


@functools.cache
def stall_on(device: torch.device) -> Callable[[float], object]:
    """What keeps the current stream of such a device busy for so many seconds."""
    if device.type == "cpu":
        return time.sleep  # ranks share the cores
    module: Any = torch.get_device_module(device)
    if hasattr(module, "sleep"):
        return module.sleep  # type: ignore[no-any-return]
    if hasattr(module, "_sleep"):
        rate = _PROBE / _seconds(device, lambda: module._sleep(_PROBE))
        return lambda seconds: module._sleep(int(seconds * rate))
    square = torch.zeros(1024, 1024, device=device)
    each = _seconds(device, lambda: torch.mm(square, square))
    return lambda seconds: [torch.mm(square, square) for _ in range(int(seconds / each) + 1)]


def _seconds(device: torch.device, kernel: Callable[[], object]) -> float:
    """What the second of two takes: the first one may have to be loaded."""
    streams = Streams(device)
    kernel()
    began = streams.moment()
    kernel()
    ended = streams.moment()
    look_until(ended.mark, time.sleep)
    return max(began.seconds_until(ended), 1e-6)


class Stall(torch.autograd.Function):
    """Nothing, forwards; backwards a kernel that takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.seconds:
            stall_on(gradients[0].device)(ctx.seconds)
        return gradients[0].clone(), None


class Probe(pl.LightningModule):  # type: ignore[misc]  # either copy's
    """A small model, with as many more parameters as asked for."""

    def __init__(self, stall: float = 0.0, more: int = 0, dies_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.more = nn.Parameter(torch.zeros(more)) if more else None
        self.stall = stall
        self.dies_at = dies_at

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Stall.apply(torch.tanh(self.first(x)), self.stall))  # type: ignore[no-any-return, no-untyped-call]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == self.dies_at:
            _die()
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        return loss if self.more is None else loss + self.more.square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def _die() -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


BATCH = 8


def dataset(rows: int) -> TensorDataset:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(rows, 16, generator=generator), torch.randn(rows, 4, generator=generator)
    )


def loader(rows: int) -> DataLoader[Any]:
    return DataLoader(dataset(rows), batch_size=BATCH)
