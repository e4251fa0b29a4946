"""What ranks do on the test device, beside the scenarios that run on it as they do on the CPU."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import lightning_dsgd as dsgd
import tests.lag as lag
from lightning_dsgd.backends.streams import Streams
from lightning_dsgd.cli.selfcheck.kernels import Stall
from lightning_dsgd.trainer.rounds import RoundsStrategy
from lightning_dsgd.workers.machine import Rule, WorkerMachine
from lightning_dsgd.workers.messages import Contribution, Decision, Dropped
from lightning_dsgd.workers.policy import RoundsPolicy, round_of
from tests.ranks.lightning_copy import pl
from tests.ranks.run import rank
from tests.ranks.toy import Toy, digest, loader, trainer_for

SEEDS = 20
SLOW = 3
"""The rank that is slow, where one is."""

# ------------------------------------------------- a strategy whose decisions know no time


class ScriptedPolicy(RoundsPolicy):
    """Waits for all whose turn it is; what it then takes, keeps and drops, dice have decided."""

    def __init__(self, workers: int, *, version: int = 0, max_lag: int = 64) -> None:
        super().__init__(workers, version=version, max_lag=max_lag)
        self._here: list[Contribution] = []
        self._came: set[int] = set()

    def _accept(self, event: Contribution, now: float) -> str | None:
        self._here.append(event)
        self._came.add(event.worker)
        return None

    def _complete(self, now: float) -> bool:
        return self._came >= {w for w in self.present if has_turn(w, self.version)}

    def _form(self, now: float) -> Sequence[Decision]:
        dice = random.Random(self.version)
        parts = sorted(self._here, key=lambda part: (part.worker, part.seq))
        taken = sorted(dice.sample(range(len(parts)), dice.randint(1, len(parts))))
        kept = [part for number, part in enumerate(parts) if number not in taken]
        old = [part for part in kept if dice.random() < 0.4 or self.version - part.version > 2]
        self._here = [part for part in kept if part not in old]
        self._came = set()
        made = [parts[number] for number in taken]
        dropped = [Dropped(part.worker, part.seq, "so fell the dice") for part in old]
        return [round_of(self.version, made, k=len(made), reason="so fell the dice"), *dropped]

    def _awaited(self) -> tuple[int, ...]:
        return ()


def has_turn(worker: int, version: int) -> bool:
    """At every fourth version a worker has none, and only replays the update."""
    return worker % 4 != version % 4


@dataclass(frozen=True)
class TurnsRule(Rule):
    def may_begin(self, me: WorkerMachine) -> bool:
        return me.begun == 0 and has_turn(me.rank, me.version)


class ScriptedStrategy(RoundsStrategy):
    """Stale gradients, several of one rank, broadcasts, drops and replays, always the same ones."""

    strategy_name = "scripted"
    summary = paper = "for tests"
    max_staleness = None

    def __init__(self) -> None:
        super().__init__(timeout=60.0)

    def make_policy(self, workers: int, *, version: int = 0) -> RoundsPolicy:
        return ScriptedPolicy(workers, version=version, max_lag=self.max_lag)

    def make_rule(self, workers: int) -> Rule:
        return TurnsRule()


class Normalised(Toy):
    """With statistics in buffers, and a loss and gradients that callbacks look at."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


SAME: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "synchronous": (
        lambda: dsgd.BackupWorkersStrategy(backups=0, timeout=60.0),
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3, "limit_train_batches": 8},
    ),
    "scripted": (ScriptedStrategy, {"limit_train_batches": 10}),
    "dc_s3gd": (lambda: dsgd.DCS3GDStrategy(timeout=60.0), {"limit_train_batches": 5}),
}


def _end(strategy: Any, **options: Any) -> dict[str, Any]:
    module = Normalised()
    trainer = trainer_for(strategy, max_epochs=1, **options)
    trainer.fit(module, loader(), loader(32, shuffle=False))
    buffers = [buffer.double().cpu().sum().item() for buffer in module.buffers()]
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"weights": digest(module), "buffers": buffers, "metrics": metrics}


def kernels_held_back(out: Path) -> dict[str, Any]:
    """The same trainings on the CPU, and on the device with kernels that come late at random."""
    found: dict[str, Any] = {}
    for name, (make, options) in SAME.items():
        cpu = _end(make(), accelerator="cpu", **options)
        ends = []
        for seed in range(SEEDS):
            lag.fuzz(seed)
            ends.append(_end(make(), **options))
        found[name] = {"cpu": cpu, "device": ends}
    lag.fuzz(os.environ.get("LAG_FUZZ"))
    return found


# ---------------------------------------------------------------------- a slow kernel


