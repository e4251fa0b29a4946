"""The callback that ties rounds to the Trainer's course: start, checkpoints, end, and logs.

Lightning gives a strategy no hook at these points, so the strategy puts this callback in
front of the user's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.worlds import Callback, LightningModule, Trainer

if TYPE_CHECKING:
    from lightning_dsgd.rounds_strategy import RoundsStrategy

CHECKPOINT_KEY = "lightning_dsgd"


class RoundsMonitor(Callback):
    """Inserted by the strategy; users need not know it."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loaders = trainer.fit_loop._combined_loader
        if loaders is not None and len(loaders.flattened) != 1:
            raise ConfigurationError(
                f"training takes one dataloader and there are {len(loaders.flattened)}; combine "
                "them into one dataset"
            )
        _strategy(trainer).start_rounds(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % trainer.log_every_n_steps or not trainer.loggers:
            return
        strategy = _strategy(trainer)
        if strategy.last_round is not None:
            values = {f"dsgd/{name}": value for name, value in strategy.round_values().items()}
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            trainer.strategy.average_buffers()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = _strategy(trainer)
        strategy.average_buffers()
        strategy.finish()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        strategy = _strategy(trainer)
        checkpoint[CHECKPOINT_KEY] = {
            "strategy": strategy.strategy_name,
            "world_size": strategy.world_size,
            "policy": strategy.snapshot_policy(),
        }


def _strategy(trainer: Trainer) -> RoundsStrategy:
    strategy: RoundsStrategy = trainer.strategy
    return strategy
