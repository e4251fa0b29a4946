"""What of Lightning would silently do the wrong thing with our strategies, and is refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.trainer.worlds import Trainer

_Normalisation = nn.modules.batchnorm._NormBase


def by_rank(values: Iterable[object]) -> str:
    """What differs between ranks, for a message."""
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def refuse_finder(trainer: Trainer, strategy: object) -> None:
    """It trains without the Trainer's callbacks, and so without an exchange."""
    if _uses(trainer, "LearningRateFinder"):
        raise ConfigurationError(
            f"the learning-rate finder does not work with {type(strategy).__name__}: it trains "
            "without the Trainer's callbacks; find the rate on one worker, without a strategy"
        )


def refuse_averaging(trainer: Trainer, strategy: object) -> None:
    """It would average each rank's own way, of which only the ends are common."""
    if _uses(trainer, "WeightAveraging"):
        raise ConfigurationError(
            f"averaging weights step by step does not work with {type(strategy).__name__}, whose "
            "ranks hold different weights within an epoch; use StochasticWeightAveraging"
        )


def refuse_averaged_statistics(trainer: Trainer, strategy: object) -> None:
    """With BatchNorm it ends with an epoch that makes no gradient, and waits for its update."""
    modules = trainer.lightning_module.modules()
    if _uses(trainer, "StochasticWeightAveraging") and any(
        isinstance(module, _Normalisation) for module in modules
    ):
        raise ConfigurationError(
            f"StochasticWeightAveraging with BatchNorm does not work with {type(strategy).__name__}"
            ": its last epoch makes no updates; leave it out, or normalise without statistics"
        )


def refuse_loader_argument(module: Any) -> None:
    """A rank that replays an update must not take a batch."""
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ConfigurationError(
            "training_step(dataloader_iter) takes batches by itself, also where a rank has no use "
            "for one; let it take `batch` and `batch_idx`"
        )


def refuse_optimizer_index(module: Any) -> None:
    """Lightning says of it that several optimizers need manual optimization: neither helps here."""
    if "optimizer_idx" in inspect.signature(module.training_step).parameters:
        raise ConfigurationError(
            "training_step takes `optimizer_idx`, which Lightning has not passed since version 2; "
            "remove the argument, and put all parameters into the groups of one optimizer in "
            "`configure_optimizers`"
        )


def refuse_empty_batch(batch: Any) -> None:
    """Lightning would go on to the next one, and this rank's gradient would be missing."""
    if batch is None:
        raise ConfigurationError(
            "the training loader has yielded None instead of a batch; a rank that skips one would "
            "leave the others waiting for its gradient: leave such rows out in the dataset or the "
            "sampler, or let `collate_fn` return a batch whose loss is zero"
        )


_NO_GROUP = "Default process group has not been initialized"
_INSTEAD = (
    "does without torch's default process group, which would tie all ranks to the slowest. Instead "
    "of initialising it, ask trainer.global_rank and trainer.world_size, give a sampler of your "
    "own trainer.strategy.distributed_sampler_kwargs, and use trainer.strategy.all_gather, .reduce "
    "and .broadcast; instead of ZeroRedundancyOptimizer, the optimizer that it wraps"
)


def explain_missing_group(error: BaseException, strategy: object) -> None:
    """Add to torch's bare error what to do; its class stays as it is, for whoever catches it."""
    text = str(error)
    if text.startswith(_NO_GROUP) and _INSTEAD not in text:
        error.args = (f"{text}\n{type(strategy).__name__} {_INSTEAD}", *error.args[1:])


def _uses(trainer: Trainer, name: str) -> bool:
    return any(
        base.__name__ == name for callback in trainer.callbacks for base in type(callback).__mro__
    )
