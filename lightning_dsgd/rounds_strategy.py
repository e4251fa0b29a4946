"""The rounds exchange as a Lightning strategy: one Lightning iteration is one update of the model.

So `global_step`, schedules, callbacks, limits and epochs follow the version, on every rank alike:

- An iteration usually computes a gradient, contributes it, and ends with the next update.
- A rank that has missed updates *replays*: its iteration takes no batch, computes nothing, and
  hands the optimizer the gradient that the others have agreed on.
- Where the algorithm lets a worker give several gradients to one update, the further mini-batches
  are computed inside the same iteration.

An algorithm says, in a few short methods, when a gradient is published and when more are computed.
"""

from __future__ import annotations

import abc
import inspect
import math
import time
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_unflatten

from lightning_dsgd.backends import BackendName
from lightning_dsgd.control import Control
from lightning_dsgd.coordinated import CoordinatedStrategy
from lightning_dsgd.damping import Damping, DistanceDamping, scale_of
from lightning_dsgd.data import RoundsLoader, agreed_length, local_length, require_one_loader
from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.gradients import FlatGradients, FlatLayout, FlatPool, check_unchanged
from lightning_dsgd.monitor import CHECKPOINT_KEY
from lightning_dsgd.policy import RoundsPolicy
from lightning_dsgd.protocol import Applied, Contribution, Round, Segment
from lightning_dsgd.refusals import (
    by_rank,
    refuse_averaged_statistics,
    refuse_loader_argument,
)
from lightning_dsgd.rounds import RoundsExchange, Update
from lightning_dsgd.tally import Tally
from lightning_dsgd.trace import Header, TraceWriter
from lightning_dsgd.worlds import Trainer

_LOOK_AGAIN = 0.5
"""Seconds after which a rank that waits for its turn looks at the clock anyway."""


class Overtaken(Exception):
    """Raised inside a backward pass whose gradient has become useless."""


