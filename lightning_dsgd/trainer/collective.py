"""The shell that all strategies share: launch, devices, Lightning's own collectives, clean exits.

No algorithm here. `torch.distributed`'s default group stays uninitialised.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_dsgd.backends import (
    Backend,
    BackendName,
    Channel,
    Edge,
    choose_backend,
    connect,
    horovod_installed,
    horovod_launched,
)
from lightning_dsgd.backends.streams import Streams
from lightning_dsgd.control.alarm import Alarm
from lightning_dsgd.errors import BackendError, ConfigurationError
from lightning_dsgd.trainer.launch import HorovodEnvironment, limit_threads
from lightning_dsgd.trainer.leaving import (
    end_at_exit,
    exit_without_destructors,
    let_failures_be_said,
)
from lightning_dsgd.trainer.metrics import connect_metrics
from lightning_dsgd.trainer.telling import say, show_only_users_frames
from lightning_dsgd.trainer.worlds import ParallelStrategy, Trainer, launcher_for

_LONGEST_TIMEOUT = 2_000_000
"""What ZeroMQ can count, in milliseconds."""


class CollectiveStrategy(ParallelStrategy):
    """A Lightning strategy on our own collectives, for any launcher and both backends."""

    _runtime: tuple[str, ...] = ("_backend", "_main", "_reported", "_streams")
    """What a copy does not share and a pickle does not hold; None until the next training."""

    def __init__(self, *, backend: BackendName = "auto", timeout: float = 300.0) -> None:
        if not 0 < timeout <= _LONGEST_TIMEOUT:
            raise ConfigurationError(
                f"timeout={timeout} must be a number of seconds above 0, at most "
                f"{_LONGEST_TIMEOUT:,} (23 days)"
            )
        self.backend_name = choose_backend(backend)
        if self.backend_name == "torch" and horovod_launched() and "MASTER_PORT" not in os.environ:
            remedy = "use backend='horovod'"
            if not horovod_installed():
                remedy = "install Horovod here (`lightning-dsgd install-horovod`)"
            raise BackendError(
                "under horovodrun, torch's collectives need MASTER_ADDR and MASTER_PORT in the "
                f"environment; {remedy}, or launch with torchrun"
            )
        environment = HorovodEnvironment() if horovod_launched() else None
        super().__init__(cluster_environment=environment)
        self.timeout = float(timeout)
        self.alarm = Alarm()
        self._backend: Backend | None = None
        self._main: Channel | None = None
        self._streams: Streams | None = None
        self._num_nodes = 1
        self._reported: BaseException | None = None

    # ------------------------------------------------------------- copies and pickles

    def busy(self) -> bool:
        """Is there more to this strategy than a copy could have?"""
        return self._backend is not None and self._main is None  # it has failed

    def __getstate__(self) -> dict[str, Any]:
        if self.busy():
            raise ConfigurationError(
                f"{type(self).__name__} cannot be copied or pickled while it trains, nor after a "
                "training that has failed; do it before, or after trainer.fit has returned"
            )
        state: dict[str, Any] = super().__getstate__()
        state.update(
            dict.fromkeys(state.keys() & set(self._runtime)), _launcher=self._new_launcher()
        )
        del state["alarm"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.alarm = Alarm()

    def _new_launcher(self) -> Any:
        """The processes that this one has started are its own."""
        launcher: Any = copy.copy(self._launcher)
        if launcher is not None:
            launcher.procs = []
        return launcher

    # ------------------------------------------------------------ ranks and devices

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, count: int) -> None:
        self._num_nodes = count

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    @property
    def num_processes(self) -> int:
        """Ranks on this host, as far as Lightning starts them."""
        return len(self.parallel_devices) if self.parallel_devices else 1

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or [torch.device("cpu")]
        if devices[0].type == "cpu":
            return devices[0]
        if self.local_rank < len(devices):
            return devices[self.local_rank]
        return _own_device(devices[0], self.local_rank)

    @property
    def streams(self) -> Streams:
        """Of this rank's device, from set-up on."""
        assert self._streams is not None
        return self._streams

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Tell the environment who we are; one that a launcher made knows better."""
        environment = self.cluster_environment
        if environment is None:
            return
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        from lightning_utilities.core.rank_zero import rank_zero_only

        rank_zero_only.rank = environment.global_rank()  # type: ignore[attr-defined]  # its way

    def _configure_launcher(self) -> None:
        """For one worker there is nothing to start, and no trace to leave in the environment."""
        environment = self.cluster_environment
        alone = self.num_processes * self.num_nodes == 1
        if isinstance(environment, HorovodEnvironment):
            if self.is_global_zero and self.num_processes not in (1, environment.local_size()):
                say(
                    f"devices={self.num_processes} is not used: horovodrun has started "
                    f"{environment.local_size()} workers on this host"
                )
        elif not alone and environment:
            starter = launcher_for(self)
            self._launcher = starter(environment, self.num_processes, self.num_nodes)

    # ----------------------------------------------------------------- start and end

    def check_world(self) -> None:
        """Refuse a job this strategy cannot run in; the same on every rank, before it connects."""
        if self.world_size < 2:
            raise ConfigurationError(
                f"{type(self).__name__} needs at least 2 workers and this job has 1; launch with "
                "`horovodrun -np N python train.py`, `torchrun --nproc-per-node N train.py` or "
                "Trainer(devices=N)"
            )

    def edges(self) -> Sequence[Edge]:
        """The pairs of ranks that will exchange on their own; the backend must know them."""
        return ()

    def _started(self) -> list[Any]:
        """The ranks that this process has started."""
        return getattr(self._launcher, "procs", [])

    def setup_environment(self) -> None:
        let_failures_be_said(self._started())
        super().setup_environment()
        self.check_world()
        if self._backend is not None and self._main is None:
            raise ConfigurationError(
                "a training of this Trainer has failed, and its ranks stand at different "
                "steps; make a new Trainer and strategy, and go on from a checkpoint"
            )
        if self._streams is None:
            self._streams = Streams(self.root_device)
        if self._backend is None:
            self._backend = self._connect()
        self.join(self._backend)
        if self._main is None:
            # a rank that is stopped is missed after `timeout`, by name: let that be said first
            self._main = self._backend.channel("main", patience=2)

    def join(self, backend: Backend) -> None:
        """The ranks have met, and have no channel yet; collective."""
        return

    def _connect(self) -> Backend:
        environment = self.cluster_environment
        assert environment is not None
        if isinstance(environment, HorovodEnvironment):
            limit_threads(environment.local_size())
        return connect(
            self.backend_name,
            rank=self.global_rank,
            world_size=self.world_size,
            address=environment.main_address,
            port=environment.main_port,
            device=self.root_device,
            alarm=self.alarm,
            timeout=self.timeout,
            edges=self.edges(),
        )

    def setup(self, trainer: Trainer) -> None:
        self.check_trainer(trainer)
        super().setup(trainer)
        assert self.model is not None
        if trainer.state.fn == "fit":
            self._check_types(self.model)
        self._same_start(self.model)
        self.connect_metrics(trainer)

    def check_trainer(self, trainer: Trainer) -> None:
        """Refuse what would silently do nothing."""
        if self._layer_sync is not None:
            raise ConfigurationError(
                "sync_batchnorm=True is not supported: normalisation statistics are averaged "
                "before validation and checkpoints instead; leave it out"
            )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ConfigurationError(
                "precision='16-mixed' is not supported: its loss scale would differ between ranks; "
                "use precision='bf16-mixed' or '32-true'"
            )

    def _check_types(self, model: nn.Module) -> None:
        summable = (torch.float16, torch.float32, torch.float64)
        types = {p.dtype for p in model.parameters() if p.requires_grad}.difference(summable)
        if types and self.backend_name == "horovod":
            raise ConfigurationError(
                f"Horovod cannot sum gradients of type {types.pop()}; use precision='bf16-mixed' "
                "or '32-true', or launch with torchrun"
            )

    def connect_metrics(self, trainer: Trainer) -> None:
        """Let every metric of the model and of the callbacks use our collectives."""
        assert self.model is not None
        connect_metrics(self.model, self)
        for callback in trainer.callbacks:
            for value in getattr(callback, "__dict__", {}).values():
                if isinstance(value, nn.Module):
                    connect_metrics(value, self)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def _same_start(self, model: nn.Module) -> None:
        """All ranks begin with rank 0's weights and buffers."""
        assert self._main is not None
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                copy = tensor.detach().contiguous()
                self._main.broadcast_(copy, 0)
                tensor.copy_(copy)

    def average_buffers(self) -> None:
        """The mean of all ranks' floating-point buffers, such as BatchNorm's statistics.

        Number by number, of the ranks on which it is finite; where it is so nowhere it stays.
        """
        assert self.model is not None and self._main is not None
        with torch.no_grad():
            for buffer in self.model.buffers():
                if buffer.is_floating_point():
                    own = buffer.detach().cpu().double()
                    finite = own.isfinite()
                    total = torch.stack([own.where(finite, 0.0), finite.double()])
                    self._main.sum_(total)
                    buffer.copy_(own.where(total[1] == 0, total[0] / total[1]))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Lightning 2.5 knows no `weights_only`."""
        given = {} if weights_only is None else {"weights_only": weights_only}
        return super().load_checkpoint(checkpoint_path, **given)

    def on_exception(self, exception: BaseException) -> None:
        """Say why at once (a launcher may end us any moment), and let no stuck thread hold us."""
        if exception is self._reported:
            return
        self._reported = exception
        reason = ": ".join(filter(None, (type(exception).__name__, str(exception))))
        print(
            f"lightning-dsgd: rank {self.global_rank} ends: {reason}",
            file=sys.stderr,
            flush=True,
        )
        end_at_exit(self._started())
        if isinstance(exception, ConfigurationError):
            show_only_users_frames()
        elif self._backend is not None:
            self._backend.abandon()
            exit_without_destructors()
        super().on_exception(exception)

    # ----------------------------------------------------- Lightning's own collectives

    def check_meeting(self, what: str) -> None:
        """Refuse a collective at a point to which the other ranks may not come."""
        return

    def barrier(self, name: str | None = None) -> None:
        self.check_meeting("a barrier")
        if self._main is not None:
            self._main.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self.check_meeting("a broadcast")
        return obj if self._main is None else self._main.broadcast_object(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        self.check_meeting("a reduction, such as self.log(on_step=True, sync_dist=True),")
        if not isinstance(tensor, Tensor) or self._main is None:
            return tensor
        kind = _operation(reduce_op)
        with torch.inference_mode(False), torch.no_grad():
            if kind in ("min", "max"):
                stacked = self._main.gather(tensor.detach().clone().contiguous())
                return stacked.amin(0) if kind == "min" else stacked.amax(0)
            exact = torch.float64 if not tensor.is_floating_point() else tensor.dtype
            exact = torch.float32 if exact in (torch.float16, torch.bfloat16) else exact
            total = tensor.detach().to(exact, copy=True).contiguous()
            self._main.sum_(total)
            if kind == "mean":
                total /= self.world_size
        keep = tensor.is_floating_point() or kind == "mean"
        return total.float() if not tensor.is_floating_point() and keep else total.to(tensor.dtype)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        self.check_meeting("an all_gather")
        if self._main is None:
            return tensor.unsqueeze(0)
        if sync_grads and tensor.requires_grad:
            gathered = _GatherWithGradient.apply(tensor, self._main)  # type: ignore[no-untyped-call]
            return cast(Tensor, gathered)  # autograd functions carry no types
        with torch.inference_mode(False), torch.no_grad():
            return self._main.gather(tensor.detach().clone().contiguous())


def _own_device(first: torch.device, local_rank: int) -> torch.device:
    """A launcher may show each process all devices of the host, or its own alone."""
    count = torch.get_device_module(first).device_count()
    if count > 1 and local_rank >= count:
        raise ConfigurationError(
            f"local rank {local_rank} has no device of its own: this host shows {count} of type "
            f"'{first.type}'; start at most {count} workers on it"
        )
    return first if count == 1 else torch.device(first.type, local_rank)


def _operation(reduce_op: Any) -> str:
    name = "mean" if reduce_op is None else str(reduce_op).rsplit(".", 1)[-1].lower()
    kind = {"avg": "mean", "mean": "mean", "sum": "sum", "min": "min", "max": "max"}.get(name)
    if kind is None:
        raise ConfigurationError(f"reduce_op={reduce_op!r} is unknown; use mean, sum, min or max")
    return kind


class _GatherWithGradient(torch.autograd.Function):
    """Stacks all ranks' tensors; each rank's gradient is the sum over the ranks that used it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, channel: Channel) -> Tensor:
        ctx.channel = channel
        return channel.gather(tensor.detach().contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        ctx.channel.sum_(total)
        return total[ctx.channel.rank], None
