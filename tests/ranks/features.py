"""What people use of the Trainer: precision, logs, callbacks, collectives, loaders."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lightning_dsgd as dsgd
from tests.ranks.lightning_copy import pl
from tests.ranks.toy import Toy, digest, flat, loader, random_delays, trainer_for

Result = dict[str, Any]

# ------------------------------------------------------------------------------ modules


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


# ----------------------------------------------------------------- logs and collectives


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

    early = pl.callbacks.EarlyStopping("flat", patience=2)
    keeper = pl.callbacks.ModelCheckpoint(dirpath=out / "best", monitor="val_loss", save_top_k=1)
    module = Logs()
    trainer = trainer_for(
        dsgd.BackupWorkersStrategy(timeout=60.0),
        [early, keeper, random_delays(0.002)],
        max_epochs=9,
        limit_train_batches=4,
        limit_val_batches=2,
        enable_checkpointing=True,
        logger=pl.loggers.CSVLogger(out / "csv"),
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


class _Counted(Toy):
    """With a metric, which is shown the strategy's collectives."""

    def __init__(self) -> None:
        from torchmetrics import MeanMetric

        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(float(self.global_rank))
        self.log("mean_rank", self.mean)


class _Copies(pl.Callback):
    """Tries to copy the Trainer while it trains."""

    said = ""

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        try:
            copy.deepcopy(trainer)
        except dsgd.ConfigurationError as error:
            self.said = str(error)


def copied_and_pickled(out: Path) -> Result:
    """A Trainer's copies and pickles train as it does itself."""
    found = {}
    names = ["k_sync", "dc_s3gd"]
    if "HOROVOD_RANK" not in os.environ:  # it takes pairs of ranks at its very start only
        names.append("ad_psgd")
    for name in names:
        copies = _Copies()
        trainer = trainer_for(name, [copies], max_epochs=1, use_distributed_sampler=True)
        data = (loader(64, shuffle=False), loader(64, shuffle=False))
        copy.deepcopy(trainer)
        again = [pickle.loads(pickle.dumps(trainer))]
        trainer.fit(_Counted(), *data)
        pickle.loads(pickle.dumps(trainer.strategy))
        again.append(copy.deepcopy(trainer))
        for epochs, one in enumerate(again, 1):
            one.fit_loop.max_epochs = epochs
            one.fit(one.lightning_module or _Counted(), *data)
        ways = [one.strategy is not trainer.strategy for one in again]
        means = [float(one.callback_metrics["mean_rank"]) for one in again]
        ends = [one.current_epoch for one in again]
        found[name] = {"own": ways, "means": means, "epochs": ends, "said": copies.said}
    return found


# --------------------------------------------------------------------------------- data


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
