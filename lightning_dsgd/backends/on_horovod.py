"""Collectives on Horovod. Every operation has a name; waiting polls with a sleep.

`hvd.synchronize` alone would spin on a core that the other ranks of the host need.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor

from lightning_dsgd.alarm import Alarm
from lightning_dsgd.backends import Backend, Channel

_SHORTEST_SLEEP = 1e-4
_LONGEST_SLEEP = 5e-3
_SLEEP_SHARE = 0.1
"""A wait sleeps a tenth of the time it has lasted: late by 10 %, and next to no wake-ups."""

_CROWDED_CYCLE_MS = "5"
"""Horovod's own thread wakes once per cycle (1 ms by default), which crowded cores feel."""


class HorovodBackend(Backend):
    """Horovod's global job. It is initialised once per process and left to its own exit handler."""

    name = "horovod"

    def __init__(self, rank: int, world_size: int, alarm: Alarm, timeout: float) -> None:
        super().__init__(rank, world_size, alarm, timeout)
        local_size = int(os.environ.get("HOROVOD_LOCAL_SIZE", "1"))
        if local_size > (os.cpu_count() or 1):
            os.environ.setdefault("HOROVOD_CYCLE_TIME", _CROWDED_CYCLE_MS)
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(int(max(timeout, 30))))
        import horovod.torch as hvd

        self.hvd: Any = hvd
        if not hvd.is_initialized():
            hvd.init()

    def channel(self, name: str) -> Channel:
        return HorovodChannel(name, self)

    def abandon(self) -> None:
        """Nothing here: shutting down waits for the peers, and the process's end tells them."""


class HorovodChannel(Channel):
    """Operations are told apart by the channel's name, so threads do not mix."""

    def __init__(self, name: str, backend: HorovodBackend) -> None:
        super().__init__(name, backend.rank, backend.world_size, backend.alarm, backend.timeout)
        self.hvd = backend.hvd

    def sum_(self, tensor: Tensor) -> None:
        self._finish("sum", lambda name: self.hvd.allreduce_async_(tensor, name=name, op=self.hvd.Sum))

    def broadcast_(self, tensor: Tensor, root: int) -> None:
        self._finish("broadcast", lambda name: self.hvd.broadcast_async_(tensor, root, name=name))

    def gather(self, tensor: Tensor) -> Tensor:
        row = tensor.unsqueeze(0)
        result: Tensor = self._finish("gather", lambda name: self.hvd.allgather_async(row, name=name))
        return result

    def _finish(self, kind: str, start: Any) -> Any:
        self.alarm.check()
        try:
            with torch.inference_mode(False):
                handle = start(f"dsgd.{self.name}.{kind}")
                self._wait(handle)
                return self.hvd.synchronize(handle)
        except RuntimeError as error:
            if error is self.alarm.error:
                raise
            raise self.broken(error) from error
        except ValueError as error:  # how Horovod reports an engine that has shut down
            raise self.broken(error) from error

    def _wait(self, handle: int) -> None:
        start = time.monotonic()
        while not self.hvd.poll(handle):
            self.alarm.check()
            waited = time.monotonic() - start
            if waited > self.timeout:
                self.alarm.ring(self.late())
            time.sleep(min(max(waited * _SLEEP_SHARE, _SHORTEST_SLEEP), _LONGEST_SLEEP))
