"""Scenarios for the rounds strategies: numbers, families, features of the Trainer."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import nn

import lightning_dsgd as dsgd
from tests.ranks.toy import (
    Toy,
    Watch,
    digest,
    fine_tune,
    flat,
    loader,
    random_delays,
    trace_dir,
    train,
    trainer_for,
)

Result = dict[str, Any]

# ------------------------------------------------------------------------- families


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


# ------------------------------------------------------------------------- numerics


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


def freed_within_an_epoch(out: Path) -> Result:
    """One rank finds it first, and the others may hear of it before they do."""

    class Frees(Toy):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.network[0].requires_grad_(batch_idx < 2)

    try:
        trainer_for("k_async", max_epochs=1).fit(Frees(), loader())
    except dsgd.DSGDError as error:
        return {"message": str(error)}
    return {"message": "none"}


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


def epoch_schedule(out: Path) -> Result:
    class Scheduled(Toy):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    module = Scheduled()
    trainer = trainer_for(
        dsgd.BackupWorkersStrategy(timeout=60.0), max_epochs=3, limit_train_batches=5
    )
    trainer.fit(module, loader())
    return {"lr": trainer.optimizers[0].param_groups[0]["lr"], "steps": trainer.global_step}


# ------------------------------------------------------------------ Trainer features


def bf16_and_groups(out: Path) -> Result:
    class Groups(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch = [part.float() for part in batch]
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            first, *others = self.network.parameters()
            groups = [{"params": [first], "lr": 0.01}, {"params": others}]
            return torch.optim.Adam([*groups, {"params": self.unused.parameters()}], lr=0.02)

    module = Groups()
    trainer = trainer_for(
        "backup_workers", precision="bf16-mixed", max_epochs=1, limit_train_batches=6
    )
    trainer.fit(module, loader())
    return {"digest": digest(module), "steps": trainer.global_step, "end": flat(module)}


def callbacks_and_logs(out: Path) -> Result:
    class Logs(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("rank", float(self.global_rank), sync_dist=True)
            self.log("worst", float(self.global_rank), sync_dist=True, reduce_fx="max")
            self.log("flat", 1.0, sync_dist=True)

    from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
    from pytorch_lightning.loggers import CSVLogger

    early = EarlyStopping("flat", patience=2)
    keeper = ModelCheckpoint(dirpath=out / "best", monitor="val_loss", save_top_k=1)
    module = Logs()
    trainer = trainer_for(
        dsgd.BackupWorkersStrategy(timeout=60.0),
        [early, keeper, random_delays(0.002)],
        max_epochs=9,
        limit_train_batches=4,
        limit_val_batches=2,
        enable_checkpointing=True,
        logger=CSVLogger(out / "csv"),
        log_every_n_steps=2,
    )
    trainer.fit(module, loader(), loader(64, shuffle=False))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    tested = trainer.validate(module, loader(64, shuffle=False), verbose=False)
    return {
        "epochs": trainer.current_epoch,
        "metrics": metrics,
        "best": keeper.best_model_path,
        "validated": tested[0]["val_loss"],
        "digest": digest(module),
    }


class _LogsSteps(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rank", float(self.global_rank), sync_dist=True)
        return super().training_step(batch, batch_idx)


def logs_in_step(out: Path) -> Result:
    """A reduction in every step: fine where all ranks make it, refused where they may not."""
    found: Result = {}
    for strategy in (
        dsgd.KAsyncStrategy(timeout=60.0),
        dsgd.BackupWorkersStrategy(timeout=60.0),
        dsgd.BackupWorkersStrategy(backups=0, timeout=60.0),
    ):
        name = f"{strategy.strategy_name} {getattr(strategy, 'backups', '')}".strip()
        trainer = trainer_for(strategy, max_steps=3, max_epochs=-1)
        try:
            trainer.fit(_LogsSteps(), loader())
            found[name] = float(trainer.callback_metrics["rank"])
        except dsgd.DSGDError as error:
            found[name] = str(error)
    return found


def late_for_the_epoch(out: Path) -> Result:
    """Rank 3 begins each epoch when the others have made all its updates, and logs all the same."""

    class Late(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, *rest: Any) -> None:
            exchange, last = trainer.strategy._exchange, trainer.global_step + 3
            while trainer.global_rank == 3 and exchange.decided_version < last:
                time.sleep(0.01)

    class Logs(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("rank", float(self.global_rank), on_epoch=True, on_step=False, sync_dist=True)
            return super().training_step(batch, batch_idx)

    trainer = trainer_for(
        dsgd.BackupWorkersStrategy(timeout=20.0, rounds_per_epoch=3), [Late()], max_epochs=2
    )
    trainer.fit(Logs(), loader())
    return {"rank": float(trainer.callback_metrics["rank"]), "steps": trainer.global_step}


def long_validation(out: Path) -> Result:
    """Validation in mid-epoch lasts longer than `timeout`, while a late gradient waits."""

    class Long(Toy):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            time.sleep(3.5)

    trainer = trainer_for(
        dsgd.KAsyncStrategy(k=2, timeout=3.0),
        [dsgd.Stragglers().slow(rank=3, seconds=0.05)],
        max_steps=3,
        max_epochs=-1,
        limit_train_batches=4,
        val_check_interval=2,
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    trainer.fit(Long(), loader(), loader(64, shuffle=False))
    return {"steps": trainer.global_step}


def short_cycles(out: Path) -> Result:
    """Fewer updates than ranks: not everybody has a turn."""
    steps = []
    for options in ({"fast_dev_run": True}, {"max_epochs": 3}):
        strategy = dsgd.CyclicDelayStrategy(timeout=30.0, rounds_per_epoch=2)
        trainer = trainer_for(strategy, **options)
        trainer.fit(Toy(), loader())
        steps.append(trainer.global_step)
    return {"steps": steps}


def predictions_and_gathers(out: Path) -> Result:
    class Predicts(Toy):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            gathered = self.all_gather(torch.tensor(self.global_rank))
            self.gathered = gathered.tolist()
            self.log("test_loss", float(self.global_rank), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.network(batch[0])

    module = Predicts()
    trainer = trainer_for(dsgd.BackupWorkersStrategy(timeout=60.0))
    tested = trainer.test(module, loader(64, shuffle=False), verbose=False)
    predicted = trainer.predict(module, loader(64, shuffle=False))
    strategy = trainer.strategy
    value = torch.tensor(float(trainer.global_rank + 1), requires_grad=True)
    strategy.all_gather(value, sync_grads=True).square().sum().backward()
    whole = torch.tensor(trainer.global_rank)
    return {
        "test_loss": tested[0]["test_loss"],
        "gathered": module.gathered,
        "predicted": sum(len(part) for part in predicted),
        "gradient": float(value.grad),
        "reduced": [
            float(strategy.reduce(whole, reduce_op=op)) for op in ("mean", "sum", "min", "max")
        ],
        "broadcast": strategy.broadcast({"from": trainer.global_rank}, src=2),
        "any": strategy.reduce_boolean_decision(trainer.global_rank == 1, all=False),
        "all": strategy.reduce_boolean_decision(trainer.global_rank == 1, all=True),
    }


def shards_and_buffers(out: Path) -> Result:
    """Different data per rank; equal BatchNorm statistics; synchronised torchmetrics."""
    from torchmetrics import MeanMetric

    class Normed(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.mean = MeanMetric()
            self.seen: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen += batch[0][:, 0].tolist()
            return super().training_step([self.norm(batch[0]), batch[1]], batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.mean.update(float(self.global_rank))
            self.log("mean_rank", self.mean)

    module = Normed()
    trainer = trainer_for(
        dsgd.BackupWorkersStrategy(backups=0, timeout=60.0),
        max_epochs=1,
        use_distributed_sampler=True,
    )
    trainer.fit(module, loader(), loader(64, shuffle=False))
    return {
        "seen": module.seen,
        "statistics": module.norm.running_mean.tolist(),
        "mean_rank": float(trainer.callback_metrics["mean_rank"]),
    }


def limits(out: Path) -> Result:
    from datetime import timedelta

    found: Result = {}
    trainer = trainer_for("k_batch_async", max_steps=7, max_epochs=-1, val_check_interval=3)
    trainer.fit(Toy(), loader(), loader(16, shuffle=False))
    found["max_steps"] = trainer.global_step
    trainer = trainer_for("k_sync", max_time=timedelta(seconds=1.5), max_epochs=-1)
    trainer.fit(Toy(), loader())
    found["max_time"] = trainer.global_step
    trainer = trainer_for("cyclic_delay", max_epochs=2, overfit_batches=4)
    trainer.fit(Toy(), loader(shuffle=False))
    found["overfit"] = trainer.global_step
    trainer = trainer_for("backup_workers", fast_dev_run=True)
    trainer.fit(Toy(), loader(), loader(16, shuffle=False))
    found["fast_dev_run"] = trainer.global_step
    return found


def stopped_midway(out: Path) -> Result:
    """A callback stops in mid-epoch, while late gradients make one more round of their own.

    The last rank's communication thread is slow, so that it has not heard of that round yet.
    """

    class Stop(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            exchange = trainer.strategy._exchange
            decision = exchange._decision

            def slow(message: Any) -> None:
                decision(message)
                if trainer.global_rank == 3 and getattr(message, "number", 0) == 7:
                    time.sleep(0.5)

            exchange._decision = slow

        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            trainer.should_stop = trainer.global_step >= 7

    found: Result = {"steps": [], "left": []}
    for cls in (dsgd.KAsyncStrategy, dsgd.KBatchAsyncStrategy):
        trainer = trainer_for(cls(k=1, timeout=60.0), [Stop(), random_delays()], max_epochs=1)
        trainer.fit(Toy(), loader())
        found["steps"].append(trainer.global_step)
        found["left"] += [t.name for t in threading.enumerate() if "dsgd" in t.name]
    return found


def after_a_failure(out: Path) -> Result:
    """One rank raises while the others exchange; then all train again, with a new Trainer."""

    class Fails(Toy):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fails and self.global_rank == 1 and batch_idx == 3:
                raise ValueError("oops")
            return super().training_step(batch, batch_idx)

    found: Result = {}
    for name, arguments in (("DCS3GDStrategy", {}), ("BackupWorkersStrategy", {"backups": 0})):
        make = partial(getattr(dsgd, name), **arguments, timeout=20.0)
        module = Fails()
        trainer = trainer_for(make(), max_epochs=1, limit_train_batches=8)
        try:
            trainer.fit(module, loader())
        except (ValueError, dsgd.RunError) as error:
            found[name] = [str(error)]
        try:
            trainer.fit(module, loader())
        except dsgd.ConfigurationError as error:
            found[name].append(str(error))
        module = Fails()
        module.fails = False
        trainer_for(make(), max_epochs=1, limit_train_batches=8).fit(module, loader())
        found[name].append(digest(module))
    return found


def short_epochs_that_log(out: Path) -> Result:
    """Every rank logs in every epoch, though not every rank has a part in it."""

    class Logs(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("seen", 1.0, on_epoch=True, on_step=False, sync_dist=True, reduce_fx="sum")
            return super().training_step(batch, batch_idx)

        def on_after_backward(self) -> None:
            if self.trainer.strategy.cancel_late:
                self.log("kept", 1.0, on_epoch=True, on_step=False, sync_dist=True, reduce_fx="sum")

    found: Result = {}
    for strategy in (
        dsgd.CyclicDelayStrategy(timeout=20.0, rounds_per_epoch=1),
        dsgd.CyclicDelayStrategy(timeout=20.0, rounds_per_epoch=2, delay=2),
        dsgd.KAsyncStrategy(k=1, timeout=20.0, rounds_per_epoch=1),
        dsgd.KSyncStrategy(k=1, timeout=20.0, rounds_per_epoch=8),
    ):
        module = Logs()
        trainer = trainer_for(strategy, [dsgd.Stragglers().slow(3, seconds=0.05)], max_epochs=4)
        trainer.fit(module, loader())
        seen = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found[f"{strategy.strategy_name} {strategy.rounds_per_epoch}"] = seen, digest(module)
    return found


class _Steps(Toy):
    """The module's own ways to step, of which some leave the strategy out."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if self.way == "by closure":
            optimizer.step(closure=closure)
        elif self.way == "around":
            optimizer.optimizer.step(closure)
        elif self.way == "before":
            closure()
            optimizer.step()
        elif self.way == "twice":
            optimizer.step(closure=lambda: (closure(), closure())[1])
        else:
            closure()


