"""Weight decay that grows to its value over the first steps.

torch has schedules for the learning rate (`LinearLR`, `SequentialLR`) and none for weight decay.
"""

from __future__ import annotations

from typing import Any

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.trainer.worlds import Callback, LightningModule, Trainer

_TARGET = "target_weight_decay"
"""Kept in the optimizer's groups, and so in checkpoints, as schedules keep `initial_lr`."""


class WeightDecayWarmup(Callback):
    """Raises every parameter group's weight decay linearly from a share of its value to all of it.

    Args:
        steps: Optimizer steps until the full value is reached.
        start: The share to begin with.
    """

    def __init__(self, steps: int, start: float = 0.0) -> None:
        if steps < 1:
            raise ConfigurationError(f"steps={steps} must be at least 1")
        if not 0 <= start <= 1:
            raise ConfigurationError(f"start={start} must be between 0 and 1")
        self.steps = steps
        self.start = start

    def share(self, step: int) -> float:
        """Of the full weight decay, in the step of that number, counted from 0."""
        return self.start + (1 - self.start) * min(1.0, step / self.steps)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        share = self.share(trainer.global_step)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                target = group.setdefault(_TARGET, group.get("weight_decay", 0.0))
                group["weight_decay"] = share * target
