"""Slow workers on demand: a callback for demos, tests and benchmarks."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.simulate.delays import Delays
from lightning_dsgd.trainer.worlds import Callback, LightningModule, Trainer

_REMEMBERED = 15
"""A factor multiplies the median time of so many mini-batches: the first one warms up."""


class Stragglers(Delays, Callback):
    """Pauses chosen ranks during each mini-batch. Rules add up; the order of calls does not matter.

    Args:
        rules: The rules as mappings, each with `kind` and that method's arguments, for example
            `{kind: slow, rank: 3, factor: 10}`.
        seed: Makes the pauses the same in every run.
    """

    def __init__(self, rules: list[dict[str, Any]] | None = None, seed: int = 0) -> None:
        super().__init__(rules, seed)
        self._step = 0
        self._began: float | None = None
        self._computed: deque[float] = deque(maxlen=_REMEMBERED)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A rule for a rank that is not there would silently do nothing."""
        world = trainer.world_size
        chosen = {*self.factors, *(rank for ranks, _ in self.delays for rank in ranks or ())}
        for rank in sorted(chosen):
            if not -world <= rank < world:
                raise ConfigurationError(
                    f"Stragglers: there is no rank {rank} among {world} workers; choose 0 to "
                    f"{world - 1}, or -1 for the last"
                )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._began = time.perf_counter()

    def on_minibatch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called by our strategies for every mini-batch, also where an iteration has several."""
        self._began = time.perf_counter()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        if self._began is None:
            return
        forward = time.perf_counter() - self._began
        computed = statistics.median(self._computed) if self._computed else 3 * forward
        seconds = self.pause(trainer.global_rank, trainer.world_size, self._step, computed)
        self._step += 1
        before = time.perf_counter()
        if seconds > 0:
            getattr(trainer.strategy, "sleep", time.sleep)(seconds)
        self._began += time.perf_counter() - before  # the pause itself is no computing

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._began is None:
            return
        self._computed.append(time.perf_counter() - self._began)
        self._began = None