def ways_to_step(out: Path) -> Result:
    found: Result = {}
    for name in ("backup_workers", "dc_s3gd"):
        for way in ("by closure", "around", "before", "twice", "not"):
            module = _Steps(way)
            try:
                trainer_for(name, max_steps=4, max_epochs=-1).fit(module, loader())
                found[f"{name} {way}"] = digest(module)
            except dsgd.DSGDError as error:
                found[f"{name} {way}"] = str(error)
    return found


def stopped_alone(out: Path) -> Result:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            trainer.should_stop |= trainer.global_rank == 3 and trainer.global_step >= 2

    strategy = dsgd.BackupWorkersStrategy(backups=1, timeout=20.0)
    try:
        trainer_for(strategy, [Stop()], max_epochs=1).fit(Toy(), loader())
    except dsgd.DSGDError as error:
        return {"message": str(error)}
    return {"message": "none"}


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


def shaped_loaders(out: Path) -> Result:
    """A loader within a dictionary, its worker kept from one training to the next."""

    class Named(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["rows"], batch_idx)

    data = loader(64, num_workers=1, persistent_workers=True)
    digests = []
    for _ in range(2):
        module = Named(lr=0.001)
        trainer = trainer_for(dsgd.CyclicDelayStrategy(timeout=30.0), max_epochs=1)
        trainer.fit(module, {"rows": data})
        digests.append(digest(module))
    return {"digests": digests}