class RoundsStrategy(CoordinatedStrategy):
    """Base of every strategy on the rounds exchange."""

    damping: Damping = "none"
    damping_constant: float = 1.0
    max_staleness: int | None = 0
    divide_by_batches: bool = True

    def __init__(
        self,
        *,
        cancel_late: bool = False,
        backend: BackendName = "auto",
        timeout: float = 300.0,
        max_lag: int = 64,
        rounds_per_epoch: int | None = None,
        trace: str | None = None,
    ) -> None:
        if max_lag < 1:
            raise ConfigurationError(f"max_lag={max_lag} must be at least 1")
        if rounds_per_epoch is not None and rounds_per_epoch < 1:
            raise ConfigurationError(f"rounds_per_epoch={rounds_per_epoch} must be at least 1")
        super().__init__(backend=backend, timeout=timeout)
        self.cancel_late = cancel_late
        self.max_lag = max_lag
        self.rounds_per_epoch = rounds_per_epoch
        self.trace = trace
        self.tally: Tally | None = None
        """Rank 0's count of who gave what; kept after training."""
        self.last_round: Round | None = None
        self.idle_seconds = 0.0
        """Time this rank's training thread has waited for updates; kept after training."""
        self.policy_state: dict[str, Any] = {}
        self._exchange: RoundsExchange | None = None
        self._loader: RoundsLoader | None = None
        self._replaying = False
        self._opening = True
        self._fresh = True
        self._abandon = False
        self._in_user_step = False
        self._cancellable = False
        self._last_output: Any = None
        self._hooks: list[Any] = []

    # ------------------------------------------------------- what an algorithm defines

    @abc.abstractmethod
    def make_policy(self, arguments: dict[str, Any]) -> RoundsPolicy:
        """The rule by which rounds are made, from `policy_arguments`."""

    def policy_arguments(self) -> dict[str, Any]:
        """The policy's constructor arguments; a trace keeps them, to make the same policy again."""
        return {"workers": self.world_size, "version": self.version, "max_lag": self.max_lag}

    def worker_options(self) -> dict[str, Any]:
        """What a trace must say of the workers' own behaviour, beside the policy."""
        return {"cancel_late": self.cancel_late}

    def gradients_per_round(self) -> int:
        """How many gradients an update usually holds: sets the number of updates in an epoch."""
        return self.world_size

    def may_start(self) -> bool:
        """May this rank begin a gradient at the present version?"""
        return True

    def may_compute_more(self) -> bool:
        """May it begin a further one before the next update is there?"""
        return False

    def steps_together(self) -> bool:
        """Does every rank run `training_step` equally often? Then it may hold a collective."""
        return False

    def should_publish(self) -> bool:
        """At a mini-batch boundary: announce what has been accumulated?"""
        return True

    def initial_token(self, policy_state: dict[str, Any]) -> int | None:
        """Whose turn is first, where there are turns."""
        return None

    # ------------------------------------------------------------------ start and end

    @property
    def outstanding(self) -> int:
        """Own contributions that no update has used or dropped yet."""
        assert self._exchange is not None
        return self._exchange.outstanding

    @property
    def version(self) -> int:
        """The number of updates this replica has applied."""
        assert self.lightning_module is not None
        return int(self.lightning_module.trainer.global_step)

    def check_trainer(self, trainer: Trainer) -> None:
        super().check_trainer(trainer)
        if trainer.state.fn == "fit":
            refuse_averaged_statistics(trainer, self)
            refuse_loader_argument(trainer.lightning_module)

    def start_exchange(self, trainer: Trainer) -> None:
        require_one_loader(trainer)
        assert self._backend is not None and self._main is not None and self.model is not None
        self._lay_out()
        self._accumulated = self._pool.zeroed()
        self._accumulated_batches = 0
        self._cancelled: tuple[float, ...] = ()
        self._computing_seconds = 0.0
        self._computed_seconds: tuple[float, ...] = ()
        self._applied_flat: list[Tensor] | None = None
        self._fresh = True
        self.policy_state = self._main.broadcast_object(self.policy_state)
        control = self._connect_coordinator(self._layout.nbytes)
        self._exchange = RoundsExchange(
            self._backend.channel("rounds", patience=2),
            control,
            self._pool,
            scale=scale_of(self.damping),
            divide=self.divide_by_batches,
            version=self.version,
            token=self.initial_token(self.policy_state),
        )
        control.await_welcome()

    def _lay_out(self) -> None:
        """What depends on which parameters are trained."""
        assert self.model is not None
        self._layout = FlatLayout(self.model.parameters())
        self._gradients = FlatGradients(self._layout)
        self._pool = FlatPool(self._layout)
        self._distance = self._make_distance_damping()
        self._replace_cancel_hooks(self._layout.parameters if self.cancel_late else [])

    def follow_parameters(self) -> None:
        """Fine-tuning freezes and frees parameters: late gradients know nothing of new ones."""
        assert self.model is not None and self._main is not None and self._exchange is not None
        old = self._layout
        if old.fits(self.model.parameters()):
            return
        self._lay_out()
        self._accumulated = self._layout.carry(self._accumulated, old)
        self._applied_flat = None
        self._exchange.change_layout(self._pool, lambda flat: self._layout.carry(flat, old))
        self._main.barrier()

    def _make_distance_damping(self) -> DistanceDamping | None:
        if self.damping != "distance":
            return None
        assert self.max_staleness is not None
        return DistanceDamping(self._layout, self.damping_constant, self.max_staleness)

    def logged_values(self) -> dict[str, float]:
        if self.last_round is None:
            return {}
        staleness = self.last_round.staleness()
        loss = self.last_round.loss
        return {
            **({} if loss is None else {"loss": loss}),
            "k": float(self.last_round.k),
            "workers": float(len(set(self.last_round.workers))),
            "batches": float(sum(self.last_round.batches)),
            "staleness": sum(staleness) / len(staleness),
        }

    def _connect_coordinator(self, nbytes: int) -> Control:
        if not self.is_global_zero:
            return self.connect_control(None)
        arguments = self.policy_arguments()
        policy = self.make_policy(arguments)
        if self.policy_state:
            policy.restore(self.policy_state)
        control = self.connect_control(policy, self._trace_writer(policy, arguments, nbytes))
        assert self._coordinator is not None
        self.tally = self._coordinator.tally
        return control

    def _trace_writer(
        self, policy: RoundsPolicy, arguments: dict[str, Any], nbytes: int
    ) -> TraceWriter | None:
        if self.trace is None:
            return None
        kind = type(policy)
        header = Header(
            policy=f"{kind.__module__}:{kind.__qualname__}",
            arguments=arguments,
            strategy=self.strategy_name,
            workers=self.world_size,
            bytes=nbytes,
            start=policy.version,
            state=dict(self.policy_state),
            options=self.worker_options(),
        )
        return TraceWriter(self.trace, header)

    def settle(self) -> None:
        """Training may stop in mid-epoch, while late gradients still make rounds by themselves."""
        assert self._control is not None and self._exchange is not None
        assert self._main is not None
        versions = self._main.gather(torch.tensor(self.version)).tolist()
        if len(set(versions)) > 1:
            raise ConfigurationError(
                f"the ranks have stopped after different updates ({by_rank(versions)}); set "
                "trainer.should_stop on all of them at once, by what "
                "trainer.strategy.reduce_boolean_decision says"
            )
        if self.is_global_zero:
            self._control.announce(Segment(self.version))
        self._exchange.settle(self.timeout)

    def close_exchange(self) -> None:
        self.policy_state = self.snapshot_policy()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()
            self.idle_seconds = exchange.waited
        self._replace_cancel_hooks([])

    def snapshot_policy(self) -> dict[str, Any]:
        """The policy's state for a checkpoint; rank 0 alone knows it, and it alone writes."""
        if self._coordinator is not None:
            return self._coordinator.policy.state()
        return self.policy_state

    def agree(self) -> None:
        """Replicas are identical but for the statistics in their buffers."""
        if self._exchange is not None:
            self.average_buffers()

    def checkpoint_state(self) -> dict[str, Any]:
        return {"policy": self.snapshot_policy()}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        saved = checkpoint.get(CHECKPOINT_KEY, {})
        if saved.get("strategy") == self.strategy_name:
            self.policy_state = saved["policy"]
        return checkpoint

    # --------------------------------------------------------------------------- data

    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        self._loader = RoundsLoader(dataloader, self._length(dataloader, trainer), self)
        return self._loader

    def _length(self, dataloader: object, trainer: Trainer) -> int:
        """Batches per epoch: as many as use each rank's own once, all ranks together."""
        accumulate: int = trainer.accumulate_grad_batches
        if self.rounds_per_epoch is not None:
            return self.rounds_per_epoch * accumulate
        assert self._main is not None
        limit = trainer.limit_train_batches
        mine = local_length(dataloader, limit)
        length = agreed_length(self._main.gather_objects(mine))
        if self.gradients_per_round() == self.world_size:
            return length  # the last update may accumulate over fewer, as with one worker
        updates = math.ceil(length / accumulate)
        return math.ceil(updates * self.world_size / self.gradients_per_round()) * accumulate

    # ------------------------------------------------------------- one iteration's turn

    def begin_epoch(self) -> None:
        """Rounds up to the end of this epoch, or of the training, may be decided."""
        assert self.lightning_module is not None and self._control is not None
        self.follow_parameters()
        trainer = self.lightning_module.trainer
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        left = math.ceil(
            (int(trainer.fit_loop.max_batches) - done) / trainer.accumulate_grad_batches
        )
        self.segment_first = self.version
        self.segment_last = self.version + left
        if trainer.max_steps is not None and trainer.max_steps >= 0:
            self.segment_last = min(self.segment_last, trainer.max_steps)
        if self.is_global_zero:
            self._control.announce(Segment(self.segment_last))
        self._opening = True

    def begin_iteration(self) -> bool:
        """At a group's first batch, decide what the coming update needs from this rank.

        An epoch's first batch is always seen, however late, and computed unless the algorithm has
        no use for it: what every rank logs once, Lightning can reduce over all ranks at the end.
        """
        assert self._exchange is not None
        if self._fresh:
            check_unchanged(self._layout)
            self._fresh = False
            self._abandon = False
            overtaken = self._exchange.decided and not self._opening
            self._replaying = overtaken or not self.may_start()
            self._computed_at = self.version
        self._began = time.monotonic()
        return not self._idle

    @property
    def _idle(self) -> bool:
        return self._replaying or self._abandon

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._idle:
            if self._opening:
                self._user_step(*args, **kwargs)  # for what it logs
            return self._last_output_again()
        self._call_minibatch_start()
        return self._user_step(*args, **kwargs)

    def _user_step(self, *args: Any, **kwargs: Any) -> Any:
        self._in_user_step = True
        try:
            output = super().training_step(*args, **kwargs)
        finally:
            self._in_user_step = False
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
        if not self._idle:
            self._gradients.attach(self._accumulated)
            self._guarded_backward(closure_loss, optimizer, *args, **kwargs)
        if self._stepping:
            self.mark_exchange()
            self._end_turn(float(closure_loss.detach()))
        return closure_loss.detach()

    def _guarded_backward(
        self, loss: Tensor, optimizer: Optimizer | None, *rest: Any, **kw: Any
    ) -> None:
        self._cancellable = not self._opening
        try:
            super().backward(loss, optimizer, *rest, **kw)
        except Overtaken:
            self._abandon = True
        self._cancellable = False
        self._gradients.collect(self._accumulated)
        self._computing_seconds += time.monotonic() - self._began

    def _end_turn(self, loss: float) -> None:
        """Contribute, go on computing while the algorithm wants it, and take the next update."""
        exchange = self._exchange
        assert exchange is not None
        self._opening = False
        if not self._idle:
            self._minibatch_done(loss)
        wait = exchange.next()
        while not exchange.decided and self.may_compute_more():
            wait.check()
            self._extra_minibatch()
        if self._abandon:  # half a gradient: nothing to keep
            for buffer in self._accumulated:
                buffer.zero_()
            self._cancelled += (self._computing_seconds,)
            self._computing_seconds = 0.0
        while self._accumulated_batches and not exchange.decided:
            if self.should_publish():
                self._publish()
            else:
                exchange.wait(min(_LOOK_AGAIN, wait.check()))
        self._adopt(exchange.take(wait))

    def _minibatch_done(self, loss: float) -> None:
        if self._accumulated_batches == 0:
            self._oldest = self._computed_at
        self._accumulated_batches += 1
        self._computed_seconds += (self._computing_seconds,)
        self._computing_seconds = 0.0
        self._loss = loss * self._loss_scale()
        if self.should_publish():
            self._publish()

    def _loss_scale(self) -> int:
        """Lightning divides the loss by the batches it accumulates over."""
        assert self.lightning_module is not None
        return int(self.lightning_module.trainer.accumulate_grad_batches)

    def _publish(self) -> None:
        assert self._exchange is not None
        contribution = Contribution(
            worker=self.global_rank,
            seq=0,
            version=self._oldest,
            batches=self._accumulated_batches,
            loss=self._loss,
            seconds=self._computed_seconds,
        )
        self._exchange.publish(self._accumulated, contribution)
        self._gradients.detach()
        self._accumulated = self._pool.zeroed()
        self._accumulated_batches = 0
        self._computed_seconds = ()

    def _extra_minibatch(self) -> None:
        """One more gradient within the same iteration, as Lightning would compute it."""
        module, loader = self.lightning_module, self._loader
        assert module is not None and loader is not None
        trainer = module.trainer
        structure: Any = trainer.fit_loop._combined_loader._spec  # type: ignore[union-attr]  # set
        self._abandon = False
        self._computed_at = self.version
        loss = 0.0
        for _ in range(trainer.accumulate_grad_batches):
            self._began = time.monotonic()
            self._call_minibatch_start()
            batch = tree_unflatten([loader.take()], structure)
            output = self._step_on(batch, trainer)
            part = output["loss"] if isinstance(output, dict) else output
            scaled = part / trainer.accumulate_grad_batches
            self._gradients.attach(self._accumulated)
            self._guarded_backward(scaled, self.optimizers[0])
            if self._abandon:
                return
            loss = float(scaled.detach())
        self._minibatch_done(loss)

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

    def _adopt(self, update: Update) -> None:
        """Hand the agreed gradient to the optimizer: `.grad` now is the update's memory."""
        assert update.round.number == self.version + 1, "updates come in order"
        if self._distance is not None:
            self._distance.apply(update, self.optimizers[0])
        if self._applied_flat is not None:
            self._pool.give_back(self._applied_flat)
        self._applied_flat = update.gradient
        self._gradients.attach(update.gradient)
        self.last_round = update.round
        self._fresh = True
        number = update.round.number
        if number % max(1, self.max_lag // 4) == 0 or number == self.segment_last:
            assert self._control is not None
            self._control.announce(Applied(self.global_rank, number, self._cancelled))
            self._cancelled = ()

    def check_meeting(self, what: str) -> None:
        if self._in_user_step and not self.steps_together():
            raise ConfigurationError(
                f"{what} in training_step would wait for the slowest rank, or for ever: with "
                f"{type(self).__name__} ranks run it unequally often; reduce at the end of the "
                "epoch (on_step=False, on_epoch=True); dsgd/loss is each update's mean loss"
            )

    # ---------------------------------------------------------------------- cancelling

    def _replace_cancel_hooks(self, parameters: list[nn.Parameter]) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = [p.register_post_accumulate_grad_hook(self._cancel) for p in parameters]

    def _cancel(self, parameter: Tensor) -> None:
        if self._cancellable and self._exchange is not None and self._exchange.overtaken.is_set():
            raise Overtaken

    def sleep(self, seconds: float) -> None:
        """A slowed worker's pause; ends early when cancelling, as computing would."""
        if self.cancel_late and not self._opening and self._exchange is not None:
            self._exchange.overtaken.wait(seconds)
        else:
            time.sleep(seconds)
