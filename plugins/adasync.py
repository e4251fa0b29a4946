"""AdaSync: the amount of synchrony grows as the loss falls.

S. Dutta, J. Wang, G. Joshi: "Slow and Stale Gradients Can Win the Race", arXiv 2003.10579.

Every `interval` seconds K is set anew from the training loss F that the rounds report:

- counting mini-batches, K = K0 * sqrt(F(w_0) / F(w_t));
- counting workers, the positive root of K² + cK - cP = 0, c = K0² F(w_0) / ((P - K0) F(w_t)).

K is rounded and kept between 1 and P. The coordinator's policy decides it and every update carries
it, so all replicas know the same K.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from lightning_dsgd.backends import BackendName
from lightning_dsgd.damping import Damping
from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.policy import RoundsPolicy
from lightning_dsgd.protocol import Contribution, Decision, KChanged
from lightning_dsgd_plugins.k_family import (
    FirstKPolicy,
    KAsyncStrategy,
    KBatchAsyncStrategy,
    KBatchSyncStrategy,
    KFamilyStrategy,
    KSyncStrategy,
)

Variant = Literal["k_sync", "k_batch_sync", "k_async", "k_batch_async"]

_VARIANTS: dict[str, type[KFamilyStrategy]] = {
    cls.strategy_name: cls
    for cls in (KSyncStrategy, KBatchSyncStrategy, KAsyncStrategy, KBatchAsyncStrategy)
}
_MEMORY = 0.9
"""How much of the running loss stays from one round to the next."""


def synchrony(ratio: float, k0: int, workers: int, *, counts_batches: bool) -> float:
    """The paper's K for a loss that has fallen to 1/ratio of what it was."""
    if counts_batches:
        return k0 * math.sqrt(ratio)
    if k0 >= workers:
        return float(workers)
    c = k0 * k0 * ratio / (workers - k0)
    return 2 * workers / (1 + math.sqrt(1 + 4 * workers / c))  # the root, stable for large c


class AdaSyncPolicy(FirstKPolicy):
    """FirstK whose K follows the loss of its own rounds."""

    def __init__(self, workers: int, k: int, *, interval: float, **rest: Any) -> None:
        super().__init__(workers, k, **rest)
        self.k0 = k
        self.total = workers
        self.interval = interval
        self.first_loss: float | None = None
        self.loss: float | None = None
        self._next = interval

    def _after_round(self, parts: list[Contribution], now: float) -> list[Decision]:
        losses = [part.loss for part in parts if part.loss is not None and math.isfinite(part.loss)]
        if losses:
            self._follow(sum(losses) / len(losses))
        if now < self._next or not self.loss or self.first_loss is None:
            return []
        self._next = now + self.interval
        return self._reconsider(self.first_loss / self.loss)

    def _follow(self, loss: float) -> None:
        if self.first_loss is None or self.loss is None:
            self.first_loss = self.loss = loss
        self.loss = _MEMORY * self.loss + (1 - _MEMORY) * loss

    def _reconsider(self, ratio: float) -> list[Decision]:
        if not ratio > 0:
            return []
        batches = self.counted == "batches"
        wanted = synchrony(ratio, self.k0, self.total, counts_batches=batches)
        k = max(1, round(min(wanted, self.total)))
        if k == self.k:
            return []
        before, self.k = self.k, k
        assert self.loss is not None
        reason = f"loss {self.loss:.4g} is 1/{ratio:.3g} of the first: K {before} -> {k}"
        return [KChanged(k, self.loss, reason)]

    def state(self) -> dict[str, Any]:
        return {"k": self.k, "first_loss": self.first_loss, "loss": self.loss}

    def restore(self, state: dict[str, Any]) -> None:
        self.k = min(int(state["k"]), self.total)
        self.first_loss, self.loss = state["first_loss"], state["loss"]


class AdaSyncStrategy(KFamilyStrategy):
    """One of the four K variants with a K that adapts to the loss while training.

    Args:
        variant: Which of them: 'k_sync', 'k_batch_sync', 'k_async' or 'k_batch_async'.
        k0: K at the start.
        interval: Seconds between two looks at the loss.
        max_staleness: For the async variants: drop gradients older than this many updates.
        damping: For the async variants: weight of stale gradients, 'none', 'inverse' or 'distance'.
        damping_constant: The C of 'distance'.
        cancel_late: For the sync variants: end a late worker's computation at the update.
        backend: Collectives: 'horovod', 'torch', or 'auto' for what the launcher implies.
        timeout: Seconds after which a rank that does not come or answer ends the run, by name.
        max_lag: Updates a rank may be behind before the others wait for it.
        rounds_per_epoch: Updates per epoch. Default: one batch of every rank per update.
        trace: Directory for a record of all events and decisions, for the simulator and planner.
    """

    paper = "Dutta et al. 2020, arXiv 2003.10579"
    strategy_name = "adasync"
    summary = "a K variant whose K grows as the loss falls"

    def __init__(
        self,
        variant: Variant = "k_sync",
        k0: int = 1,
        interval: float = 10.0,
        max_staleness: int | None = None,
        damping: Damping = "none",
        damping_constant: float = 1.0,
        cancel_late: bool = True,
        backend: BackendName = "auto",
        timeout: float = 300.0,
        max_lag: int = 64,
        rounds_per_epoch: int | None = None,
        trace: str | None = None,
    ) -> None:
        if variant not in _VARIANTS:
            raise ConfigurationError(
                f"variant={variant!r} is unknown; choose {', '.join(_VARIANTS)}"
            )
        if isinstance(k0, bool) or not isinstance(k0, int):
            raise ConfigurationError(f"k0={k0!r} must be a whole number, 1 or more")
        if not interval > 0:
            raise ConfigurationError(f"interval={interval} must be a positive number of seconds")
        cls = _VARIANTS[variant]
        self.variant = variant
        self.counted = cls.counted  # type: ignore[misc]  # fixed per class there, chosen here
        self.keeps_late_work = cls.keeps_late_work  # type: ignore[misc]  # likewise
        super().__init__(
            k0,
            max_staleness=max_staleness,
            damping=damping,
            damping_constant=damping_constant,
            cancel_late=cancel_late and not cls.keeps_late_work,
            backend=backend,
            timeout=timeout,
            max_lag=max_lag,
            rounds_per_epoch=rounds_per_epoch,
            trace=trace,
        )
        self.interval = interval

    def policy_arguments(self) -> dict[str, Any]:
        k0 = super().gradients_per_round()
        return {**super().policy_arguments(), "k": k0, "interval": self.interval}

    def gradients_per_round(self) -> int:
        super().gradients_per_round()
        return self.world_size

    def make_policy(self, arguments: dict[str, Any]) -> RoundsPolicy:
        return AdaSyncPolicy(**arguments)
