"""The rounds exchange as a Lightning strategy: one Lightning iteration is one update of the model.

So `global_step`, schedules, callbacks, limits and epochs follow the version, on every rank alike:

- An iteration usually computes a gradient, contributes it, and ends with the next update.
- A rank that has missed updates *replays*: its iteration takes no batch, computes nothing, and
  hands the optimizer the gradient that the others have agreed on.
- Where the algorithm lets a worker give several gradients to one update, the further mini-batches
  are computed inside the same iteration.

Which of these comes next is the worker machine's to say; hooks become its inputs here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import torch
from torch.optim import Optimizer

from lightning_dsgd.backends import BackendName
from lightning_dsgd.backends.streams import Reading, happened
from lightning_dsgd.control.tally import Tally
from lightning_dsgd.control.trace import Header, TraceWriter
from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.exchange.checksum import checksum, require_same
from lightning_dsgd.exchange.damping import Damping, DistanceDamping, scale_of
from lightning_dsgd.exchange.desk import Desk, Update
from lightning_dsgd.exchange.finite import NonFinite, check_nonfinite
from lightning_dsgd.exchange.gradients import FlatLayout
from lightning_dsgd.exchange.rounds import RoundsThread
from lightning_dsgd.trainer.gradient import GradientStrategy
from lightning_dsgd.trainer.loader import (
    RoundsLoader,
    agreed_length,
    keeps_order,
    local_length,
    require_one_loader,
)
from lightning_dsgd.trainer.monitor import CHECKPOINT_KEY
from lightning_dsgd.trainer.refusals import (
    by_rank,
    refuse_averaged_statistics,
    refuse_loader_argument,
)
from lightning_dsgd.trainer.telling import say
from lightning_dsgd.trainer.worlds import Trainer
from lightning_dsgd.workers.algorithm import RoundsAlgorithm
from lightning_dsgd.workers.machine import Ended, Rule
from lightning_dsgd.workers.messages import Bound, Checksum, Round, Segment
from lightning_dsgd.workers.policy import RoundsPolicy


class RoundsStrategy(RoundsAlgorithm, GradientStrategy):
    """Base of every strategy on the rounds exchange; `RoundsAlgorithm` says what one defines."""

    damping: Damping = "none"
    damping_constant: float = 1.0
    max_staleness: int | None = 0
    keeps_late_work: ClassVar[bool] = True
    """A gradient that comes too late for its update may be used by a later one."""
    divide_by_batches: bool = True

    def __init__(
        self,
        *,
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
        check_nonfinite(nonfinite)
        if compare_every < 0:
            raise ConfigurationError(f"compare_every={compare_every} must be 0 (never) or more")
        if max_lag < 1:
            raise ConfigurationError(f"max_lag={max_lag} must be at least 1")
        if max_lag_mb < 1:
            raise ConfigurationError(f"max_lag_mb={max_lag_mb} must be at least 1")
        if rounds_per_epoch is not None and rounds_per_epoch < 1:
            raise ConfigurationError(f"rounds_per_epoch={rounds_per_epoch} must be at least 1")
        super().__init__(backend=backend, timeout=timeout)
        self.cancel_late = cancel_late
        self.max_lag = max_lag
        self.max_lag_mb = max_lag_mb
        self.rounds_per_epoch = rounds_per_epoch
        self.trace = trace
        self.nonfinite = nonfinite
        self.compare_every = compare_every
        self.tally: Tally | None = None
        """Rank 0's count of who gave what; kept after training."""
        self.last_round: Round | None = None
        self.idle_seconds = 0.0
        """Time this rank's training thread has waited for updates; kept after training."""
        self.gradients_held = 0
        """As many this rank has had memory for at once; kept after training."""
        self.policy_state: dict[str, Any] = {}
        self._rounds: RoundsThread | None = None
        self._distance: DistanceDamping | None = None
        self._told_checksum = -1
        self._checksums: deque[tuple[int, Reading]] = deque()
        """Under way from the device."""
        self._warned = False

    def make_rule(self, workers: int) -> Rule:
        return Rule(cancels=self.cancel_late)

    def may_meet(self) -> bool:
        return self.steps_together(self.world_size)

    # ------------------------------------------------------------------ start and end

    def alike(self) -> dict[str, Any]:
        """Where a trace goes is rank 0's business alone."""
        return {
            **super().alike(),
            "compare_every": self.compare_every,
            "trace": self.trace is not None,
        }

    def check_world(self) -> None:
        super().check_world()
        self.check_workers(self.world_size)

    def check_trainer(self, trainer: Trainer) -> None:
        super().check_trainer(trainer)
        if trainer.state.fn == "fit":
            refuse_averaged_statistics(trainer, self)
            refuse_loader_argument(trainer.lightning_module)

    def start_exchange(self, trainer: Trainer) -> None:
        require_one_loader(trainer)
        assert self._backend is not None and self._main is not None and self.model is not None
        state = msgspec.msgpack.encode(self.policy_state)
        self.policy_state = msgspec.msgpack.decode(self._main.broadcast_bytes(state))
        layout = FlatLayout(self.model.parameters())
        policy = self.restored_policy(
            self.world_size, self.version, self.policy_state, layout.nbytes
        )
        machine = self.make_machine(self.global_rank, self.world_size, policy)
        self._begin_deciding(policy, layout.nbytes)
        control = self.control
        self._computes = None
        self._told_checksum = -1
        self._checksums.clear()
        self._desk = Desk(machine, control, layout, self.streams)
        self._follow_layout()
        self._rounds = RoundsThread(
            self._backend.channel("rounds", patience=2, on_device=True),
            control,
            self._desk,
            scale=scale_of(self.damping),
            divide=self.divide_by_batches,
        )
        self._main.barrier()

    def _begin_deciding(self, policy: RoundsPolicy, nbytes: int) -> None:
        writer = self._trace_writer(policy, nbytes) if self.trace is not None else None
        if self._coordinator is not None:
            say(self.memory_bound(self.world_size, nbytes).text())
            self.tally = self._coordinator.begin(policy, writer)

    def _trace_writer(self, policy: RoundsPolicy, nbytes: int) -> TraceWriter | None:
        """Rank 0's; where it cannot have one, all ranks refuse; collective."""
        assert self._main is not None
        writer, problem = None, ""
        if self._coordinator is not None:
            try:
                writer = self._open_trace(policy, nbytes)
            except OSError as error:
                problem = f"{error.filename}: {error.strerror}"
        problem = self._main.broadcast_bytes(problem.encode()).decode()
        if problem:
            raise ConfigurationError(
                f"trace={self.trace!r}: rank 0 cannot write there ({problem}); name a directory "
                "that can be made and written on its host"
            )
        return writer

    def _open_trace(self, policy: RoundsPolicy, nbytes: int) -> TraceWriter:
        assert self.trace is not None
        header = Header(
            strategy=self.strategy_name,
            arguments=self.arguments(),
            workers=self.world_size,
            bytes=nbytes,
            start=policy.version,
            state=dict(self.policy_state),
        )
        return TraceWriter(self.trace, header, say)

    def _follow_layout(self) -> None:
        """What else depends on which parameters are trained."""
        layout = self.desk.layout
        self.replace_cancel_hooks(layout.parameters if self.cancel_late else [])
        if self.damping == "distance":
            assert self.max_staleness is not None
            self._distance = DistanceDamping(layout, self.damping_constant, self.max_staleness)

    def follow_parameters(self) -> Bound | None:
        """Fine-tuning freezes and frees parameters: late gradients know nothing of new ones.

        Those are larger or smaller than the ones before, so that fewer or more of them have room.
        """
        assert self.model is not None and self._main is not None
        if self.desk.layout.fits(self.model.parameters()):
            return None
        self.desk.change_layout(FlatLayout(self.model.parameters()))
        self._follow_layout()
        self._main.barrier()
        bound = self.memory_bound(self.world_size, self.desk.layout.nbytes)
        if self.is_global_zero:
            say(bound.text())
        return bound.bound

    def settle(self) -> None:
        """Training may stop in mid-epoch, while late gradients still make rounds by themselves."""
        assert self._rounds is not None and self._main is not None and self.model is not None
        versions = self._main.gather(torch.tensor(self.version)).tolist()
        if len(set(versions)) > 1:
            raise ConfigurationError(
                f"the ranks have stopped after different updates ({by_rank(versions)}); set "
                "trainer.should_stop on all of them at once, by what "
                "trainer.strategy.reduce_boolean_decision says"
            )
        if self.compare_every:
            require_same(self._main, self.version, self.model.parameters())
        if self.is_global_zero:
            self.control.announce(Segment(self.version))
        self._rounds.settle(self.timeout)

    def close_exchange(self) -> None:
        self.policy_state = self.snapshot_policy()
        rounds, self._rounds = self._rounds, None
        desk, self._desk = self._desk, None
        if rounds is not None:
            rounds.close()
        if desk is not None:
            desk.close()
            self.idle_seconds = desk.waited
            self.gradients_held = desk.pool.peak
        self.replace_cancel_hooks([])
        self.forget_gradient()
        self._checksums.clear()

    # ------------------------------------------------------------ checkpoints and logs

    def snapshot_policy(self) -> dict[str, Any]:
        """The policy's state for a checkpoint; rank 0 alone knows it, and it alone writes."""
        if self._coordinator is not None and isinstance(self._coordinator.policy, RoundsPolicy):
            return self._coordinator.policy.state()
        return self.policy_state

    def agree(self) -> None:
        """Replicas are identical but for the statistics in their buffers."""
        if self._desk is not None:
            self.average_buffers()

    def checkpoint_state(self) -> dict[str, Any]:
        return {"policy": self.snapshot_policy()}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        saved = checkpoint.get(CHECKPOINT_KEY, {})
        if saved.get("strategy") == self.strategy_name:
            self.policy_state = saved["policy"]
        return checkpoint

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

    # ------------------------------------------------------------------------- epochs

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
        mine = local_length(dataloader, trainer.limit_train_batches)
        length = agreed_length(self._main.gather_data(mine, int | None))
        per_round = self.gradients_per_round(self.world_size)
        if per_round == self.world_size:
            return length  # the last update may accumulate over fewer, as with one worker
        updates = math.ceil(length / accumulate)
        return math.ceil(updates * self.world_size / per_round) * accumulate

    def begin_epoch(self) -> None:
        """Rounds up to the end of this epoch, or of the training, may be decided."""
        assert self.lightning_module is not None
        bound = self.follow_parameters()
        segment = Segment(self._epoch_end(self.lightning_module.trainer), bound)
        if self.is_global_zero:
            self.control.announce(segment)
        self.desk.tell(segment)

    def _epoch_end(self, trainer: Trainer) -> int:
        """The version at which this epoch, or the training, ends."""
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        left: int = int(trainer.fit_loop.max_batches) - done
        last: int = self.version + math.ceil(left / trainer.accumulate_grad_batches)
        limit: int | None = trainer.max_steps
        return last if limit is None or limit < 0 else min(last, limit)

    def end_epoch(self) -> None:
        self.leave_epoch(self.version)
        self._look_for_unused_data()
        self.desk.tell(Ended(self.version))
        if self.compare_every:
            self._tell_checksum(self.version)

    def _look_for_unused_data(self) -> None:
        """A rank that is always late gives nothing; nobody else has its share of the data then."""
        given = self.desk.machine.has_given(late_counts=self.keeps_late_work)
        if self._warned or given or self._loader is None:
            return
        if keeps_order(self._loader.loader):
            self._warned = True
            say(
                f"no gradient of rank {self.global_rank} was used in a whole epoch, and its loader "
                "gives it the same rows in every one: what it has may never be learnt; use "
                "shuffle=True, or a sampler with `set_epoch`"
            )

    # ------------------------------------------------------------- are replicas the same?

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.last_round is not None
        if self.compare_every and self.last_round.number % self.compare_every == 0:
            self._tell_checksum(self.last_round.number)
        return output

    def _tell_checksum(self, version: int) -> None:
        """Nobody waits for an answer: the coordinator ends the run if there is one to give."""
        assert self.model is not None and self._control is not None
        if version != self._told_checksum:
            self._told_checksum = version
            self._checksums.append(
                (version, self.streams.reading(checksum(self.model.parameters())))
            )
        while self._checksums and happened(self._checksums[0][1].mark):
            version, reading = self._checksums.popleft()
            self._control.announce(Checksum(self.global_rank, version, reading.numbers()[0]))

    # ------------------------------------------------------------------ the next update

    def end_turn(self) -> None:
        """Go on computing while the machine says so, then take the next update."""
        wait = self.desk.next()
        while self.desk.await_move(wait):
            wait.check()
            self.extra_gradient()
        self._adopt(self.desk.take(wait))

    def _adopt(self, update: Update) -> None:
        """The agreed gradient is what the optimizer gets."""
        assert update.round.number == self.version + 1, "updates come in order"
        if self._distance is not None:
            self._distance.apply(update, self.optimizers[0])
        self.last_round = update.round
