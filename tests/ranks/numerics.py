"""What the ranks compute: every family, and cases that the tests compute anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

import lightning_dsgd as dsgd
from lightning_dsgd.workers import algorithm
from tests.ranks.lightning_copy import pl
from tests.ranks.toy import (
    Toy,
    fine_tune,
    flat,
    loader,
    random_delays,
    trace_dir,
    train,
    trainer_for,
)

Result = dict[str, Any]

# ----------------------------------------------------------------------------- families


def _family(name: str, cls: Any, **arguments: Any) -> Any:
    def scenario(out: Path) -> Result:
        strategy = cls(trace=trace_dir(out, name), timeout=60.0, **arguments)
        return train(strategy, delays=random_delays())

    return scenario


FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "backups_1": (dsgd.BackupWorkersStrategy, {"backups": 1}),
    "backups_1_cancel": (dsgd.BackupWorkersStrategy, {"backups": 1, "cancel_late": True}),
    "k_sync": (dsgd.KSyncStrategy, {"k": 2}),
    "k_batch_sync": (dsgd.KBatchSyncStrategy, {"k": 4}),
    "k_async": (dsgd.KAsyncStrategy, {"k": 2}),
    "k_async_bounded": (dsgd.KAsyncStrategy, {"k": 1, "max_staleness": 2, "damping": "inverse"}),
    "k_batch_async": (dsgd.KBatchAsyncStrategy, {"k": 3, "max_staleness": 8}),
    "adasync": (dsgd.AdaSyncStrategy, {"variant": "k_batch_async", "k0": 1, "interval": 0.05}),
    "cyclic": (dsgd.CyclicDelayStrategy, {}),
    "cyclic_sum_bounded": (dsgd.CyclicDelayStrategy, {"combine": "sum", "max_accumulation": 2}),
    "cyclic_fixed": (dsgd.CyclicDelayStrategy, {"delay": 2}),
    "cyclic_skip": (dsgd.CyclicDelayStrategy, {"skip_after": 0.01}),
}
for _name, (_cls, _arguments) in FAMILIES.items():
    globals()[_name] = _family(_name, _cls, **_arguments)


def distance_damping(out: Path) -> Result:
    strategy = dsgd.KAsyncStrategy(
        k=1, max_staleness=6, damping="distance", damping_constant=1e-4, timeout=60.0
    )
    return train(strategy, delays=random_delays())


def share_of_slow_rank(out: Path) -> Result:
    """Rank 3 takes ten times as long: how many of the gradients are its own?

    On a machine that is busy with other things an update costs every rank some 8 ms beside its
    gradients; they are long enough for that not to matter.
    """
    shares: Result = {}
    for cls in (dsgd.KBatchSyncStrategy, dsgd.KBatchAsyncStrategy):
        strategy = cls(
            k=4, timeout=60.0, **({"cancel_late": False} if "Sync" in cls.__name__ else {})
        )
        delays = dsgd.Stragglers()
        for rank in range(4):
            delays.slow(rank, seconds=0.8 if rank == 3 else 0.08)
        shares[cls.strategy_name] = train(strategy, delays=delays, max_steps=100)["tally"]
    return shares


# ------------------------------------------------------------ beside other computations


def _scheduled() -> Any:
    class Scheduled(Toy):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(
                self.parameters(), lr=self.lr, momentum=0.9, weight_decay=0.01
            )
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.8)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    return Scheduled()


def _fifty_steps(strategy: Any) -> Result:
    pl.seed_everything(5)
    module = _scheduled()
    trainer = trainer_for(
        strategy,
        max_steps=50,
        max_epochs=-1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.3,
    )
    trainer.fit(module, loader())
    return {"end": flat(module), "steps": trainer.global_step}


def backups_0(out: Path) -> Result:
    return _fifty_steps(dsgd.BackupWorkersStrategy(backups=0, timeout=60.0))


def lightning_ddp(out: Path) -> Result:
    """One process that forks the ranks and gets the weights back: they need not import anew."""
    return _fifty_steps("ddp_fork")


class Rates(pl.Callback):
    """The learning rate that each update was made with."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def backups_1_scheduled(out: Path) -> Result:
    """All of the above where ranks miss updates: rank 3 hardly ever takes part."""
    rates = Rates()
    delays = random_delays().slow(rank=3, seconds=0.03)
    found = train(
        dsgd.BackupWorkersStrategy(backups=1, cancel_late=True, timeout=60.0),
        delays=delays,
        model=_scheduled(),
        callbacks=[rates],
        accumulate_grad_batches=2,
        gradient_clip_val=0.3,
    )
    return {**found, "rates": rates.rates}


