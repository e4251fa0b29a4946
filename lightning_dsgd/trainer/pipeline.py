"""The pipeline exchange as a Lightning strategy: an all-reduce hides behind the next gradient.

Every rank makes every step, so Lightning's loaders, counters and limits stay as they are. What
changes is one step's course, with w the parameters:

1. Forward and backward at this rank's own, tentative point, while the previous steps are averaged.
2. At the end of backward: wait for that mean, move w to the new common point, and correct the
   gradient for the move. With accumulation this happens at a step's last mini-batch, on the whole
   gradient.
3. Lightning clips the corrected gradient and runs the optimizer.
4. What that changed in w is this rank's step; its exchange starts.

A *drain* takes in the exchange under way without a new gradient: afterwards all ranks hold the same
parameters. It happens at the end of every epoch, before validation, before a checkpoint and at the
end.
"""

from __future__ import annotations

import abc
import io
from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer

from lightning_dsgd.backends import BackendName
from lightning_dsgd.backends.streams import look_until
from lightning_dsgd.control.tally import Tally
from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.exchange.checksum import require_same
from lightning_dsgd.exchange.finite import NonFinite, check_nonfinite
from lightning_dsgd.exchange.gradients import FlatLayout, check_unchanged
from lightning_dsgd.exchange.pipeline import WIRES, Pipeline, Wire
from lightning_dsgd.exchange.points import Points
from lightning_dsgd.trainer.coordinated import CoordinatedStrategy
from lightning_dsgd.trainer.monitor import CHECKPOINT_KEY
from lightning_dsgd.trainer.own_steps import OwnSteps
from lightning_dsgd.trainer.refusals import (
    by_rank,
    refuse_averaged_statistics,
    refuse_averaging,
)
from lightning_dsgd.trainer.telling import say
from lightning_dsgd.trainer.worlds import Trainer
from lightning_dsgd.workers.messages import Segment

_NO_END = 2**62


