"""Collectives on Horovod. Every operation has a name; waiting polls with a sleep.

`hvd.synchronize` alone would spin on a core that the other ranks of the host need.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dsgd.backends import LONGEST_SLEEP, MEETING_SECONDS, Backend, Channel, Edge
from lightning_dsgd.backends.forks import FORKS
from lightning_dsgd.backends.hosts import address_of, leaves_host
from lightning_dsgd.backends.streams import LONGEST_LOOK
from lightning_dsgd.control.alarm import Alarm
from lightning_dsgd.errors import BackendError, RunError

_CROWDED_CYCLE_MS = "12"
"""All ranks' Horovod threads meet once per cycle (1 ms by default), busy or not: on a host with
more ranks than cores that alone would cost an idle rank a third of a core."""

_generation = 0
"""Of the operations' names: this rank wants a new one when it has left an operation unfinished."""

_not_met = False
"""This rank has come to a training at which not all others arrived."""

_process_sets: dict[Edge, Any] = {}
"""The pairs that Horovod knows; it is started once per process."""


def _pair_sets(hvd: Any, edges: Sequence[Edge], world_size: int) -> list[Any]:
    """The process sets to start Horovod with; two ranks alone are the global one already."""
    if world_size == 2:
        _process_sets.update(dict.fromkeys(edges, hvd.global_process_set))
        return []
    _process_sets.update({edge: hvd.ProcessSet(list(edge)) for edge in edges})
    return list(_process_sets.values())


_LAST_WORDS = 10.0
"""Seconds between Horovod's decision to abort the process and the process's end."""


def _delay_abort(signum: int) -> None:
    """Hold up a thread that is not Python's own; any other aborts at once."""
    if isinstance(threading.current_thread(), threading._DummyThread):
        time.sleep(_LAST_WORDS)


_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_delay_abort)


def _await_last_words() -> None:
    """Do not let Horovod end the process before it has said why.

    When a peer is lost, Horovod's thread tries to remove its process sets together with it, fails,
    and aborts. Python's own signal handlers run in the main thread and could not hold it up.
    """
    ctypes.CDLL(None).signal(signal.SIGABRT, _handler)


def _check_name() -> None:
    """Whichever interface it is given, Horovod's Gloo opens process sets, the global one among
    them, at the address that the host's own name leads to."""
    several_hosts = int(os.environ.get("HOROVOD_CROSS_SIZE", "1")) > 1
    if not several_hosts or os.environ.get("HOROVOD_CONTROLLER", "gloo") != "gloo":
        return
    name = socket.gethostname()
    address = address_of(name)
    if not leaves_host(address):
        raise BackendError(
            f"Horovod finds a host by its name, and {name!r} leads this host to "
            f"{address or 'no address'}; see to it (in /etc/hosts) that it leads to an address "
            "that the other hosts reach, or launch with torchrun"
        )


def _horovod() -> Any:
    try:
        import horovod.torch as hvd
    except (ImportError, OSError) as error:  # built for another torch, or taken apart
        raise BackendError(
            f"Horovod is installed but does not load ({error}); run "
            "`lightning-dsgd install-horovod --force`, or launch with torchrun"
        ) from None
    return hvd


