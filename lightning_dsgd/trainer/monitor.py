"""The callback that ties an exchange to the Trainer's course: start, checkpoints, end, and logs.

Lightning gives a strategy no hook at these points, so the strategy puts this callback in front of
the user's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_dsgd.trainer.refusals import refuse_empty_batch
from lightning_dsgd.trainer.worlds import Callback, LightningModule, Trainer

if TYPE_CHECKING:
    from lightning_dsgd.trainer.coordinated import CoordinatedStrategy

CHECKPOINT_KEY = "lightning_dsgd"


class Monitor(Callback):
    """Inserted by the strategy; users need not know it."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).connect_metrics(trainer)
        _strategy(trainer).start_exchange(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        refuse_empty_batch(batch)
        strategy, values = _strategy(trainer), {}
        accumulates = trainer.fit_loop._should_accumulate()
        if not accumulates:
            strategy.course.end_batch()
        if not trainer.loggers or accumulates:
            return
        every, step = trainer.log_every_n_steps, trainer.fit_loop.epoch_loop._batches_that_stepped
        if every and (step + 1) % every == 0:  # when, and as what step, Lightning logs this batch
            values.update(strategy.logged_values())
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            values.update(strategy.epoch_values())
        named = {f"dsgd/{name}": value for name, value in values.items()}
        for logger in trainer.loggers if named else ():
            logger.log_metrics({**named, "epoch": trainer.current_epoch}, step=step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).end_epoch()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).connect_metrics(trainer)
        _strategy(trainer).agree()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).agree()
        _strategy(trainer).finish()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # before the callbacks that write a checkpoint then: the others will not come to it
        _strategy(trainer).on_exception(exception)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        strategy = _strategy(trainer)
        checkpoint[CHECKPOINT_KEY] = {
            "strategy": strategy.strategy_name,
            "world_size": strategy.world_size,
            **strategy.checkpoint_state(),
        }


def _strategy(trainer: Trainer) -> CoordinatedStrategy:
    strategy: CoordinatedStrategy = trainer.strategy
    return strategy