class PipelineStrategy(CoordinatedStrategy):
    """Base of strategies that exchange steps behind the next gradient."""

    exchange = "pipeline"

    def __init__(
        self,
        *,
        wire: Wire = "full",
        backend: BackendName = "auto",
        timeout: float = 300.0,
        nonfinite: NonFinite = "raise",
    ) -> None:
        check_nonfinite(nonfinite)
        if wire not in WIRES:
            raise ConfigurationError(f"wire={wire!r} is unknown; choose {', '.join(WIRES)}")
        super().__init__(backend=backend, timeout=timeout)
        if wire == "bf16" and self.backend_name == "horovod":
            raise ConfigurationError(
                "wire='bf16' is not available on Horovod, which cannot sum that type; use "
                "wire='fp16'"
            )
        self.wire: Wire = wire
        self.nonfinite = nonfinite
        self.tally: Tally | None = None
        """Rank 0's count of who took how long; kept after training."""
        self._pipeline: Pipeline | None = None
        self._points: Points | None = None
        self._own_steps: OwnSteps | None = None
        self._moved: Tensor | None = None
        self._gives = True
        """This rank's present step is one, not zero for want of a finite gradient."""
        self._logged = (0.0, 0.0)

    # ------------------------------------------------------- what an algorithm defines

    @abc.abstractmethod
    def correct(self, points: Points, precision: float) -> None:
        """Mend the gradient, in place, for the move that `points.rejoin` has just made.

        Args:
            points: Knows the gradients, and the move.
            precision: The relative rounding error of the mean step.
        """

    def step_values(self) -> dict[str, Tensor]:
        """The algorithm's own numbers of the latest step, for loggers."""
        return {}

    # ------------------------------------------------------------------ start and end

    def check_world(self) -> None:
        """One worker is plain training."""

    def check_trainer(self, trainer: Trainer) -> None:
        super().check_trainer(trainer)
        if trainer.state.fn == "fit":
            refuse_averaging(trainer, self)
            refuse_averaged_statistics(trainer, self)

    def start_exchange(self, trainer: Trainer) -> None:
        assert self._backend is not None and self._main is not None
        self._check_lengths(trainer.num_training_batches)
        self._points, self._moved, self._logged = None, None, (0.0, 0.0)
        self._own_steps = OwnSteps(self.nonfinite, self.global_rank, self.streams, self.alarm)
        control = self.control
        if self._coordinator is not None:
            policy = self.make_policy(self.world_size, version=trainer.global_step)
            self.tally = self._coordinator.begin(policy)
            control.announce(Segment(_NO_END))
        self._main.barrier()
        self._pipeline = Pipeline(
            self._backend.channel("pipeline", patience=2, on_device=True),
            control,
            self.streams,
            wire=self.wire,
            version=trainer.global_step,
        )
        self._main.barrier()

    def _check_lengths(self, mine: float) -> None:
        """Every rank takes part in every step, so none may have more steps than another."""
        assert self._main is not None
        lengths = self._main.gather_data(float(mine), float)
        if len(set(lengths)) > 1:
            raise ConfigurationError(
                f"the ranks have unequal numbers of training batches ({by_rank(lengths)}); use a "
                "sampler that deals them out evenly, or limit_train_batches"
            )

    def close_exchange(self) -> None:
        pipeline = self._pipeline
        self._pipeline = self._points = self._own_steps = None
        if pipeline is not None:
            pipeline.close()

    # ---------------------------------------------------------------------- one step

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if self.course.stepping:
            self.course.exchange()
            self._judge(loss)
            if self.is_distributed:
                self._settle()
        return loss

    def _judge(self, loss: Tensor) -> None:
        """A gradient that is not finite makes a step of zero, or ends the run."""
        assert self.model is not None and self._own_steps is not None
        trainer: Trainer = self.lightning_module.trainer  # type: ignore[union-attr]  # is there
        whole = loss.detach() * trainer.accumulate_grad_batches
        step = trainer.global_step + 1
        self._gives = self._own_steps.takes(self.model.parameters(), step, whole)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.is_distributed:
            assert self._pipeline is not None and self._points is not None
            self._pipeline.start(self._points.stepped(), finite=self._gives)
        return result

    def _settle(self) -> None:
        """Move to the common point; correct the gradient for the move; remember the point."""
        assert self._pipeline is not None
        if self._pipeline.under_way:
            assert self._points is not None
            check_unchanged(self._points.layout)
            self._pipeline.finish()
            self._points.rejoin()
            self._moved = self._points.distance()
            self.correct(self._points, self._pipeline.precision(self._points.step[0].dtype))
        else:
            self._refresh_layout()
        assert self._points is not None
        self._points.mark()

    def _refresh_layout(self) -> None:
        """Parameters may have been frozen or freed since the last drain."""
        assert self.model is not None
        if self._points is None or not self._points.layout.fits(self.model.parameters()):
            self._points = None  # frees its memory first
            self._points = Points(FlatLayout(self.model.parameters()))

    def agree(self) -> None:
        """Drain: take in what is under way, so that all ranks hold the same parameters."""
        if self._pipeline is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            if self._pipeline.under_way:
                assert self._points is not None
                self._pipeline.finish()
                self._points.rejoin()
                self._compare()
            self.average_buffers()

    def _compare(self) -> None:
        """After a drain all ranks hold the same; collective, as that was."""
        assert self.model is not None and self._main is not None
        step: int = self.lightning_module.trainer.global_step  # type: ignore[union-attr]  # is there
        require_same(self._main, step, self.model.parameters())

    # ------------------------------------------------------------ checkpoints and logs

    def end_epoch(self) -> None:
        assert self.lightning_module is not None
        self.leave_epoch(self.lightning_module.trainer.global_step)
        self.agree()

    def checkpoint_state(self) -> dict[str, Any]:
        return {"optimizers": self._gathered_optimizer_states()}

    def _gathered_optimizer_states(self) -> list[dict[str, Any]]:
        """Every rank's optimizer state, on rank 0: momentum differs between ranks. Collective."""
        if self._main is None or not self.optimizers:
            return []
        states = []
        mine = _saved(apply_to_collection(self.optimizers[0].state_dict(), Tensor, _on_cpu))
        for root in range(self.world_size):
            state = self._main.broadcast_bytes(mine if root == self.global_rank else b"", root)
            if self.is_global_zero:
                states.append(torch.load(io.BytesIO(state), weights_only=True))
        return states

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        saved = checkpoint.get(CHECKPOINT_KEY, {})
        states = saved.pop("optimizers", []) if saved.get("strategy") == self.strategy_name else []
        if len(states) == self.world_size:
            checkpoint["optimizer_states"] = [states[self.global_rank]]
        elif states and self.is_global_zero:
            say(
                f"the checkpoint is from {len(states)} ranks and this run has {self.world_size}: "
                "every rank starts with rank 0's optimizer state"
            )
        return checkpoint

    def logged_values(self) -> dict[str, float]:
        """The latest step in numbers, and the share of the exchanges hidden since last asked."""
        values = self._read(self.step_values() | self._distances())
        if self._pipeline is not None:
            busy, waited = self._pipeline.busy_seconds, self._pipeline.waited_seconds
            past_busy, past_waited = self._logged
            self._logged = (busy, waited)
            if busy > past_busy:
                values["hidden"] = max(0.0, 1 - (waited - past_waited) / (busy - past_busy))
        return values

    def _distances(self) -> dict[str, Tensor]:
        return {} if self._moved is None else {"distance": self._moved}

    def _read(self, numbers: dict[str, Tensor]) -> dict[str, float]:
        """What a device has yet to compute is looked for, as everything else is."""
        if not numbers:
            return {}
        reading = self.streams.reading(torch.stack([n.double() for n in numbers.values()]))
        look_until(reading.mark, self.alarm.wait)
        self.alarm.check()
        return dict(zip(numbers, map(float, reading.numbers()), strict=True))


def _saved(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()
