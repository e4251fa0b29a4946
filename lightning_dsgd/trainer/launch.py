"""How this process was launched, and what follows from it."""

from __future__ import annotations

import os

import torch

from lightning_dsgd.backends import horovod_launched
from lightning_dsgd.backends.hosts import LOOPBACK
from lightning_dsgd.trainer.worlds import LightningEnvironment


class HorovodEnvironment(LightningEnvironment):
    """horovodrun's environment variables, as Lightning's cluster environment."""

    def __init__(self) -> None:
        super().__init__()
        self._global_rank = int(os.environ["HOROVOD_RANK"])
        self._world_size = int(os.environ["HOROVOD_SIZE"])

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        """Where ranks meet; the launcher's own host unless somebody says otherwise."""
        launcher = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", LOOPBACK)
        return os.environ.get("MASTER_ADDR", launcher)

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        return horovod_launched()

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None:
        return

    def global_rank(self) -> int:
        return self._global_rank

    def set_global_rank(self, rank: int) -> None:
        return

    def local_rank(self) -> int:
        return int(os.environ["HOROVOD_LOCAL_RANK"])

    def node_rank(self) -> int:
        return int(os.environ.get("HOROVOD_CROSS_RANK", "0"))

    def local_size(self) -> int:
        """Ranks on this host."""
        return int(os.environ.get("HOROVOD_LOCAL_SIZE", "1"))

    def teardown(self) -> None:
        return


def limit_threads(local_size: int) -> None:
    """Share the host's cores among its ranks, unless the user has said otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, local_size)))
