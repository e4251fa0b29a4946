"""Numbers that people read, and numbers that must not spread: losses, logs, what is not finite."""

from __future__ import annotations

import contextlib
import io
import math
import os
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loggers.logger import Logger, rank_zero_experiment
from torch import nn
from torch.utils.data import DataLoader, Subset

import lightning_dsgd as dsgd
from lightning_dsgd.control.trace import FILE_NAME
from tests.ranks.run import rank as own_rank
from tests.ranks.toy import LR, Toy, Watch, dataset, flat, loader, random_delays, trainer_for

Result = dict[str, Any]


def _gossip(**arguments: Any) -> list[Any]:
    """On Horovod it must be a process's first strategy, and here it is not."""
    if "HOROVOD_RANK" in os.environ:
        return []
    return [dsgd.ADPSGDStrategy(timeout=60.0, **arguments)]


# ----------------------------------------------------------------------- losses and sums


class _Remembers(Toy):
    """Keeps the loss of every mini-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss))
        return loss


def accumulated_losses(out: Path) -> Result:
    """Eight batches in groups of three: the last update accumulates over two."""
    module, watch = _Remembers(), Watch()
    strategy = dsgd.BackupWorkersStrategy(backups=0, timeout=60.0)
    options = {"accumulate_grad_batches": 3, "limit_train_batches": 8, "max_epochs": 1}
    trainer_for(strategy, [watch], **options).fit(module, loader())
    rounds = {round_.number: round_.loss for round_ in watch.rounds if round_ is not None}
    return {"losses": module.losses, "rounds": rounds}


class _Steep(Toy):
    """Every rank's gradient fits into 16 bits, and the sum of all does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.weight * 30_000.0).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.weight], lr=1 / 1024)


def narrow_sums(out: Path) -> Result:
    found: Result = {}
    for strategy in (
        dsgd.BackupWorkersStrategy(backups=0, timeout=60.0),
        dsgd.KBatchSyncStrategy(k=6, timeout=60.0),
    ):
        module = _Steep()
        options = {"precision": "16-true", "max_steps": 2, "max_epochs": -1}
        trainer_for(strategy, **options).fit(module, loader())
        found[strategy.strategy_name] = module.weight.tolist()
    return found


# ---------------------------------------------------------------------------------- logs


class Calls(Logger):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, dict[str, float]]] = []

    name, version = "calls", 0

    @property
    @rank_zero_experiment
    def experiment(self) -> None:
        return None

    def log_hyperparams(self, *values: Any) -> None:
        return None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((-1 if step is None else step, dict(metrics)))


