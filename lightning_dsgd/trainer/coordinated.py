"""The shell of strategies whose ranks are joined by the control plane while they train.

It opens the control plane, says goodbye at the end, and after an error sees to it that the others
learn why and that no thread is left. What is exchanged meanwhile is the subclass's business.
"""

from __future__ import annotations

import abc
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
from torch.optim import Optimizer

import lightning_dsgd
from lightning_dsgd.backends import Backend, BackendName
from lightning_dsgd.backends.hosts import (
    ADDRESS,
    Place,
    control_address,
    leaves_host,
    this_place,
)
from lightning_dsgd.backends.seal import SECRET
from lightning_dsgd.control.cards import Card, check_cards, decode_card, encode_card
from lightning_dsgd.control.coordinator import Coordinator, Ticket
from lightning_dsgd.control.link import Control
from lightning_dsgd.errors import ConfigurationError, RunError
from lightning_dsgd.trainer.collective import CollectiveStrategy
from lightning_dsgd.trainer.course import Course
from lightning_dsgd.trainer.leaving import all_is_well
from lightning_dsgd.trainer.monitor import Monitor
from lightning_dsgd.trainer.refusals import (
    explain_missing_group,
    refuse_finder,
    refuse_optimizer_index,
)
from lightning_dsgd.trainer.telling import say
from lightning_dsgd.trainer.worlds import Trainer
from lightning_dsgd.workers.algorithm import Algorithm
from lightning_dsgd.workers.messages import Departed

NO_SECRET = (
    "ranks on several hosts trust the network they meet in; give all of them a secret to know each "
    f"other by ({SECRET}, see SECURITY.md)"
)
_trainings = 0
"""How often this process has met the others."""
_ALIKE_SECONDS = 1.0
"""A mistake is usually found by all ranks, and each is to show its own error: so who finds it
waits so long before it tells the others."""
_FILE_SECONDS = 5.0
"""So long, at most, a rank waits after an error for a checkpoint that rank 0 may write."""
_LAST_WORD_SECONDS = 0.3
"""What the coordinator's last message needs to leave before its port closes."""