def fine_tuning(out: Path) -> Result:
    """Layers are frozen and freed between epochs, also while late gradients are under way."""
    found: Result = {"synchronous": fine_tune(dsgd.BackupWorkersStrategy(backups=0, timeout=60.0))}
    for strategy in (
        dsgd.BackupWorkersStrategy(backups=1, cancel_late=True, timeout=60.0),
        dsgd.KAsyncStrategy(k=1, timeout=60.0),
        dsgd.KAsyncStrategy(k=1, max_staleness=6, damping="distance", timeout=60.0),
        dsgd.CyclicDelayStrategy(timeout=60.0),
    ):
        name = f"{strategy.strategy_name} {strategy.damping}"
        found[name] = fine_tune(strategy, callbacks=[random_delays()])
    return found


class _Bounds(pl.Callback):
    """How far behind a rank may be in each epoch, as rank 0 decides it and as each rank heeds."""

    def __init__(self) -> None:
        self.decided: list[int] = []
        self.heeded: list[int] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        if strategy.is_global_zero:
            self.decided.append(strategy._coordinator.policy.max_lag)
        self.heeded.append(strategy.desk.machine._most)


def fine_tuning_in_little_memory(out: Path) -> Result:
    """With bytes for MiB: the layers that are trained decide how many gradients may wait."""
    bounds = _Bounds()
    with mock.patch.object(algorithm, "_MIB", 1):
        strategy = dsgd.KAsyncStrategy(k=1, max_lag_mb=5000, timeout=60.0)
        ends = fine_tune(strategy, callbacks=[bounds])
    return {"ends": ends, "decided": bounds.decided, "heeded": bounds.heeded}


class _Image(Toy):
    """Weights in channels-last order, a mask and a metric; gradients are replaced, not written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        filters = torch.randn(4, 2, 3, 3).to(memory_format=torch.channels_last)
        self.filters = nn.Parameter(filters)
        self.register_buffer("mask", torch.tensor([True, False, True] * 2))
        self.extra: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = batch[0].masked_fill(~self.mask, 0.5)
        image = torch.stack([rows, rows.flip(1)], 1).view(-1, 2, 2, 3)
        shift = nn.functional.conv2d(image, self.filters, padding=1).mean((1, 2, 3))
        loss = nn.functional.mse_loss(self.network(rows) + shift[:, None], batch[1])
        return {"loss": loss, "extra": float(self.global_rank)}

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.extra.append(outputs["extra"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


def _image(strategy: Any, callbacks: Any = None, **options: Any) -> Result:
    pl.seed_everything(5)
    module = _Image()
    trainer = trainer_for(strategy, callbacks, max_epochs=2, limit_train_batches=10, **options)
    trainer.fit(module, loader())
    weights = [p.detach().double().reshape(-1).numpy() for p in module.parameters()]
    return {"end": np.concatenate(weights), "extra": module.extra, "steps": trainer.global_step}


def unusual_memory(out: Path) -> Result:
    """Four batches accumulate, of ten: each epoch's last update has two."""
    own = _image(dsgd.BackupWorkersStrategy(backups=0, timeout=60.0), accumulate_grad_batches=4)
    slow = _image(
        dsgd.BackupWorkersStrategy(backups=1, timeout=60.0),
        callbacks=[dsgd.Stragglers().slow(3, seconds=0.05)],
    )
    return {"synchronous": own, "backups": slow}


def lightning_ddp_unusual(out: Path) -> Result:
    return _image("ddp_fork", accumulate_grad_batches=4)


def steps_with_a_backward(out: Path) -> Result:
    """Adversarial training: the step itself runs a backward, which may come too late to matter."""

    class Adversarial(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rows = batch[0].clone().requires_grad_()
            super().training_step([rows, batch[1]], batch_idx).backward()
            worse = (rows + 0.01 * rows.grad.sign()).detach()
            return super().training_step([worse, batch[1]], batch_idx)

    found: Result = {}
    for strategy in (
        dsgd.KSyncStrategy(k=1, timeout=30.0),
        dsgd.KBatchAsyncStrategy(k=2, timeout=30.0),
        dsgd.CyclicDelayStrategy(timeout=30.0),
    ):
        delays = random_delays().slow(3, seconds=0.02)
        found[strategy.strategy_name] = train(strategy, delays=delays, model=Adversarial())
    return found
