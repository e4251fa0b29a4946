"""Synchronous SGD with backup workers.

J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz: "Revisiting Distributed Synchronous SGD",
arXiv 1604.00981.

N + b workers compute, the first N gradients make the update, the b late ones are dropped for that
update. This is K-sync with K = P - b, and that is all there is to the implementation.
"""

from __future__ import annotations

from lightning_dsgd.backends import BackendName
from lightning_dsgd.errors import ConfigurationError
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
        rounds_per_epoch: Updates per epoch. Default: as many as use the data once, all ranks
            together.
        trace: Directory for a record of all events and decisions, for the simulator and planner.
    """

    paper = "Chen et al. 2016, arXiv 1604.00981"
    strategy_name = "backup_workers"
    summary = "synchronous SGD that goes on without the b slowest workers of each update"

    def __init__(
        self,
        backups: int = 1,
        cancel_late: bool = False,
        backend: BackendName = "auto",
        timeout: float = 300.0,
        max_lag: int = 64,
        rounds_per_epoch: int | None = None,
        trace: str | None = None,
    ) -> None:
        if isinstance(backups, bool) or not isinstance(backups, int) or backups < 0:
            raise ConfigurationError(f"backups={backups!r} must be a whole number, 0 or more")
        super().__init__(
            None,
            cancel_late=cancel_late,
            backend=backend,
            timeout=timeout,
            max_lag=max_lag,
            rounds_per_epoch=rounds_per_epoch,
            trace=trace,
        )
        self.backups = backups

    def gradients_per_round(self) -> int:
        if self.backups >= self.world_size:
            raise ConfigurationError(
                f"backups={self.backups} leaves no worker of {self.world_size} to wait for; choose "
                f"at most {self.world_size - 1}, or start more workers"
            )
        return self.world_size - self.backups
