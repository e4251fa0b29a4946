"""The gossip exchange as a Lightning strategy: one Lightning iteration is one step of the own
model.

Ranks make unequal numbers of steps, so whatever they do together happens between *segments*. A
segment is a number of gradients over all ranks; who asks first makes more of them. It ends, on all
ranks together, with the mean of all models: at the end of an epoch, and within it where
`resync_every` says so.

From an epoch's last step to the next one's first, the module holds the mean; then training goes on
from the own model, or from the mean.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dsgd.backends import BackendName
from lightning_dsgd.backends.streams import look_until
from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.exchange.checksum import require_same
from lightning_dsgd.exchange.finite import NonFinite, check_nonfinite
from lightning_dsgd.exchange.gossip import Counts, GossipExchange, SharedModel
from lightning_dsgd.exchange.gradients import Flat, FlatLayout, check_unchanged
from lightning_dsgd.trainer.coordinated import CoordinatedStrategy
from lightning_dsgd.trainer.loader import RoundsLoader, local_length, require_one_loader
from lightning_dsgd.trainer.own_steps import OwnSteps
from lightning_dsgd.trainer.refusals import refuse_averaged_statistics, refuse_averaging
from lightning_dsgd.trainer.worlds import Trainer
from lightning_dsgd.workers.algorithm import GossipAlgorithm
from lightning_dsgd.workers.messages import Segment

Resync = Literal["never", "epoch"]


class GossipLoader(RoundsLoader):
    """A rank's batches, over and over: the strategy knows when an epoch is over, not the data.

    Its length is the rank's share of an epoch if all were equally fast.
    """

    def __iter__(self) -> Iterator[Any]:
        self._source, self._next, self._restarts = None, [], 0
        self._keeper.begin_epoch()
        while True:
            yield self.take()


class GossipTally:
    """Every rank's counts and how far the models were apart, at the end of a segment."""

    def __init__(self, ranks: list[Counts], consensus: float) -> None:
        self.ranks = ranks
        self.consensus = consensus
        """Root mean square, over the ranks, of the distance between a model and the mean of all."""

    def values(self) -> dict[str, float]:
        """For loggers."""
        values = {"consensus": self.consensus}
        for rank, counts in enumerate(self.ranks):
            values[f"gradients/{rank}"] = float(counts.gradients)
            values[f"started/{rank}"] = float(counts.started)
            values[f"answered/{rank}"] = float(counts.answered)
            values[f"partner_age/{rank}"] = counts.mean_age
        return values

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for a report or a file."""
        ranks = [msgspec.to_builtins(counts) for counts in self.ranks]
        return {"consensus": self.consensus, "workers": ranks}

    def table(self) -> str:
        """The run at a glance."""
        lines = [f"distance to the mean model {self.consensus:.3g}"]
        lines.append(
            f"{'rank':>4}  {'gradients':>9}  {'dropped':>7}  {'started':>7}  {'answered':>8}  "
            f"{'age':>6}"
        )
        for rank, c in enumerate(self.ranks):
            lines.append(
                f"{rank:>4}  {c.gradients:>9}  {c.dropped:>7}  {c.started:>7}  {c.answered:>8}  "
                f"{c.mean_age:>6.1f}"
            )
        return "\n".join(lines)


class GossipStrategy(GossipAlgorithm, CoordinatedStrategy):
    """Base of strategies on the gossip exchange."""

    _runtime = (
        *CoordinatedStrategy._runtime,
        "_layout",
        "_flat",
        "_after",
        "_views",
        "_own_buffers",
    )

    def __init__(
        self,
        *,
        resync_every: Resync | int = "never",
        gradients_per_epoch: int | None = None,
        backend: BackendName = "auto",
        timeout: float = 300.0,
        nonfinite: NonFinite = "raise",
    ) -> None:
        check_nonfinite(nonfinite)
        if isinstance(resync_every, bool) or not (
            resync_every in ("never", "epoch")
            or (isinstance(resync_every, int) and resync_every > 0)
        ):
            raise ConfigurationError(
                f"resync_every={resync_every!r} must be 'never', 'epoch' or a number of steps"
            )
        if gradients_per_epoch is not None and gradients_per_epoch < 1:
            raise ConfigurationError(
                f"gradients_per_epoch={gradients_per_epoch} must be at least 1"
            )
        super().__init__(backend=backend, timeout=timeout)
        self.resync_every = resync_every
        self.gradients_per_epoch = gradients_per_epoch
        self.nonfinite = nonfinite
        self.tally: GossipTally | None = None
        """As of the last segment's end; kept after training."""
        self._exchange: GossipExchange | None = None
        self._own_steps: OwnSteps | None = None
        self._in_epoch = False
        self._fresh = True

    # ------------------------------------------------------------------ start and end

    def check_trainer(self, trainer: Trainer) -> None:
        super().check_trainer(trainer)
        if trainer.state.fn == "fit":
            check_fit(type(self).__name__, trainer)
            refuse_averaging(trainer, self)
            refuse_averaged_statistics(trainer, self)

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == "fit" and trainer.fast_dev_run:
            # its limits are an epoch's too, and the own steps may exceed them
            trainer.fit_loop.epoch_loop.max_steps = -1

    def start_exchange(self, trainer: Trainer) -> None:
        require_one_loader(trainer)
        assert self._backend is not None and self._main is not None and self.model is not None
        self._own_steps = OwnSteps(self.nonfinite, self.global_rank, self.streams, self.alarm)
        self._batches = self._batches_per_epoch(trainer)
        self._made = 0
        self._own_buffers: list[Tensor] | None = None
        self._fresh = True
        own = self._lay_out()
        if self._coordinator is not None:
            self._coordinator.begin(self.make_policy(self.world_size))
        control = self.control
        self._exchange = GossipExchange(
            self.global_rank,
            self._backend.pairs(),
            control,
            SharedModel(own, self.streams),
            self._layout.zeros,
            self.alarm,
            self.streams,
            active=self.is_active(self.global_rank),
            timeout=self.timeout,
        )
        self._main.barrier()
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if trainer.fit_loop.restarting and progress.is_last_batch:
            # the checkpoint was written at the end of an epoch, whatever its number of steps
            trainer.val_check_batch = progress.current.ready

    def _lay_out(self) -> Flat:
        """What depends on which parameters are trained; returns those of the module."""
        assert self.model is not None
        layout = self._layout = FlatLayout(self.model.parameters())
        self._flat, self._after = layout.zeros(), layout.zeros()
        self._views = list(zip(layout.views(self._flat), layout.views(self._after), strict=True))
        now = layout.zeros()
        for parameter, view in layout.views(now):
            view.copy_(parameter.detach())
        return now

    def follow_parameters(self) -> None:
        """Fine-tuning freezes and frees parameters: new ones are the same on all ranks so far."""
        assert self.model is not None and self._main is not None and self._exchange is not None
        old, own = self._layout, self._after
        if old.fits(self.model.parameters()):
            return
        self._exchange.model.read(own)
        now = self._lay_out()
        model = SharedModel(self._layout.carry(own, old, onto=now), self.streams)
        self._exchange.change_layout(model, self._layout.zeros)
        self._main.barrier()

    def end_epoch(self) -> None:
        if self._in_epoch:
            raise ConfigurationError(
                "this rank has left the epoch alone, through trainer.should_stop or a -1 from "
                "on_train_batch_start; stop at the end of an epoch instead"
            )

    def logged_values(self) -> dict[str, float]:
        assert self._exchange is not None
        counts = self._exchange.counts
        return {
            "started": counts.started,
            "answered": counts.answered,
            "partner_age": counts.last_age,
        }

    def epoch_values(self) -> dict[str, float]:
        assert self.tally is not None
        return self.tally.values()

    def _batches_per_epoch(self, trainer: Trainer) -> int:
        """All ranks' batches of one pass over the data."""
        assert self._main is not None
        if self.gradients_per_epoch is not None:
            return int(self.gradients_per_epoch * trainer.accumulate_grad_batches)
        return sum(self._main.gather_data(int(trainer.fit_loop.max_batches), int))

    def close_exchange(self) -> None:
        exchange, self._exchange = self._exchange, None
        self._own_steps = None
        self._in_epoch = False
        if exchange is not None:
            exchange.close()

    # --------------------------------------------------------------------------- data

    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        return GossipLoader(dataloader, self._share(dataloader, trainer), self)

    def _share(self, dataloader: object, trainer: Trainer) -> int:
        """This rank's batches per epoch, if all ranks were equally fast."""
        if self.gradients_per_epoch is not None:
            batches = self.gradients_per_epoch * int(trainer.accumulate_grad_batches)
            return math.ceil(batches / self.world_size)
        length = local_length(dataloader, trainer.limit_train_batches)
        if not length:
            raise ConfigurationError(
                "the training data of this rank is empty or has no length, so an epoch has no "
                "number of gradients; give `gradients_per_epoch` to the strategy"
            )
        return length

    def begin_epoch(self) -> None:
        """Called when the epoch's first batch is asked for."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        gradients = self._batches // trainer.accumulate_grad_batches
        if gradients < self.world_size:
            raise ConfigurationError(
                f"an epoch of {gradients} gradients is too short for {self.world_size} ranks; "
                "give more data, smaller batches, or `gradients_per_epoch` to the strategy"
            )
        # the strategy ends the epoch: no limit of Lightning's may come before
        fit_loop = trainer.fit_loop
        assert fit_loop._data_fetcher is not None
        fit_loop.max_batches = fit_loop._data_fetcher.length = self._batches + 1
        trainer.val_check_batch = sys.maxsize
        if self._own_buffers is not None:
            self._restore_buffers(self._own_buffers)
        self._own_buffers = None
        self.follow_parameters()
        self._epoch_end = self._made + gradients
        self._in_epoch = True
        self._begin_segment()

    def begin_iteration(self) -> bool:
        """Every iteration takes a fresh batch."""
        return True

    def _begin_segment(self) -> None:
        """The next gradients may be made; rank 0 says so."""
        self._segment_end = self._epoch_end
        if isinstance(self.resync_every, int):
            length = self.resync_every * self.world_size
            if self._epoch_end - self._made >= 2 * length:
                self._segment_end = self._made + length
        if self.is_global_zero:
            self.control.announce(Segment(self._segment_end))

    # -------------------------------------------------------------------- one gradient

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._fresh:
            check_unchanged(self._layout)
            self._load_own()
            self._fresh = False
        return super().training_step(*args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self.course.stepping:
            self.course.exchange()
            self._judge(closure_loss)
            self._announce()

    def _judge(self, loss: Tensor) -> None:
        """A gradient that is not finite is not applied, or ends the run."""
        assert self._exchange is not None and self.lightning_module is not None
        assert self._own_steps is not None
        trainer: Trainer = self.lightning_module.trainer
        whole = loss.detach() * trainer.accumulate_grad_batches
        step = trainer.global_step + 1
        fine = self._own_steps.takes(self._layout.parameters, step, whole)
        self._exchange.counts.dropped += not fine

    def _announce(self) -> None:
        """The gradient is there: take the model as it is by now, to which the step will be applied.

        The pair that this gradient starts is usually averaged later: nobody waits for it.
        """
        assert self._exchange is not None
        look_until(self.streams.mark(), self.alarm.wait)
        self._exchange.computed()
        self._load_own()

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._step_made()
        return output

    @torch.no_grad()
    def _load_own(self) -> None:
        assert self._exchange is not None
        self._seen = self._exchange.model.read(self._flat)
        for (parameter, view), _ in self._views:
            parameter.copy_(view)

    @torch.no_grad()
    def _step_made(self) -> None:
        assert self._exchange is not None
        for _, (parameter, view) in self._views:
            view.copy_(parameter)
        self._exchange.model.move(self._flat, self._after, self._seen)
        self._fresh = True
        if not self._exchange.may_go_on():
            self._end_segment()

    # -------------------------------------------------------------------- all together

    def _end_segment(self) -> None:
        """All gradients are made: form the mean of all models."""
        assert self._exchange is not None and self.model is not None
        self._exchange.await_close(self._segment_end)
        self._made = self._segment_end
        mean = self._mean_model()
        own = [buffer.clone() for buffer in self.model.buffers()]
        self.average_buffers()
        pairs = zip(own, self.model.buffers(), strict=True)
        self._own_buffers = [mine.where(mine.isfinite(), mean) for mine, mean in pairs]
        if self.resync_every != "never":
            self._exchange.model.replace(mean)
            self._own_buffers = None
        if self._segment_end < self._epoch_end:
            self._begin_segment()
        else:
            self._end_epoch(mean)

    def _mean_model(self) -> Flat:
        """The mean of all ranks' models, and where they stood around it."""
        assert self._exchange is not None and self._main is not None
        own, mean = self._after, self._flat
        self._exchange.model.read(own)
        self._exchange.model.read(mean)
        square = torch.zeros(1, dtype=torch.float64)
        for model, total in zip(own, mean, strict=True):
            self._main.sum_(total.div_(self.world_size))
            square += (model - total).double().square().sum().cpu()
        self._main.sum_(square)
        ranks = self._main.gather_data(self._exchange.counts, Counts)
        self.tally = GossipTally(ranks, float(square / self.world_size) ** 0.5)
        return mean

    @torch.no_grad()
    def _end_epoch(self, mean: Flat) -> None:
        """The module holds the mean now, and Lightning is told that this was the last batch."""
        assert self.lightning_module is not None
        assert self._main is not None and self.model is not None
        for (parameter, view), _ in self._views:
            parameter.copy_(view)
        require_same(self._main, self._made, self.model.parameters())
        trainer = self.lightning_module.trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress
        progress.is_last_batch = True
        assert trainer.fit_loop._data_fetcher is not None
        trainer.fit_loop._data_fetcher.done = True
        trainer.val_check_batch = progress.current.ready
        self._in_epoch = False

    @torch.no_grad()
    def _restore_buffers(self, saved: list[Tensor]) -> None:
        assert self.model is not None
        for buffer, own in zip(self.model.buffers(), saved, strict=True):
            buffer.copy_(own)

    def check_meeting(self, what: str) -> None:
        if self._in_epoch:
            raise ConfigurationError(
                f"{what} inside the epoch would hang: with {type(self).__name__} the ranks "
                "make unequal numbers of steps; do it at the end of the epoch (on_epoch=True)"
            )


