"""How epochs and trainings go and end: schedules, late ranks, limits, stops, failures."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lightning_dsgd as dsgd
from tests.ranks.lightning_copy import pl
from tests.ranks.toy import Toy, digest, loader, random_delays, trainer_for

Result = dict[str, Any]

# ------------------------------------------------------------------------ within epochs


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


def late_for_the_epoch(out: Path) -> Result:
    """Rank 3 begins each epoch when the others have made all its updates, and logs all the same."""

    class Late(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, *rest: Any) -> None:
            machine, last = trainer.strategy.desk.machine, trainer.global_step + 3
            while trainer.global_rank == 3 and machine.decided < last:
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


# --------------------------------------------------------------------------------- ends


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
            rounds = trainer.strategy._rounds
            decision = rounds._decision

            def slow(message: Any) -> None:
                decision(message)
                if trainer.global_rank == 3 and getattr(message, "number", 0) == 7:
                    time.sleep(0.5)

            rounds._decision = slow

        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            trainer.should_stop = trainer.global_step >= 7

    found: Result = {"steps": [], "left": []}
    for cls in (dsgd.KAsyncStrategy, dsgd.KBatchAsyncStrategy):
        trainer = trainer_for(cls(k=1, timeout=60.0), [Stop(), random_delays()], max_epochs=1)
        trainer.fit(Toy(), loader())
        found["steps"].append(trainer.global_step)
        found["left"] += [t.name for t in threading.enumerate() if "dsgd" in t.name]
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
