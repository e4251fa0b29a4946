"""User mistakes that only a job of several ranks shows: each must fail on every rank, at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import lightning_dsgd as dsgd
from tests.ranks.lightning_copy import pl
from tests.ranks.run import rank
from tests.ranks.toy import Toy, dataset, loader, trainer_for


def _fit(strategy: Any, module: Any = None, data: Any = None, **options: Any) -> None:
    trainer_for(strategy, max_epochs=1, **options).fit(
        module or Toy(), loader() if data is None else data
    )


def trace_in_a_file(out: Path) -> None:
    _fit(dsgd.KSyncStrategy(k=2, trace=f"{__file__}/trace"))


def too_many_backups(out: Path) -> None:
    _fit(dsgd.BackupWorkersStrategy(backups=4))


def k_above_the_world(out: Path) -> None:
    _fit(dsgd.KAsyncStrategy(k=5))


def k0_above_the_world(out: Path) -> None:
    _fit(dsgd.AdaSyncStrategy(k0=9))


def two_optimizers(out: Path) -> None:
    class Two(Toy):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

        automatic_optimization = True

    _fit("backup_workers", Two())


def manual_optimization(out: Path) -> None:
    module = Toy()
    module.automatic_optimization = False
    _fit("backup_workers", module)


def unequal_lengths(out: Path) -> None:
    data = torch.utils.data.DataLoader(dataset(40 + 8 * rank()), batch_size=4)
    _fit("backup_workers", data=data, use_distributed_sampler=False)


def no_length(out: Path) -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(dataset())

    _fit("k_sync", data=torch.utils.data.DataLoader(Endless(), batch_size=4))


def several_loaders(out: Path) -> None:
    _fit("backup_workers", data=[loader(), loader()])


def skipped_batch(out: Path) -> None:
    class Skips(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    _fit("backup_workers", Skips())


def half_precision(out: Path) -> None:
    class Scaled:
        scaler = torch.amp.GradScaler("cpu")

    strategy = dsgd.BackupWorkersStrategy()
    trainer = trainer_for(strategy, max_epochs=1)
    trainer.strategy.precision_plugin.scaler = Scaled.scaler
    trainer.fit(Toy(), loader())


def nothing_to_train(out: Path) -> None:
    _fit("backup_workers", Toy().requires_grad_(False))


def loader_as_argument(out: Path) -> None:
    class Takes(Toy):
        def training_step(self, dataloader_iter: Any) -> Any:
            return None

    _fit("k_sync", Takes())


def _averaged(strategy: str, callback: Any) -> None:
    class Normed(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(6)

    trainer_for(strategy, [callback], max_epochs=2).fit(Normed(), loader())


def stochastic_averaging_of_statistics(out: Path) -> None:
    _averaged("k_sync", pl.callbacks.StochasticWeightAveraging(0.01))


def stochastic_averaging_in_the_pipeline(out: Path) -> None:
    _averaged("dc_s3gd", pl.callbacks.StochasticWeightAveraging(0.01))


def averaging_by_step(out: Path) -> None:
    _averaged("dc_s3gd", pl.callbacks.EMAWeightAveraging())


def address_of_nobody(out: Path) -> None:
    os.environ["LIGHTNING_DSGD_ADDRESS"] = "203.0.113.7"
    try:
        _fit("backup_workers")
    finally:
        del os.environ["LIGHTNING_DSGD_ADDRESS"]


def batch_norm_across_ranks(out: Path) -> None:
    _fit("backup_workers", sync_batchnorm=True)


def learning_rate_finder(out: Path) -> None:
    trainer = trainer_for(
        "k_sync", [pl.callbacks.LearningRateFinder(num_training_steps=5)], max_epochs=1
    )
    trainer.fit(Toy(), loader())


def slow_rank_that_is_not_there(out: Path) -> None:
    trainer = trainer_for("k_sync", [dsgd.Stragglers().slow(rank=4)], max_epochs=1)
    trainer.fit(Toy(), loader())


def unequal_streams(out: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __len__(self) -> int:
            return 40 + 8 * rank()

        def __iter__(self) -> Any:
            return iter(dataset(len(self)))

    _fit("backup_workers", data=torch.utils.data.DataLoader(Stream(), batch_size=4))


def _some_none(rows: list[Any]) -> Any:
    """A `collate_fn` that skips what it does not like."""
    return None if rank() == 1 else torch.utils.data.default_collate(rows)


def empty_batch(out: Path) -> None:
    _fit("k_batch_sync", data=loader(collate_fn=_some_none))


def empty_batch_in_the_pipeline(out: Path) -> None:
    _fit("dc_s3gd", data=loader(collate_fn=_some_none))


def optimizer_index(out: Path) -> None:
    class Indexed(Toy):
        def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any:
            return super().training_step(batch, batch_idx)

    _fit("backup_workers", Indexed())


EXPECTED = {
    "trace_in_a_file": "rank 0 cannot write there",
    "optimizer_index": "remove the argument",
    "loader_as_argument": "training_step(dataloader_iter)",
    "stochastic_averaging_of_statistics": "StochasticWeightAveraging with BatchNorm",
    "stochastic_averaging_in_the_pipeline": "StochasticWeightAveraging with BatchNorm",
    "averaging_by_step": "use StochasticWeightAveraging",
    "batch_norm_across_ranks": "sync_batchnorm=True",
    "learning_rate_finder": "learning-rate finder",
    "slow_rank_that_is_not_there": "no rank 4 among 4 workers",
    "unequal_streams": "rank 3: 16",
    "nothing_to_train": "no parameter to train",
    "address_of_nobody": "set LIGHTNING_DSGD_ADDRESS",
    "too_many_backups": "backups=4",
    "k_above_the_world": "k=5",
    "k0_above_the_world": "k=9",
    "two_optimizers": "one optimizer",
    "manual_optimization": "automatic optimization",
    "unequal_lengths": "rank 3: 16",
    "no_length": "rounds_per_epoch",
    "several_loaders": "one dataloader",
    "half_precision": "bf16-mixed",
    "skipped_batch": "no loss",
}


def sharded_optimizer(out: Path) -> None:
    class Sharded(Toy):
        def configure_optimizers(self) -> Any:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)

    _fit("backup_workers", Sharded())


def sampler_of_ones_own(out: Path) -> None:
    class Own(Toy):
        def train_dataloader(self) -> Any:
            data = dataset()
            own = torch.utils.data.DistributedSampler(data)
            return torch.utils.data.DataLoader(data, batch_size=4, sampler=own)

    trainer_for("dc_s3gd", max_epochs=1, use_distributed_sampler=False).fit(Own())


def group_in_the_step(out: Path) -> None:
    class Asks(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            torch.distributed.get_rank()

    _fit("k_sync", Asks())


EMPTY = ("empty_batch", "empty_batch_in_the_pipeline")
"""One rank's mistake in mid-training: the others learn of it."""

NEED_A_GROUP = ("sharded_optimizer", "sampler_of_ones_own", "group_in_the_step")
"""What torch's default process group is asked for by; its error stays torch's."""