@contextlib.contextmanager
def _said_if_alone(rank: int) -> Iterator[None]:
    """Horovod waits for all ranks to start, and then aborts the process without a word of ours."""
    limit = float(os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"])
    text = (
        f"lightning-dsgd: rank {rank} has waited {limit / 2:g} s for the other ranks to start; "
        f"Horovod gives up after {limit:g} s (HOROVOD_GLOO_TIMEOUT_SECONDS)"
    )
    line = threading.Timer(limit / 2, lambda: print(text, file=sys.stderr, flush=True))
    line.name, line.daemon = "dsgd-start", True
    line.start()
    try:
        yield
    finally:
        line.cancel()
        line.join()


class HorovodBackend(Backend):
    """Horovod's global job. It is initialised once per process and left to its own exit handler."""

    name = "horovod"

    def __init__(
        self, rank: int, world_size: int, alarm: Alarm, timeout: float, edges: Sequence[Edge] = ()
    ) -> None:
        super().__init__(rank, world_size, alarm, timeout, edges)
        local_size = int(os.environ.get("HOROVOD_LOCAL_SIZE", "1"))
        if local_size > (os.cpu_count() or 1):
            os.environ.setdefault("HOROVOD_CYCLE_TIME", _CROWDED_CYCLE_MS)
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(int(max(timeout, 30))))
        _check_name()
        hvd = self.hvd = _horovod()
        if not hvd.is_initialized():
            with _said_if_alone(rank):
                hvd.init(process_sets=_pair_sets(hvd, self.edges, world_size))
            if self.edges:
                _await_last_words()
        self.prefix = "dsgd"
        self.prefix += f".{self._agreed_generation()}"

    def _agreed_generation(self) -> int:
        global _generation, _not_met
        if _not_met:
            raise BackendError(
                f"rank {self.rank} has waited for the others at an earlier training, in vain, and "
                "Horovod holds whoever comes late to that one; let the program end after such a "
                "failure and start it anew, or launch with torchrun"
            )
        _not_met = True
        _generation = int(self._meeting().gather(torch.tensor([_generation])).max())
        _not_met = False
        return _generation

    def introduce(self, card: bytes) -> list[bytes]:
        return self._meeting().gather_bytes(card)

    def _meeting(self) -> Channel:
        """A start takes its time, however short `timeout` is."""
        return self.channel("meeting", patience=max(1.0, MEETING_SECONDS / self.timeout))

    def channel(self, name: str, patience: float = 1.0, on_device: bool = False) -> Channel:
        """Horovod's one thread puts what all channels do into one order.

        So an operation on a device that waits for a slow backward would hold all others.
        """
        return HorovodChannel(name, self, self.timeout * patience, on_device=on_device)

    def pairs(self) -> dict[int, Channel]:
        """One process set per edge, all of them given to Horovod when it started."""
        missing = [edge for _, edge in self.partners() if edge not in _process_sets]
        if missing:
            raise BackendError(
                f"Horovod was started in this process without the pair of ranks {missing[0]}, and "
                "takes none later; let the strategy that exchanges in pairs be the first one used"
            )
        return {
            partner: HorovodChannel(
                f"pair {a} and {b}",
                self,
                self.timeout * 2,
                members=_process_sets[a, b],
                on_device=True,
            )
            for partner, (a, b) in self.partners()
        }

    def abandon(self) -> None:
        """Nothing here: shutting down waits for the peers, and the process's end tells them."""


class HorovodChannel(Channel):
    """Operations are told apart by the channel's name, so threads do not mix.

    Horovod remembers every name it has met, and looks at them all, many times a second, whether
    busy or not. So names stay the same from training to training, unless one that failed has left
    an operation behind on any rank: a new one of its name would be taken for that.
    """

    def __init__(
        self,
        name: str,
        backend: HorovodBackend,
        timeout: float,
        *,
        members: Any = None,
        on_device: bool = False,
    ) -> None:
        super().__init__(
            name, backend.rank, backend.world_size, backend.alarm, timeout, backend.seal
        )
        self.hvd = backend.hvd
        self._members = members or self.hvd.global_process_set
        self._on_device = on_device
        self._prefix = f"{backend.prefix}.{name}"

    def reaches(self, device: torch.device) -> bool:
        if device.type == "cpu":
            return True
        return self._on_device and device.type == "cuda" and bool(self.hvd.nccl_built())

    def _sum(self, tensor: Tensor) -> None:
        add, members = self.hvd.Sum, self._members
        self._finish(
            tensor,
            "sum",
            lambda name: self.hvd.allreduce_async_(tensor, name=name, op=add, process_set=members),
        )

    def _broadcast(self, data: Tensor, root: int) -> None:
        self._finish(
            data, "broadcast", lambda name: self.hvd.broadcast_async_(data, root, name=name)
        )

    def _gather(self, data: Tensor) -> Tensor:
        row = data.unsqueeze(0)
        result: Tensor = self._finish(
            data, "gather", lambda name: self.hvd.allgather_async(row, name=name)
        )
        return result

    def _finish(self, tensor: Tensor, kind: str, start: Any) -> Any:
        """Horovod's device operations wait for what the thread's current stream holds, no other."""
        self.alarm.check()
        try:
            with torch.inference_mode(False), FORKS.apart():
                handle = start(f"{self._prefix}.{kind}")
                self._wait(handle, tensor.device)
                return self.hvd.synchronize(handle)
        except RuntimeError as error:
            if error is self.alarm.error:
                raise
            raise self.broken(error) from error
        except ValueError as error:  # how Horovod reports an engine that has shut down
            raise self.broken(error) from error

    def _wait(self, handle: int, device: torch.device) -> None:
        global _generation
        longest = LONGEST_SLEEP if device.type == "cpu" else LONGEST_LOOK
        try:
            self.poll(lambda: self.hvd.poll(handle), longest)
        except RunError:
            _generation += 1
            raise