def iterable_data(out: Path) -> Result:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            while True:
                yield torch.randn(6, dtype=torch.float64), torch.randn(3, dtype=torch.float64)

    data = torch.utils.data.DataLoader(Endless(), batch_size=4)
    trainer = trainer_for(dsgd.KBatchSyncStrategy(rounds_per_epoch=5), max_epochs=2)
    trainer.fit(Toy(), data)
    return {"steps": trainer.global_step}


def loader_processes(out: Path) -> Result:
    """A shard that starts over several times, with worker processes."""
    trainer = trainer_for(dsgd.KBatchAsyncStrategy(k=1), max_epochs=2)
    data = loader(64, num_workers=1, persistent_workers=True)
    trainer.fit(Toy(lr=0.001), data)
    return {"steps": trainer.global_step}


def other_import_name(out: Path) -> Result:
    """A script that imports `lightning` instead of `pytorch_lightning`."""
    import lightning

    class Other(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Linear(6, 3).double()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.mse_loss(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    steps = []
    for strategy in ("backup_workers", "dc_s3gd", dsgd.KAsyncStrategy(k=2, timeout=60.0)):
        module = Other()
        trainer = lightning.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=4,
            max_steps=5,
            max_epochs=-1,
            callbacks=[dsgd.Stragglers().slow(rank=1, factor=2)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader())
        steps.append(trainer.global_step)
    return {"steps": steps, "digest": digest(module)}


# ------------------------------------------------------------------------- resuming


def _resumable(strategy: Any, **options: Any) -> tuple[Any, Any]:
    pl.seed_everything(3)
    module = Toy().double()  # or a checkpoint's float64 weights would go through float32
    return module, trainer_for(strategy, **options)


def resume(out: Path) -> Result:
    """Two epochs and two more from the checkpoint, beside four in a row."""
    ends: Result = {"written": 0}
    for name, epochs, start in (("half", 2, None), ("resumed", 4, "half"), ("whole", 4, None)):
        module, trainer = _resumable(
            dsgd.BackupWorkersStrategy(backups=0, timeout=60.0), max_epochs=epochs
        )
        path = str(out / f"{start}.ckpt") if start else None
        trainer.fit(module, loader(), ckpt_path=path)
        write = trainer.strategy.checkpoint_io.save_checkpoint

        def counted(*arguments: Any, write: Any = write, **options: Any) -> None:
            ends["written"] += 1
            write(*arguments, **options)

        trainer.strategy.checkpoint_io.save_checkpoint = counted
        trainer.save_checkpoint(out / f"{name}.ckpt")
        ends[name] = flat(module)
    return ends


def resume_state(out: Path) -> Result:
    """AdaSync's K and reference loss, and the cyclic token, survive a checkpoint."""
    found: Result = {}
    makers = {
        "adasync": lambda: dsgd.AdaSyncStrategy("k_batch_sync", k0=1, interval=0.01, timeout=60.0),
        "cyclic": lambda: dsgd.CyclicDelayStrategy(timeout=60.0, rounds_per_epoch=6),
    }
    for name, make in makers.items():
        first = make()
        module, trainer = _resumable(first, max_steps=9, max_epochs=-1)
        trainer.fit(module, loader())
        trainer.save_checkpoint(out / f"{name}-state.ckpt")
        second = make()
        module, trainer = _resumable(second, max_steps=15, max_epochs=-1)
        trainer.fit(module, loader(), ckpt_path=str(out / f"{name}-state.ckpt"))
        saved = torch.load(out / f"{name}-state.ckpt", weights_only=False)["lightning_dsgd"]
        found[name] = {"saved": saved, "steps": trainer.global_step, "after": second.policy_state}
    return found


def resume_on_fewer(out: Path) -> Result:
    """Started on 2 ranks, with a checkpoint that 4 ranks wrote, and another number of backups."""
    module = Toy().double()
    watch = Watch()
    trainer = trainer_for(
        dsgd.BackupWorkersStrategy(backups=1, timeout=60.0), [watch], max_epochs=5, devices=2
    )
    trainer.fit(module, loader(), ckpt_path=str(out / "half.ckpt"))
    return {
        "digest": digest(module),
        "epochs": trainer.current_epoch,
        "finite": bool(np.isfinite(flat(module)).all()),
        "start": watch.start,
        "first": min(watch.digests),
        "workers": {len(round_.workers) for round_ in watch.rounds},
    }
