"""What is tried, one check after the other; each returns a line on how it went, or raises.

All ranks run the same checks in the same order.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_dsgd.backends import Channel
from lightning_dsgd.cli.selfcheck.kernels import BATCH, Probe, dataset, loader, pl
from lightning_dsgd.errors import PeerLostError
from lightning_dsgd.registry import load

STALL = 0.03
"""Seconds of a kernel; ten times as many on the slow rank."""
HELD = 2.0
"""From how much longer a gradient of the others counts as held up by the slow rank."""
TOLERANT: dict[str, tuple[dict[str, Any], int]] = {
    "backup_workers": ({"backups": 1}, 20),
    "k_sync": ({}, 20),
    "k_batch_sync": ({}, 20),
    "k_async": ({}, 20),
    "k_batch_async": ({}, 20),
    "adasync": ({"k0": 1, "interval": 3600.0}, 40),
    "cyclic_delay": ({"skip_after": STALL / 4}, 60),
}
"""The rounds strategies: arguments, and updates to look at."""


class CheckFailed(Exception):
    """What was seen instead."""


class Job(NamedTuple):
    """Where the checks run."""

    rank: int
    ranks: int
    accelerator: str
    backend: str

    @property
    def is_slow(self) -> bool:
        """One rank is, where one is to be."""
        return self.rank == self.ranks - 1

    def trainer(self, strategy: Any, callbacks: Any = (), **options: Any) -> Any:
        return pl.Trainer(
            accelerator=self.accelerator,
            devices=self.ranks,
            strategy=strategy,
            callbacks=list(callbacks),
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )

    def strategy(self, name: str, **arguments: Any) -> Any:
        return load(name)(backend=self.backend, timeout=60.0, **arguments)


# ------------------------------------------------------------------------- collectives


class _During(pl.Callback):  # type: ignore[misc]  # either copy's
    """Does something when a training has begun."""

    def __init__(self, act: Callable[[Any, Any], None]) -> None:
        self._act = act

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._act(trainer.strategy, pl_module.device)


def collectives(job: Job) -> str:
    """Of each kind, on the channel of exchanges and on that of Lightning."""
    seen: list[str] = []

    def act(strategy: Any, device: torch.device) -> None:
        own = strategy._backend.channel("selftest", on_device=True)
        reaches = own.reaches(device)
        seen.append(f"{device}, {'on the device' if reaches else 'through host memory'}")
        with strategy.streams.own():
            _try_all(own, device)
        _try_all(strategy._main, device)

    name = "backup_workers"
    job.trainer(job.strategy(name), [_During(act)], max_steps=2).fit(Probe(), loader(1024))
    return seen[0]


def _try_all(channel: Channel, device: torch.device) -> None:
    rank, size = channel.rank, channel.world_size
    total = torch.full((1000,), float(rank), device=device)
    channel.sum_(total)
    _require(channel, total, torch.full((1000,), size * (size - 1) / 2), "sum")
    root = torch.full((7,), rank, device=device)
    channel.broadcast_(root, size - 1)
    _require(channel, root, torch.full((7,), size - 1), "broadcast")
    rows = channel.gather(torch.full((3,), rank, device=device))
    _require(channel, rows, torch.arange(size)[:, None].expand(size, 3), "gather")


def _require(channel: Channel, found: Tensor, expected: Tensor, kind: str) -> None:
    if not torch.equal(found.cpu(), expected):
        raise CheckFailed(f"{kind} on '{channel.name}' gave {found.flatten()[:4].tolist()}")


# ------------------------------------------------------------------------------ numbers


def replicas(job: Job) -> str:
    """Of a strategy that drops and replays; it compares them itself, by checksums."""
    strategy = job.strategy("k_batch_async", compare_every=5)
    module = Probe()
    job.trainer(strategy, max_steps=20).fit(module, loader(4096))
    return "20 updates of k_batch_async, checksums every 5"


def as_ddp(job: Job) -> str:
    """One process computes what all ranks together must have come to."""
    module, updates = Probe(), 10
    whole = BATCH * job.ranks * updates
    rows = Subset(dataset(whole), range(job.rank, whole, job.ranks))
    strategy = job.strategy("backup_workers", backups=0)
    trainer = job.trainer(strategy, max_steps=updates, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(rows, batch_size=BATCH))
    expected = _alone(job.ranks, updates)
    pairs = zip(module.parameters(), expected.parameters(), strict=True)
    worst = max(float((a.detach().cpu() - b.detach()).abs().max()) for a, b in pairs)
    if not worst < 1e-4:
        raise CheckFailed(f"weights differ by {worst:.2g} after {updates} updates")
    return f"weights differ by {worst:.1g} after {updates} updates"


def _alone(ranks: int, updates: int) -> Probe:
    """All ranks' batches in one, on the CPU."""
    module = Probe()
    optimizer = module.configure_optimizers()
    x, y = dataset(BATCH * ranks * updates).tensors
    for update in range(updates):
        rows = slice(update * BATCH * ranks, (update + 1) * BATCH * ranks)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(x[rows]), y[rows]).backward()
        optimizer.step()
    return module


