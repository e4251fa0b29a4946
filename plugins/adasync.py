"""AdaSync: the amount of synchrony grows as the loss falls.

S. Dutta, J. Wang, G. Joshi: "Slow and Stale Gradients Can Win the Race", arXiv 2003.10579.

Every `interval` seconds K is set anew from the training loss F that the rounds report, F(w_0) being
the mean over the first P mini-batches, so that no single one sets K for the whole run:

- counting mini-batches, K = K0 * sqrt(F(w_0) / F(w_t));
- counting workers, the positive root of K² + cK - cP = 0, c = K0² F(w_0) / ((P - K0) F(w_t)).

K is rounded and kept between 1 and P. The coordinator's policy decides it and every update carries
it, so all replicas know the same K.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from lightning_dsgd.backends import BackendName
from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.exchange.damping import Damping
from lightning_dsgd.exchange.finite import NonFinite
from lightning_dsgd.workers.messages import Contribution, Decision, KChanged
from lightning_dsgd.workers.policy import RoundsPolicy, mean_loss
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
_MINIBATCHES_PER_LOOK = 50
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

    heeds_loss = True

    def __init__(self, workers: int, k: int, *, interval: float, **rest: Any) -> None:
        super().__init__(workers, k, **rest)
        self.k0 = k
        self.total = workers
        self.interval = interval
        self.first_loss: float | None = None
        self.loss: float | None = None
        self._measured = 0
        """Mini-batches in the first loss, until there are enough of them."""
        self._next = interval

    def _after_round(self, parts: list[Contribution], now: float) -> list[Decision]:
        known = [part for part in parts if part.loss is not None and math.isfinite(part.loss)]
        loss = mean_loss(known)
        if loss is not None:
            self._follow(loss, sum(part.batches for part in known))
        if now < self._next or self._measured < self.total or not self.loss:
            return []
        assert self.first_loss is not None
        self._next = now + self.interval
        return self._reconsider(self.first_loss / self.loss)

    def _follow(self, loss: float, batches: int) -> None:
        """The first ones are averaged, with equal weights; what comes after them fades in."""
        if self._measured < self.total:
            so_far = (self.first_loss or 0.0) * self._measured
            self._measured += batches
            self.first_loss = self.loss = (so_far + loss * batches) / self._measured
        else:
            assert self.loss is not None
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
        return {
            "k": self.k,
            "first_loss": self.first_loss,
            "loss": self.loss,
            "measured": self._measured,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.k = min(int(state["k"]), self.total)
        self.first_loss, self.loss = state["first_loss"], state["loss"]
        known = self.first_loss is not None
        self._measured = int(state.get("measured", self.total if known else 0))


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
        max_lag_mb: The same in MiB of gradients that wait at a rank, and never fewer than 4.
        rounds_per_epoch: Updates per epoch. Default: one batch of every rank per update.
        trace: Directory for a record of all events and decisions, for the simulator and planner.
        nonfinite: When a rank's gradient holds a NaN or an infinity: 'raise' ends the run on all
            ranks, by name; 'drop' leaves it out of all updates; 'ignore' looks for none.
        compare_every: Updates between two comparisons of all replicas' parameters, which also
            happen at the end of every epoch; one that differs ends the run, by name. 0: never.
    """

    paper = "Dutta et al. 2020, arXiv 2003.10579"
    strategy_name = "adasync"
    plainness = 5
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
        max_lag_mb: int = 1024,
        rounds_per_epoch: int | None = None,
        trace: str | None = None,
        nonfinite: NonFinite = "raise",
        compare_every: int = 100,
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
            max_lag_mb=max_lag_mb,
            rounds_per_epoch=rounds_per_epoch,
            trace=trace,
            nonfinite=nonfinite,
            compare_every=compare_every,
        )
        self.k0 = k0
        self.interval = interval

    def gradients_per_round(self, workers: int) -> int:
        return workers

    def check_workers(self, workers: int) -> None:
        self.first_k(workers)

    def make_policy(self, workers: int, *, version: int = 0) -> RoundsPolicy:
        return AdaSyncPolicy(
            workers,
            self.first_k(workers),
            interval=self.interval,
            counted=self.counted,
            max_staleness=self.max_staleness,
            version=version,
            max_lag=self.max_lag,
        )

    @classmethod
    def with_k(cls, k: int, workers: int) -> dict[str, Any]:
        return {"k0": super().with_k(k, workers)["k"]}

    @classmethod
    def choices(cls, workers: int, seconds: float) -> list[dict[str, Any]]:
        """K has some fifty mini-batches' time to show its effect."""
        interval = float(f"{_MINIBATCHES_PER_LOOK * seconds:.3g}")
        return [{**cls.with_k(max(1, workers // 4), workers), "interval": interval}]
