"""How a rank makes a gradient: in Lightning's own iteration, or in a further one within it.

Here are the hooks from `training_step` to the end of backward. What a gradient is for, and what
becomes of it, is said elsewhere: the worker machine says whether to make one, and `end_turn` what
comes after it.
"""

from __future__ import annotations

import abc
import inspect
import time
from collections import deque
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_unflatten

from lightning_dsgd.backends import BackendName
from lightning_dsgd.backends.streams import Mark, Moment
from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.exchange.desk import Desk
from lightning_dsgd.exchange.finite import NonFinite, loss_and_finiteness, not_finite, sums
from lightning_dsgd.exchange.gradients import check_unchanged
from lightning_dsgd.trainer.coordinated import CoordinatedStrategy
from lightning_dsgd.trainer.course import Place
from lightning_dsgd.trainer.loader import RoundsLoader
from lightning_dsgd.trainer.worlds import Trainer
from lightning_dsgd.workers.machine import Finished, GaveUp, Took

_AHEAD = 8
"""Where late work is cancelled: so many parameters' gradients the host may be ahead of a device."""


class Overtaken(Exception):
    """Raised inside a backward pass whose gradient has become useless."""


class GradientStrategy(CoordinatedStrategy):
    """The computing half of the rounds strategies."""

    nonfinite: NonFinite = "raise"
    _runtime = (*CoordinatedStrategy._runtime, "_loader", "_distance")

    def __init__(self, *, backend: BackendName = "auto", timeout: float = 300.0) -> None:
        super().__init__(backend=backend, timeout=timeout)
        self._desk: Desk | None = None
        self._loader: RoundsLoader | None = None
        self._computes: bool | None = None
        """Does the present iteration make a gradient? None before a group's first batch."""
        self._began: Moment | None = None
        self._spans: list[tuple[Moment, Moment]] = []
        """From begin to end of each mini-batch in the gradient."""
        self._losses: list[Tensor] = []
        """Of the mini-batches in the gradient, as Lightning divides them."""
        self._last_output: Any = None
        self._hooks: list[Any] = []
        self._ahead: deque[Mark] = deque()
        """Of a backward pass: where the device will have been when it comes to the later ones."""

    @property
    def desk(self) -> Desk:
        """Where this rank's two threads meet, while it trains."""
        assert self._desk is not None
        return self._desk

    @property
    def version(self) -> int:
        """The number of updates this replica has applied."""
        assert self.lightning_module is not None
        return int(self.lightning_module.trainer.global_step)

    @abc.abstractmethod
    def end_turn(self) -> None:
        """The iteration's own part is done: wait for the next update and take it."""

    def may_meet(self) -> bool:
        """Does every rank run `training_step` equally often? Then it may hold a collective."""
        return False

    # -------------------------------------------------------- one Lightning iteration

    def begin_iteration(self) -> bool:
        """Does the coming batch go into a gradient? Asked by the loader for each."""
        if self._computes is None:
            check_unchanged(self.desk.layout)
            if self.version > self.desk.machine.version:
                self.desk.tell(Took(self.version))
            self._computes = self.desk.computes
            self._spans, self._losses = [], []
        self._began = self.streams.moment()
        return self._computes

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._computes:
            self._call_minibatch_start()
            return self._user_step(*args, **kwargs)
        if self.version == self.desk.machine.first:
            # what every rank logs once, Lightning can reduce over all ranks at the epoch's end
            self._user_step(*args, **kwargs)
        return self._last_output_again()

    def _user_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.course.within(Place.USER):
            output = super().training_step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, dict) else output
        if loss is None:
            raise ConfigurationError(
                "training_step returned no loss; a rank that skips a batch would leave the others "
                "waiting for its gradient: return a loss of zero instead"
            )
        self._last_output = apply_to_collection(output, Tensor, Tensor.detach)
        return output

    def _last_output_again(self) -> Any:
        """A replay computes nothing, but hooks may look at its output."""
        last = self._last_output
        loss = (last["loss"] if isinstance(last, dict) else last).clone().requires_grad_()
        return {**last, "loss": loss} if isinstance(last, dict) else loss

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self._computes:
            self._computes = self._guarded_backward(closure_loss, optimizer, *args, **kwargs)
        if self.course.stepping:
            self.course.exchange()
            if self._computes:
                self._finish()
            self.end_turn()
            self._computes = None
        return closure_loss.detach()

    def _guarded_backward(
        self, loss: Tensor, optimizer: Optimizer | None, *rest: Any, **kw: Any
    ) -> bool:
        """Add a mini-batch to the gradient; False if it was cancelled meanwhile."""
        self.desk.receive()
        self._ahead.clear()
        try:
            with self.course.within(Place.BACKWARD):
                super().backward(loss, optimizer, *rest, **kw)
        except Overtaken:
            self._give_up()
            return False
        self.desk.collect()
        self._losses.append(loss.detach())
        assert self._began is not None
        self._spans.append((self._began, self.streams.moment()))
        return True

    def _finish(self) -> None:
        """All of the gradient is on its way; when it is there, the machine is told.

        Sooner it would be news of something that others may have to wait for.
        """
        self.desk.complete()
        parts = [] if self.nonfinite == "ignore" else self.desk.accumulated
        reading = self.streams.reading(sums(self._mean_loss(), parts))
        if not self.desk.await_gradient(reading.mark):
            self._give_up()
            return
        loss, finite = loss_and_finiteness(reading.numbers(), parts)
        if not finite and self.nonfinite == "raise":
            raise not_finite(self.global_rank, self.version + 1, loss)
        seconds = sum(began.seconds_until(ended) for began, ended in self._spans)
        self.desk.tell(Finished(seconds, loss, finite))

    def _mean_loss(self) -> Tensor:
        """Lightning divides each loss by what it accumulates over, also where fewer are left."""
        assert self.lightning_module is not None
        parts: int = self.lightning_module.trainer.accumulate_grad_batches
        return torch.stack(self._losses).mean() * parts

    def _give_up(self) -> None:
        self.alarm.check()
        self.desk.collect()
        self.desk.discard()
        self.desk.tell(GaveUp(self._host_seconds()))

    def _host_seconds(self) -> float:
        """Spent on a gradient that the device may not have come to yet."""
        assert self._began is not None
        *whole, (began, _) = [*self._spans, (self._began, self._began)]
        if whole and whole[-1][0] is self._began:
            *whole, (began, _) = whole  # all of it is queued; the device has not done it
        return sum(b.host - a.host for a, b in whole) + time.monotonic() - began.host

    # -------------------------------------------------- a further gradient within it

    def extra_gradient(self) -> None:
        """As Lightning would compute it."""
        module = self.lightning_module
        assert module is not None
        parts = module.trainer.accumulate_grad_batches
        self._spans, self._losses = [], []
        for _ in range(parts):
            self._began = self.streams.moment()
            self._call_minibatch_start()
            loss = self._next_loss(module.trainer) / parts
            if not self._guarded_backward(loss, self.optimizers[0]):
                return
        self._finish()

    def _next_loss(self, trainer: Trainer) -> Tensor:
        assert self._loader is not None
        structure: Any = trainer.fit_loop._combined_loader._spec
        output = self._step_on(tree_unflatten([self._loader.take()], structure), trainer)
        loss: Tensor = output["loss"] if isinstance(output, dict) else output
        return loss

    def _step_on(self, batch: Any, trainer: Trainer) -> Any:
        module = self.lightning_module
        assert module is not None
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = self.batch_to_device(batch, dataloader_idx=0)
        before = module._current_fx_name
        module._current_fx_name = "training_step"
        takes_index = len(inspect.signature(module.training_step).parameters) > 1
        arguments = (batch, trainer.fit_loop.epoch_loop.batch_idx) if takes_index else (batch,)
        with torch.enable_grad():
            output = self._user_step(*arguments)
        module._current_fx_name = before
        return output

    def _call_minibatch_start(self) -> None:
        assert self.lightning_module is not None
        trainer: Trainer = self.lightning_module.trainer
        for callback in trainer.callbacks:
            start = getattr(callback, "on_minibatch_start", None)
            if start is not None:
                start(trainer, self.lightning_module)

    def check_meeting(self, what: str) -> None:
        if self.course.place is Place.USER and not self.may_meet():
            raise ConfigurationError(
                f"{what} in training_step would wait for the slowest rank, or for ever: with "
                f"{type(self).__name__} ranks run it unequally often; reduce at the end of the "
                "epoch (on_step=False, on_epoch=True); dsgd/loss is each update's mean loss"
            )

    def forget_gradient(self) -> None:
        """Training is over; what is of a device alone cannot be copied with the strategy."""
        self._began, self._spans, self._losses = None, [], []
        self._ahead.clear()

    # ---------------------------------------------------------------------- cancelling

    def replace_cancel_hooks(self, parameters: list[nn.Parameter]) -> None:
        """Look, each time one of these has its gradient, whether to go on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [p.register_post_accumulate_grad_hook(self._look) for p in parameters]

    def _look(self, parameter: Tensor) -> None:
        """A device is given work for a few parameters at most: what is queued can't be stopped."""
        if self.course.place is not Place.BACKWARD:
            return
        self._ahead.append(self.streams.mark())
        due = self._ahead.popleft() if len(self._ahead) > _AHEAD else None
        if self.desk.cancelled.is_set() or not self.desk.await_gradient(due):
            raise Overtaken

    def sleep(self, seconds: float) -> None:
        """A slowed worker's pause; ends early when cancelling, as computing would."""
        if self._desk is None:
            time.sleep(seconds)
        else:
            self._desk.cancelled.wait(seconds)
