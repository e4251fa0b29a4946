"""What models, optimizers and Lightning compute on the test device is what the CPU computes."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tests.lag as lag
from tests.ranks import toy
from tests.ranks.lightning_copy import pl

importlib.import_module("tests.lag.accelerator")


@pytest.fixture(autouse=True)
def in_order() -> Iterator[None]:
    """Each test begins and ends with nothing queued and no kernel held back."""
    torch.manual_seed(0)
    yield
    lag.fuzz(None)
    lag.synchronize()


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, stride=2, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        attended, _ = self.attention(x, x, x)
        plain, _ = self.attention(x, x, x, need_weights=False)
        return (attended + plain).mean(1)[:, :3]


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(10, 8, padding_idx=0), nn.LayerNorm(8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.table(x)).mean(1))


class _Encoder(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, 0, :3]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 3)),
        lambda: torch.randn(4, 6),
    ),
    "convolutional": (_convolutional, lambda: torch.randn(4, 2, 8, 8)),
    "words": (_Words, lambda: torch.randint(10, (4, 5))),
    "attention": (_Attention, lambda: torch.randn(4, 5, 8)),
    "encoder": (lambda: _Encoder(0.0), lambda: torch.randn(4, 5, 8)),
    "encoder with dropout": (lambda: _Encoder(0.1), lambda: torch.randn(4, 5, 8)),
}


def _train(
    device: str,
    model: nn.Module,
    x: Tensor,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **options: Any,
) -> dict[str, Tensor]:
    """Everything that a few steps leave."""
    model = copy.deepcopy(model).to(device)
    optimizer = make(model.parameters(), **{"lr": 0.05, **options})
    x, y = x.to(device), torch.arange(len(x), device=device) % 3
    torch.manual_seed(3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses += [loss.detach(), norm]
    model.eval()
    with torch.no_grad():
        losses.append(model(x).sum())
    end = {f"loss {i}": loss.cpu() for i, loss in enumerate(losses)}
    end.update({name: value.cpu() for name, value in model.state_dict().items()})
    for number, state in enumerate(optimizer.state.values()):
        end.update({f"{number} {k}": v.cpu() for k, v in state.items() if v is not None})
    return end


def _assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_on_the_cpu(name: str) -> None:
    make, data = MODELS[name]
    model, x = make(), data()
    lag.fuzz(2)
    _assert_same(_train("cpu", model, x), _train("lag", model, x))


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.Adagrad, {}),
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("make, options", OPTIMIZERS)
def test_optimizers_step_as_on_the_cpu(make: Any, options: dict[str, Any], foreach: bool) -> None:
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(4, 6)
    options = {**options, "foreach": foreach}
    ends = [_train(device, model, x, make, **options) for device in ("cpu", "lag")]
    _assert_same(*ends)


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.l1_loss,
        F.huber_loss,
        F.binary_cross_entropy_with_logits,
        lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
        lambda x, y: F.nll_loss(x.log_softmax(1), y.argmax(1)),
        lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(5, device=x.device)),
    ],
)
def test_losses_are_as_on_the_cpu(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, y = torch.randn(5, 4), torch.rand(5, 4)
    found = []
    for device in ("cpu", "lag"):
        leaf = x.to(device).requires_grad_()
        value = loss(leaf, y.to(device))
        (grad,) = torch.autograd.grad(value, leaf)
        found.append({"value": value.detach().cpu(), "grad": grad.cpu()})
    _assert_same(*found)


def test_random_numbers_are_those_of_the_cpu() -> None:
    def draw(device: str) -> dict[str, Tensor]:
        torch.manual_seed(5)
        drawn = {
            "normal": torch.randn(20, device=device),
            "uniform": torch.rand(3, 4, device=device),
            "integers": torch.randint(9, (7,), device=device),
            "order": torch.randperm(12, device=device),
            "dropped": F.dropout(torch.ones(30, device=device), 0.3),
            "choice": torch.multinomial(torch.ones(6, device=device), 3),
        }
        return {name: value.cpu() for name, value in drawn.items()}

    _assert_same(draw("cpu"), draw("lag"))
    state = lag.get_rng_state()
    first = torch.rand(3, device="lag")
    lag.set_rng_state(state)
    assert torch.equal(first, torch.rand(3, device="lag"))


def test_autocast() -> None:
    model = nn.Linear(4, 4).to("lag")
    with torch.autocast("lag", dtype=torch.bfloat16):
        assert model(torch.ones(2, 4, device="lag")).dtype is torch.bfloat16


# ---------------------------------------------------------------- Lightning


class _Noting(pl.Callback):
    """Where the batches are, and the losses."""

    def __init__(self) -> None:
        self.devices: set[str] = set()
        self.losses: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.devices.add(batch[0].device.type)
        self.losses.append(outputs["loss"])


def _fit(device: str) -> tuple[Any, _Noting]:
    module, noting = toy.Toy(), _Noting()
    trainer = toy.trainer_for(
        pl.strategies.SingleDeviceStrategy(device=torch.device(device)),
        [noting],
        accelerator=device,
        devices=1,
        max_epochs=1,
        limit_val_batches=2,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, toy.loader(64, shuffle=False), toy.loader(16, shuffle=False))
    return module, noting


def test_lightning_trains_as_on_the_cpu() -> None:
    lag.fuzz(4)
    (on_cpu, cpu), (on_lag, own) = _fit("cpu"), _fit("lag")
    assert own.devices == {"lag"}
    assert torch.equal(torch.stack(cpu.losses), torch.stack(own.losses).cpu())
    assert toy.digest(on_cpu) == toy.digest(on_lag)