class CoordinatedStrategy(Algorithm, CollectiveStrategy):
    """Base of all three exchanges' strategies."""

    def __init__(self, *, backend: BackendName = "auto", timeout: float = 300.0) -> None:
        super().__init__(backend=backend, timeout=timeout)
        self._coordinator: Coordinator | None = None
        self._control: Control | None = None
        self._failed_at = 0.0
        self.course = Course(type(self).__name__)

    # -------------------------------------------------------- what an exchange defines

    @abc.abstractmethod
    def start_exchange(self, trainer: Trainer) -> None:
        """Connect the control plane and start the communication thread; collective."""

    @abc.abstractmethod
    def close_exchange(self) -> None:
        """End the exchange's thread, if it runs; no operation is under way any more."""

    def settle(self) -> None:
        """All ranks have stopped training: see to it that nothing more is exchanged."""
        return

    def end_epoch(self) -> None:
        """The last step of an epoch is done; collective."""
        return

    def agree(self) -> None:
        """Before validation, a checkpoint and the end: all ranks hold the same; collective."""
        return

    def logged_values(self) -> dict[str, float]:
        """The latest step in numbers, for loggers."""
        return {}

    def epoch_values(self) -> dict[str, float]:
        """The epoch in numbers, for loggers."""
        return {}

    def checkpoint_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside Lightning's own; collective, and rank 0's is written."""
        return {}

    def busy(self) -> bool:
        return self._control is not None or super().busy()

    # ------------------------------------------------- a step holds one exchange

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().training_step(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError(
                "training_step has raised StopIteration, which Lightning would take for the end of "
                "this rank's data; catch it there, or give `next` a default"
            ) from error

    def leave_epoch(self, version: int) -> None:
        """Let the coordinator know: the others are to leave it after the same update."""
        self.control.announce(Departed(self.global_rank, version))

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """What `backward` does within it is this step's exchange."""
        module: Any = model or self.lightning_module  # of either copy of Lightning
        with self.course.step():
            return self.precision_plugin.optimizer_step(
                optimizer, model=module, closure=closure, **kwargs
            )

    # ------------------------------------------------------------------ start and end

    def check_trainer(self, trainer: Trainer) -> None:
        super().check_trainer(trainer)
        module = self.lightning_module
        if trainer.state.fn != "fit" or module is None:
            return
        refuse_optimizer_index(module)
        if not module.automatic_optimization:
            raise ConfigurationError(
                f"{type(self).__name__} needs automatic optimization; remove "
                "`automatic_optimization = False` from the module"
            )

    def setup_optimizers(self, trainer: Trainer) -> None:
        problem = ConfigurationError(
            f"{type(self).__name__} works with one optimizer; put all parameters into the groups "
            "of one in `configure_optimizers`"
        )
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" in str(error):
                raise problem from None
            raise
        if len(self.optimizers) != 1:
            raise problem

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        refuse_finder(trainer, self)
        if not any(isinstance(callback, Monitor) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, Monitor())

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.agree()
        return super().lightning_module_state_dict()

    @property
    def control(self) -> Control:
        """This rank's link to the control plane, from its start to its end."""
        assert self._control is not None
        return self._control

    def join(self, backend: Backend) -> None:
        """Bring the control plane up: whoever fails from now on takes the others along."""
        global _trainings
        _trainings += 1
        keys = zmq.curve_keypair()
        cards = [decode_card(card) for card in backend.introduce(encode_card(self._card(keys[0])))]
        check_cards(cards)
        self._coordinator = self._open_coordinator(cards) if self.is_global_zero else None
        own = self._coordinator.ticket if self._coordinator is not None else None
        ticket, *_ = backend.introduce(msgspec.msgpack.encode(own))
        self._control = Control(_ticket(ticket), self.global_rank, self.alarm, keys)
        self._control.await_welcome()
        if not backend.seal and self.is_global_zero and leaves_host(self._address(cards)):
            say(NO_SECRET)

    def _card(self, key: bytes) -> Card:
        environment, module = self.cluster_environment, self.lightning_module
        assert environment is not None
        place = this_place(environment.main_address)
        return Card(
            version=lightning_dsgd.__version__,
            trainings=_trainings,
            doing=str(module.trainer.state.fn) if module is not None else "",
            task=_task(module),
            strategy=self.strategy_name or type(self).__name__,
            arguments=repr({name: _plain(value) for name, value in self.alike().items()}),
            network=place.network,
            address=place.address,
            key=key,
        )

    def alike(self) -> dict[str, Any]:
        """Arguments that must be the same on all ranks: they decide when ranks meet, too."""
        return {**self.arguments(), "timeout": self.timeout}

    def _address(self, cards: Sequence[Card]) -> str:
        places = [Place(card.network, card.address) for card in cards]
        return control_address(places[self.global_rank], places)

    def _open_coordinator(self, cards: Sequence[Card]) -> Coordinator | None:
        with contextlib.suppress(zmq.ZMQError):  # the port; what to do about it is said later
            coordinator = Coordinator(
                [card.key for card in cards],
                self._address(cards),
                timeout=self.timeout,
                warn=say,
            )
            coordinator.start()
            return coordinator
        return None

    def finish(self) -> None:
        """After the last update: end the exchange together."""
        if self._main is None or self._control is None:
            return
        self._main.barrier()
        self.settle()
        self._main.barrier()
        self.close_exchange()
        if self._coordinator is not None:
            self._coordinator.end()
        all_is_well()

    def teardown(self) -> None:
        """The Trainer's function is over: a rank that goes is no loss any more."""
        if self._control is not None:
            self._control.leave()
            self._disconnect()
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the others, and meet them no more: what callbacks do from now on is done alone."""
        explain_missing_group(exception, self)
        self._failed_at = time.time()
        control = self._control
        if control is not None:
            if isinstance(exception, Exception) and not isinstance(exception, RunError):
                time.sleep(_ALIKE_SECONDS)
            ours = exception is not control.told and not self._ended_by_launcher(exception)
            control.leave(f"{type(exception).__name__}: {exception}" if ours else None)
            if self.is_global_zero:
                time.sleep(_LAST_WORD_SECONDS)
        elif self._backend is not None and exception is not self._reported:
            self._backend.give_word(exception)
        super().on_exception(exception)
        if self._backend is not None:
            # the communication thread must leave its collective before its socket is closed
            self.alarm.ring(RunError(f"rank {self.global_rank} ends after an error of its own"))
            self._disconnect(failed=True)
            self._main = None

    def _ended_by_launcher(self, exception: BaseException) -> bool:
        """A launcher that has lost a rank ends the others; the lost one may become known only now,
        and those who are ended are not to blame."""
        if type(exception).__name__ != "SIGTERMException":  # of either copy of Lightning
            return False
        return self.alarm.wait(_ALIKE_SECONDS) and self.control.told is not None

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """After an error ranks do not meet, but who goes on may want what rank 0 has written."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._reported is not None and not self.is_global_zero:
            deadline, size = time.monotonic() + _FILE_SECONDS, 0
            while (found := self._written(filepath)) != size or not found:
                if time.monotonic() > deadline:
                    break
                size = found
                time.sleep(_FILE_SECONDS / 100)

    def _written(self, file: Any) -> int:
        """Bytes of it; an earlier failure may have left one of that name, and clocks differ."""
        with contextlib.suppress(OSError):
            found = os.stat(file)
            return found.st_size if found.st_mtime > self._failed_at - _FILE_SECONDS else 0
        return 0

    def _disconnect(self, failed: bool = False) -> None:
        self.close_exchange()
        control, coordinator = self._control, self._coordinator
        self._control = self._coordinator = None
        if control is not None:
            control.close()
        if coordinator is not None:
            coordinator.stop(failed=failed)


def _task(module: Any) -> str:
    """What of it must be the same on all ranks, or they would wait for each other."""
    if module is None:
        return ""
    loop = module.trainer.fit_loop
    limits = f"max_epochs={loop.max_epochs}, max_steps={loop.max_steps}"
    return f"{type(module).__name__}, {limits}"


def _plain(value: object) -> object:
    """An object of somebody's own may show where it lies in memory: its type has to do."""
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else value


def _ticket(card: bytes) -> Ticket:
    """Rank 0's, or what to do where it could not make one."""
    ticket = msgspec.msgpack.decode(card, type=Ticket | None)
    if ticket is None:
        raise ConfigurationError(
            "rank 0 cannot listen at an address that the other hosts reach; set "
            f"{ADDRESS} to one of its host's"
        )
    return ticket