# --------------------------------------------------------------------------- slow kernels


class _Begun(pl.Callback):  # type: ignore[misc]  # either copy's
    """When each gradient of this rank was begun."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_minibatch_start(self, trainer: Any, pl_module: Any) -> None:
        self.times.append(time.monotonic())

    def seconds(self) -> float:
        """Of a gradient; the first ones warm up."""
        steps = [b - a for a, b in itertools.pairwise(self.times[3:])]
        return statistics.median(steps) if steps else float("nan")


def slow_kernel(name: str) -> Callable[[Job], str]:
    """A check of that strategy: does one rank's slow kernel hold the others?"""

    def check(job: Job) -> str:
        usual, slow = (_pace(job, name, factor) for factor in (1, 10))
        if job.is_slow:
            return "this rank was the slow one"
        if slow > HELD * usual:
            raise CheckFailed(f"a gradient took {slow:.3f} s instead of {usual:.3f}")
        return f"a gradient takes {slow / usual:.2f} times as long beside a rank 10 times slower"

    return check


def _pace(job: Job, name: str, factor: int) -> float:
    arguments, updates = TOLERANT[name]
    strategy, begun = job.strategy(name, **arguments), _Begun()
    module = Probe(STALL * (factor if job.is_slow else 1))
    job.trainer(strategy, [begun], max_steps=updates).fit(module, loader(65536))
    return begun.seconds()


def memory_bound(job: Job) -> str:
    """A rank falls behind as far as it may; nobody holds more gradients than announced."""
    strategy = job.strategy("k_batch_async", max_lag_mb=16)
    module = Probe(STALL if job.is_slow else 0.0, more=1_000_000)
    job.trainer(strategy, max_steps=200).fit(module, loader(65536))
    nbytes = sum(p.numel() * p.element_size() for p in module.parameters())
    bound, held = strategy.memory_bound(job.ranks, nbytes), strategy.gradients_held
    if held > bound.gradients():
        raise CheckFailed(f"held {held} gradients at once, at most {bound.gradients()} due")
    return f"at most {held} gradients of {nbytes >> 20} MiB at once, {bound.gradients()} allowed"


class _Hidden(pl.Callback):  # type: ignore[misc]  # either copy's
    """The share of all exchanges that went on behind gradients."""

    share = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if trainer.global_step in (4, 11):  # what comes before the first is for warming up
            self.share = trainer.strategy.logged_values().get("hidden", 0.0)


def overlap(job: Job) -> str:
    """Of DC-S3GD: its exchange of 8 MB against a gradient's time."""
    hidden = _Hidden()
    trainer = job.trainer(job.strategy("dc_s3gd"), [hidden], max_steps=12)
    trainer.fit(Probe(5 * STALL, more=2_000_000), loader(65536))
    if hidden.share < 0.5:
        raise CheckFailed(f"only {hidden.share:.0%} of the exchanges went on behind gradients")
    return f"{hidden.share:.0%} of the exchanges went on behind gradients"


# ------------------------------------------------------------------------------ a fault


def killed(job: Job) -> str:
    """The last rank is killed; all others say so."""
    module = Probe(dies_at=5 if job.is_slow else None)
    began = time.monotonic()
    try:
        job.trainer(job.strategy("k_sync"), max_steps=100_000).fit(module, loader(65536))
    except PeerLostError as error:
        if f"rank {job.ranks - 1} is lost" not in str(error):
            raise CheckFailed(f"said: {error}") from None
        return f"said after {time.monotonic() - began:.1f} s of training: {error}"
    raise CheckFailed("training went on")


CHECKS: dict[str, Callable[[Job], str]] = {
    "collectives": collectives,
    "replicas": replicas,
    "as DDP": as_ddp,
    **{f"slow kernel, {name}": slow_kernel(name) for name in TOLERANT},
    "memory bound": memory_bound,
    "overlap of dc_s3gd": overlap,
}
LAST = "killed rank"
"""In a launch of its own."""
