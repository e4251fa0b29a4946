"""A small regression problem in float64, and the means to watch every version of its training."""

from __future__ import annotations

import hashlib
import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_dsgd import Stragglers
from tests.ranks.lightning_copy import pl
from tests.ranks.run import rank

LR, MOMENTUM = 0.05, 0.9
BATCH = 4
ACCELERATOR = "lag" if os.environ.get("LAG") == "1" else "cpu"
"""`LAG=1` has all scenarios run on the test device."""

if ACCELERATOR == "lag":
    importlib.import_module("tests.lag.accelerator")


class Toy(pl.LightningModule):
    """Six numbers in, three out."""

    def __init__(self, lr: float = LR, momentum: float = MOMENTUM) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.lr, self.momentum = lr, momentum

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self.network(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def dataset(size: int = 256, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    targets = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, targets)


def loader(size: int = 256, shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(size), batch_size=BATCH, shuffle=shuffle, **options)


def flat(module: nn.Module) -> np.ndarray:
    return np.concatenate([p.detach().double().cpu().numpy().ravel() for p in module.parameters()])


def digest(module: nn.Module) -> str:
    return hashlib.sha1(flat(module).tobytes()).hexdigest()


class Watch(pl.Callback):
    """Remembers each version's parameters by their digest, and each round."""

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}
        self.rounds: list[Any] = []
        self.start: np.ndarray | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start = flat(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.digests[trainer.global_step] = digest(pl_module)
        self.rounds.append(getattr(trainer.strategy, "last_round", None))


def record_published(strategy: Any) -> dict[int, np.ndarray]:
    """Every gradient this rank publishes, by sequence number."""
    published: dict[int, np.ndarray] = {}
    start = strategy.start_exchange

    def start_exchange(trainer: Any) -> None:
        start(trainer)
        publish = strategy.desk.publish

        def keep(buffers: list[Tensor], contribution: Any) -> None:
            copy = np.concatenate([b.detach().double().cpu().numpy().copy() for b in buffers])
            published[len(published) + 1] = copy
            publish(buffers, contribution)

        strategy.desk.publish = keep

    strategy.start_exchange = start_exchange
    return published


class Recorded:
    """A worker machine that keeps what went in and what came out."""

    def __init__(self, machine: Any, inputs: list[Any], actions: list[Any]) -> None:
        self._machine, self._inputs, self._actions = machine, inputs, actions

    def handle(self, event: Any) -> Any:
        self._inputs.append(event)
        actions = self._machine.handle(event)
        self._actions.extend(actions)
        return actions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)


def record_machine(strategy: Any) -> tuple[list[Any], list[Any]]:
    """All inputs and actions of this rank's worker machine."""
    inputs: list[Any] = []
    actions: list[Any] = []
    make = strategy.make_machine
    strategy.make_machine = lambda *whose: Recorded(make(*whose), inputs, actions)
    return inputs, actions


def trainer_for(strategy: Any, callbacks: list[Any] | None = None, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": ACCELERATOR,
        "devices": 4,
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(strategy=strategy, callbacks=callbacks or [], **{**defaults, **options})


def train(
    strategy: Any,
    *,
    delays: Stragglers | None = None,
    model: Any = None,
    callbacks: list[Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train under observation."""
    watch = Watch()
    published = record_published(strategy)
    inputs, actions = record_machine(strategy)
    module = model or Toy()
    watchers = [watch, *([delays] if delays else []), *(callbacks or [])]
    trainer = trainer_for(strategy, watchers, **{"max_steps": 40, "max_epochs": -1, **options})
    trainer.fit(module, loader())
    return {
        "start": watch.start,
        "end": flat(module),
        "digests": watch.digests,
        "rounds": watch.rounds,
        "published": published,
        "inputs": inputs,
        "actions": actions,
        "steps": trainer.global_step,
        "tally": strategy.tally.as_dict() if strategy.tally else None,
    }


class FineTuning(pl.callbacks.BaseFinetuning):
    """The first layer is frozen in the first epoch, the last one from the third on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.network[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.network[0], optimizer, lr=LR)
        elif epoch == 2:
            self.freeze(pl_module.network[2])


class Tuned(Toy):
    """Remembers its weights at the end of each epoch."""

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=self.momentum, weight_decay=0.01)

    def on_train_start(self) -> None:
        self.ends = [flat(self)]

    def on_train_epoch_end(self) -> None:
        self.ends.append(flat(self))


def fine_tune(strategy: Any, callbacks: Any = (), devices: int = 4) -> list[np.ndarray]:
    """Weights at the start and after each of four epochs, with the same rows in each update."""
    module = Tuned()
    mine = Subset(dataset(64), range(rank(), 64, devices))
    data = DataLoader(mine, batch_size=16 // devices)
    options = {"use_distributed_sampler": False, "devices": devices, "max_epochs": 4}
    trainer_for(strategy, [FineTuning(), *callbacks], **options).fit(module, data)
    return module.ends


def random_delays(seconds: float = 0.004) -> Stragglers:
    return Stragglers(seed=7).exponential(seconds)


def trace_dir(out: Path, name: str) -> str:
    return str(out / f"trace-{name}")