# ------------------------------------------------------------------------------ refusals


def check_fit(name: str, trainer: Trainer) -> None:
    """Refuse what counts steps, which differ between ranks here, or meets inside an epoch."""

    def refuse(what: str, instead: str) -> NoReturn:
        raise ConfigurationError(
            f"{name} does not work with {what}: ranks make unequal numbers of steps; {instead}"
        )

    if not trainer.fast_dev_run and trainer.max_steps != -1:
        refuse("max_steps", "use max_epochs, and `gradients_per_epoch` on the strategy")
    if trainer.min_steps is not None:
        refuse("min_steps", "use min_epochs")
    if trainer.val_check_interval != 1.0 or trainer.check_val_every_n_epoch is None:
        refuse("val_check_interval", "use check_val_every_n_epoch")
    for callback in trainer.callbacks:
        _check_callback(callback, refuse)


def _check_callback(callback: Any, refuse: Callable[[str, str], NoReturn]) -> None:
    if getattr(callback, "_every_n_train_steps", 0) or getattr(callback, "_train_time_interval", 0):
        refuse("checkpoints inside an epoch", "use ModelCheckpoint(every_n_epochs=...)")
    if type(callback).__name__ == "Timer" and getattr(callback, "_interval", "") == "step":
        refuse("max_time or a Timer per step", "use the callback Timer(..., interval='epoch')")