class _Logs(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("own", loss, on_step=True, on_epoch=False)
        return loss


def logged_steps(out: Path) -> Result:
    found: Result = {}
    for strategy in (
        dsgd.BackupWorkersStrategy(backups=0, timeout=60.0),
        dsgd.DCS3GDStrategy(timeout=60.0),
        *_gossip(),
    ):
        calls = Calls()
        loggers = [calls, CSVLogger(out / strategy.strategy_name, name="", version="")]
        options = {"max_epochs": 2, "limit_train_batches": 6, "accumulate_grad_batches": 2}
        trainer_for(strategy, logger=loggers, log_every_n_steps=1, **options).fit(_Logs(), loader())
        found[strategy.strategy_name] = calls.calls
    return found


# ----------------------------------------------------------------------- what is not finite


class _Breaks(Toy):
    """Chosen ranks' gradients are not finite, from one mini-batch to another."""

    def __init__(self, ranks: tuple[int, ...], first: int, last: int, value: float) -> None:
        super().__init__(lr=0.01)
        self.ranks, self.bad, self.value = ranks, range(first, last + 1), value
        self.made = self.broken = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.made += 1
        broken = self.global_rank in self.ranks and self.made in self.bad
        self.broken += broken
        return loss * self.value if broken else loss


BOUND = "a rank may fall"
"""Said when a training begins."""


def _fit(strategy: Any, module: Any, *callbacks: Any, data: Any = None, **options: Any) -> Result:
    """How it ends, what was said meanwhile, and what was counted."""
    said, watch = io.StringIO(), Watch()
    adapted = {"max_epochs": 1} if strategy.exchange == "gossip" else {"max_steps": 12}
    watchers = [watch, *callbacks]
    trainer = trainer_for(strategy, watchers, **{"max_epochs": -1, **adapted, **options})
    end = None
    with contextlib.redirect_stdout(said):
        try:
            trainer.fit(module, data or loader())
        except dsgd.DSGDError as error:
            end = f"{type(error).__name__}: {error}"
    lines = said.getvalue().splitlines()
    ours = [line for line in lines if line.startswith("lightning-dsgd:") and BOUND not in line]
    tally = strategy.tally
    counted = {"tally": tally.as_dict(), "table": tally.table()} if tally else {}
    steps = trainer.global_step
    return {
        "end": end,
        "steps": steps,
        "said": ours,
        "weights": flat(module),
        "digests": watch.digests,
        **counted,
    }


def _paced(strategy: Any) -> list[Any]:
    """Where each rank goes its own way, those with nothing but work starve each other."""
    return [random_delays(0.01)] if strategy.exchange == "gossip" else []


def _every_kind(**arguments: Any) -> list[Any]:
    return [
        dsgd.BackupWorkersStrategy(backups=0, timeout=60.0, **arguments),
        dsgd.KAsyncStrategy(k=2, timeout=60.0, **arguments),
        dsgd.KBatchSyncStrategy(k=4, cancel_late=False, timeout=60.0, **arguments),
        dsgd.CyclicDelayStrategy(timeout=60.0, **arguments),
        dsgd.DCS3GDStrategy(timeout=60.0, **arguments),
        *_gossip(**arguments),
    ]


def broken_runs_end(out: Path) -> Result:
    """Rank 1's third gradient; and one that nobody looks at."""
    found: Result = {}
    for strategy in _every_kind()[1:]:
        breaks = _Breaks((1,), 3, 3, math.nan)
        found[strategy.strategy_name] = _fit(strategy, breaks, *_paced(strategy))["end"]
    strategy = dsgd.BackupWorkersStrategy(timeout=60.0)
    found["accumulated"] = _fit(strategy, _Breaks((1,), 3, 3, math.inf), accumulate_grad_batches=2)
    strategy = dsgd.BackupWorkersStrategy(backups=0, timeout=3.0, nonfinite="drop")
    found["never finite"] = _fit(strategy, _Breaks((0, 1, 2, 3), 1, 10**9, math.nan))
    strategy = dsgd.BackupWorkersStrategy(backups=0, timeout=60.0, nonfinite="ignore")
    found["ignored"] = _fit(strategy, _Breaks((1,), 3, 3, math.nan))
    return found


def broken_gradients_dropped(out: Path) -> Result:
    """Two of rank 1; and two of all ranks together."""
    found: Result = {}
    for strategy in _every_kind(nonfinite="drop"):
        name = strategy.strategy_name
        module = _Breaks((1,), 2, 3, math.inf)
        found[name] = {**_fit(strategy, module, *_paced(strategy)), "broken": module.broken}
    strategy = dsgd.BackupWorkersStrategy(backups=0, timeout=60.0, nonfinite="drop")
    found["all"] = _fit(strategy, _Breaks((0, 1, 2, 3), 3, 4, math.nan))
    return found


class _Spoils(_Breaks):
    """It is the data that is not finite, and so BatchNorm's statistics are not, either."""

    def __init__(self, *breaks: Any) -> None:
        super().__init__(*breaks)
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.made += 1
        broken = self.global_rank in self.ranks and self.made in self.bad
        self.broken += broken
        x = batch[0] * self.value if broken else batch[0]
        return nn.functional.mse_loss(self.network(x), batch[1])


def broken_statistics(out: Path) -> Result:
    found: Result = {}
    arguments: Any = {"timeout": 60.0, "nonfinite": "drop"}
    for strategy in (
        dsgd.BackupWorkersStrategy(backups=0, **arguments),
        dsgd.DCS3GDStrategy(**arguments),
        *_gossip(nonfinite="drop"),
    ):
        module = _Spoils((1,), 2, 2, math.nan)
        end = _fit(strategy, module, *_paced(strategy))["end"]
        floats = [b for b in module.buffers() if b.is_floating_point()]
        statistics = [b.double().cpu().numpy() for b in floats]
        found[strategy.strategy_name] = end, module.broken, statistics
    return found


# ---------------------------------------------------------------- replicas that differ


class _OneBit(pl.Callback):
    """After one update, rank 2 has one bit of one weight wrong."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == 2:
            pl_module.fixed.detach().view(torch.int64)[0] ^= 1


class _Frozen(Toy):
    """With a weight that no step changes: of another one, a step may round the bit away."""

    def __init__(self, lr: float = LR) -> None:
        super().__init__(lr)
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)


def one_bit_wrong(out: Path) -> Result:
    def synchronous(compare_every: int) -> Any:
        return dsgd.BackupWorkersStrategy(backups=0, timeout=60.0, compare_every=compare_every)

    def asynchronous(compare_every: int) -> Any:
        return dsgd.KBatchAsyncStrategy(k=2, timeout=60.0, compare_every=compare_every)

    wrong = _OneBit(5)
    epochs = {"max_steps": -1, "max_epochs": 99, "limit_train_batches": 8}
    frozen = {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 8}
    return {
        "in an epoch": _fit(synchronous(10), _Frozen(), wrong, max_steps=1_000),
        "asynchronous": _fit(asynchronous(10), _Frozen(lr=1e-4), wrong, max_steps=1_000),
        "after an epoch": _fit(synchronous(10**6), _Frozen(), wrong, **epochs),
        "in the end": _fit(synchronous(10**6), _Frozen(), wrong, max_steps=7),
        "after a drain": _fit(dsgd.DCS3GDStrategy(timeout=60.0), _Frozen(), wrong, **frozen),
        "never": _fit(synchronous(0), _Frozen(), wrong, max_steps=20),
    }


# ------------------------------------------------------------------- data that is not used


def never_used(out: Path) -> Result:
    """Rank 3 is late for every update of three epochs; its loader shuffles, or does not."""
    found: Result = {}
    options = {"max_steps": -1, "max_epochs": 3, "limit_train_batches": 6}
    options["use_distributed_sampler"] = False  # Lightning's own would shuffle
    for name, shuffle, rank in (
        ("kept", False, 3),
        ("finished", False, 3),
        ("shuffled", True, 3),
        ("used", False, None),
    ):
        backups = int(rank is not None)  # else whoever the machine slows would be late
        cancels = name != "finished"
        strategy = dsgd.BackupWorkersStrategy(backups=backups, cancel_late=cancels, timeout=60.0)
        delays = dsgd.Stragglers(seed=1)
        for each in range(4):
            delays.slow(each, seconds=0.4 if each == rank else 0.02)
        rows = Subset(dataset(), range(own_rank(), 256, 4))
        data = DataLoader(rows, batch_size=4, shuffle=shuffle)
        found[name] = _fit(strategy, Toy(), delays, data=data, **options)
    return found


# ------------------------------------------------------------------------- a full disk


def trace_on_a_full_disk(out: Path) -> Result:
    """Every write fails there, as soon as one is made."""
    trace = out / "full"
    if own_rank() == 0:
        trace.mkdir(exist_ok=True)
        (trace / FILE_NAME).symlink_to("/dev/full")
    strategy = dsgd.BackupWorkersStrategy(backups=0, timeout=60.0, trace=str(trace))
    return _fit(strategy, Toy(), max_steps=60)