class Stalled(Toy):
    """Its backward takes so long on the device."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.network[:2](batch[0])
        return nn.functional.mse_loss(self.network[2](Stall.apply(hidden, self.seconds)), batch[1])


class Pace(pl.Callback):
    """When each gradient of this rank was begun, and each update made."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.updated: list[float] = []

    def on_minibatch_start(self, trainer: Any, pl_module: Any) -> None:
        self.begun.append(time.monotonic())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.updated.append(time.monotonic())


def _quartile(times: list[float], skipped: int = 3) -> float | None:
    """The lower one of the intervals, without those at the start; None where there are too few.

    Who holds a rank back makes all of them longer; a busy machine makes some.
    """
    late = times[skipped:]
    steps = [b - a for a, b in itertools.pairwise(late)]
    return statistics.quantiles(steps, n=4)[0] if len(steps) > 1 else None


def _in_turn(pace: Callable[[float], dict[str, float | None]]) -> dict[float, Any]:
    """With nobody's kernels slow, and with one rank's ten times slower, and again."""
    tries = [{factor: pace(factor) for factor in (1.0, 10.0)} for _ in range(TRIES)]
    return {factor: _least([found[factor] for found in tries]) for factor in (1.0, 10.0)}


def _least(paces: list[dict[str, float | None]]) -> dict[str, float | None]:
    """Of several tries."""
    known = {name: [pace[name] for pace in paces if pace[name] is not None] for name in paces[0]}
    return {name: min(values, default=None) for name, values in known.items()}


TRIES = 2


KERNEL = 0.08
"""Seconds."""


def _pace(strategy: Any, factor: float, updates: int) -> dict[str, Any]:
    seconds = KERNEL * (factor if rank() == SLOW else 1.0)
    pace = Pace()
    trainer = trainer_for(strategy, [pace], max_steps=updates, max_epochs=-1)
    trainer.fit(Stalled(seconds), loader(2048))
    told = strategy.tally.workers[SLOW].mean_seconds if strategy.tally is not None else None
    return {"gradient": _quartile(pace.begun), "update": _quartile(pace.updated), "told": told}


def _paces(make: Callable[[], Any], updates: int) -> dict[float, Any]:
    tries = [
        {factor: _pace(make(), factor, updates) for factor in (1.0, 10.0)} for _ in range(TRIES)
    ]
    return {factor: _least([found[factor] for found in tries]) for factor in (1.0, 10.0)}


TOLERANT: dict[str, tuple[Callable[[], Any], int]] = {
    "backup_workers": (lambda: dsgd.BackupWorkersStrategy(backups=1, timeout=60.0), 24),
    "k_batch_async": (lambda: dsgd.KBatchAsyncStrategy(timeout=60.0), 24),
    "cyclic_delay": (lambda: dsgd.CyclicDelayStrategy(skip_after=KERNEL / 4, timeout=60.0), 60),
}


def slow_kernels(out: Path) -> dict[str, Any]:
    return {name: _paces(make, updates) for name, (make, updates) in TOLERANT.items()}


@contextlib.contextmanager
def _by_the_training_stream() -> Iterator[None]:
    """The order that there was before exchanges had a stream of their own."""
    with mock.patch.object(Streams, "own", lambda self: contextlib.nullcontext()):
        yield


def slow_kernels_in_the_way(out: Path) -> dict[str, Any]:
    make, _ = TOLERANT["backup_workers"]
    with _by_the_training_stream():
        return _paces(make, 12)


def slowed_by_a_factor(out: Path) -> list[float] | None:
    """By what the device takes, and not by what queueing takes; rank 0's count of it."""
    slow = dsgd.Stragglers().slow(rank=SLOW, factor=4)
    strategy = dsgd.BackupWorkersStrategy(backups=1, timeout=60.0)
    trainer = trainer_for(strategy, [slow], max_steps=24, max_epochs=-1)
    trainer.fit(Stalled(KERNEL), loader(2048))
    tally = strategy.tally
    return None if tally is None else [worker.mean_seconds for worker in tally.workers]


def cancelled_kernels(out: Path) -> dict[str, Any]:
    """Late work is given up: of many slow layers only those that are queued are still computed."""

    class Deep(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(*(nn.Linear(6, 6) for _ in range(40)), nn.Linear(6, 3))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0]
            for layer in self.network:
                x = layer(Stall.apply(x, 0.02 if rank() == SLOW else 0.0005))
            return nn.functional.mse_loss(x, batch[1])

    strategy = dsgd.BackupWorkersStrategy(backups=1, cancel_late=True, timeout=60.0)
    # many more in one epoch than others make during its first gradient, which is not cancelled
    trainer_for(strategy, max_steps=100, max_epochs=-1).fit(Deep(), loader(2048))
    return {"tally": strategy.tally.as_dict() if strategy.tally is not None else None}


