"""Synchronous SGD with backup workers.

J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz: "Revisiting Distributed Synchronous SGD",
arXiv 1604.00981.

N + b workers compute, the first N gradients make the update, the b late ones are dropped for that
update. This is K-sync with K = P - b, and that is all there is to the implementation.
"""

from __future__ import annotations

from typing import Any

from lightning_dsgd.backends import BackendName
from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.exchange.finite import NonFinite
from lightning_dsgd_plugins.k_family import KSyncStrategy


class BackupWorkersStrategy(KSyncStrategy):
    """Synchronous SGD that does not wait for the slowest `backups` workers of each update.

    Args:
        backups: Workers an update goes on without. 0 is plain synchronous SGD.
        cancel_late: End a late worker's computation as soon as the update has been decided without
            it, instead of letting it finish a gradient that will be dropped.
        backend: Collectives: 'horovod', 'torch', or 'auto' for what the launcher implies.
        timeout: Seconds after which a rank that does not come or answer ends the run, by name.
        max_lag: Updates a rank may be behind before the others wait for it.
        max_lag_mb: The same in MiB of gradients that wait at a rank, and never fewer than 4.
        rounds_per_epoch: Updates per epoch. Default: as many as use the data once, all ranks
            together.
        trace: Directory for a record of all events and decisions, for the simulator and planner.
        nonfinite: When a rank's gradient holds a NaN or an infinity: 'raise' ends the run on all
            ranks, by name; 'drop' leaves it out of all updates; 'ignore' looks for none.
        compare_every: Updates between two comparisons of all replicas' parameters, which also
            happen at the end of every epoch; one that differs ends the run, by name. 0: never.
    """

    paper = "Chen et al. 2016, arXiv 1604.00981"
    strategy_name = "backup_workers"
    planned = False  # it is K-sync with K = P - b: listing both would show every figure twice
    plainness = 4
    summary = "synchronous SGD that goes on without the b slowest workers of each update"

    def __init__(
        self,
        backups: int = 1,
        cancel_late: bool = False,
        backend: BackendName = "auto",
        timeout: float = 300.0,
        max_lag: int = 64,
        max_lag_mb: int = 1024,
        rounds_per_epoch: int | None = None,
        trace: str | None = None,
        nonfinite: NonFinite = "raise",
        compare_every: int = 100,
    ) -> None:
        if isinstance(backups, bool) or not isinstance(backups, int) or backups < 0:
            raise ConfigurationError(f"backups={backups!r} must be a whole number, 0 or more")
        super().__init__(
            None,
            cancel_late=cancel_late,
            backend=backend,
            timeout=timeout,
            max_lag=max_lag,
            max_lag_mb=max_lag_mb,
            rounds_per_epoch=rounds_per_epoch,
            trace=trace,
            nonfinite=nonfinite,
            compare_every=compare_every,
        )
        self.backups = backups

    def first_k(self, workers: int) -> int:
        if self.backups >= workers:
            raise ConfigurationError(
                f"backups={self.backups} leaves no worker of {workers} to wait for; choose "
                f"at most {workers - 1}, or start more workers"
            )
        return workers - self.backups

    @classmethod
    def with_k(cls, k: int, workers: int) -> dict[str, Any]:
        KSyncStrategy.with_k(k, workers)
        return {"backups": workers - k}