# ------------------------------------------------------------- waits of the training thread


class Waits(pl.Callback):
    """Where the training thread has waited for the device, from one update to the next."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.places: list[str] = []
        self._before = 0

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        self._look()

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        self._look()

    def _look(self) -> None:
        now = lag.host_waits()
        self.counts.append(now - self._before)
        if now > self._before and len(self.counts) > 2:
            self.places += lag.host_wait_places()[self._before - now :]
        self._before = now


QUIET: dict[str, Callable[[], Any]] = {
    "synchronous": lambda: dsgd.BackupWorkersStrategy(backups=0, compare_every=2, timeout=60.0),
    "backup_workers": lambda: dsgd.BackupWorkersStrategy(cancel_late=True, timeout=60.0),
    "k_async": lambda: dsgd.KAsyncStrategy(k=2, max_staleness=6, damping="distance", timeout=60.0),
    "k_batch_async": lambda: dsgd.KBatchAsyncStrategy(k=2, timeout=60.0),
    "cyclic_delay": lambda: dsgd.CyclicDelayStrategy(nonfinite="drop", timeout=60.0),
    "dc_s3gd": lambda: dsgd.DCS3GDStrategy(timeout=60.0),
    "dc_s3gd, not corrected": lambda: dsgd.DCS3GDStrategy(lambda0=0.0, timeout=60.0),
    "dc_s3gd in 16 bits": lambda: dsgd.DCS3GDStrategy(wire="fp16", timeout=60.0),
}


def host_waits(out: Path) -> dict[str, Any]:
    """Within an epoch: at its end DC-S3GD's ranks compare checksums."""
    found: dict[str, Any] = {}
    for name, make in QUIET.items():
        waits = Waits()
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3, "log_every_n_steps": 1}
        logger = pl.loggers.CSVLogger(out, name)
        trainer = trainer_for(make(), [waits], max_steps=8, max_epochs=-1, logger=logger, **options)
        trainer.fit(Toy(), loader(512))
        found[name] = {"counts": waits.counts[2:], "places": waits.places}
    return found


def gossip_waits(out: Path) -> dict[str, Any]:
    waits = Waits()
    trainer = trainer_for(dsgd.ADPSGDStrategy(timeout=60.0), [waits], max_epochs=1)
    trainer.fit(Toy(), loader(512))
    return {"ad_psgd": {"counts": waits.counts[2:-1], "places": waits.places}}


class Begun(Pace):
    """AD-PSGD's steps are batches."""

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        self.begun.append(time.monotonic())


def _gossip_pace(factor: float) -> dict[str, float | None]:
    seconds = KERNEL * (factor if rank() == SLOW else 1.0)
    pace = Begun()
    trainer_for(dsgd.ADPSGDStrategy(timeout=60.0), [pace], max_epochs=1).fit(
        Stalled(seconds), loader(320)
    )
    return {"gradient": _quartile(pace.begun)}


def gossip_beside_a_slow_kernel(out: Path) -> dict[str, Any]:
    """A partner's kernel is in nobody's way."""
    return {str(factor): pace for factor, pace in _in_turn(_gossip_pace).items()}


# ---------------------------------------------------------------------------- memory


class Wide(Stalled):
    """A third of a MiB of gradients, nearly all in one parameter."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.wide = nn.Parameter(torch.zeros(40_000))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.wide[:3].square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def memory(out: Path) -> dict[str, Any]:
    """Rank 3 falls behind as far as it may, again and again."""
    lag.fuzz(None)  # others would be as slow
    strategy = dsgd.KBatchAsyncStrategy(k=2, max_lag_mb=2, timeout=120.0)
    module = Wide(0.02 if rank() == SLOW else 0.0)

    class Before(pl.Callback):
        bytes = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            lag.reset_peak_memory_stats()
            self.bytes = lag.memory_allocated()

    before = Before()
    trainer = trainer_for(strategy, [before], max_steps=1000, max_epochs=-1)
    trainer.fit(module, loader(8192))
    nbytes = sum(p.numel() * p.element_size() for p in module.parameters())
    memory_bound = strategy.memory_bound(4, nbytes)
    lag.fuzz(os.environ.get("LAG_FUZZ"))
    return {
        "steps": trainer.global_step,
        "held": strategy.gradients_held,
        "bound": memory_bound.gradients(),
        "lag": memory_bound.bound.lag,
        "grown": (lag.max_memory_allocated() - before.bytes) / nbytes,
    }
