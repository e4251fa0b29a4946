"""The shell of strategies whose ranks are joined by the control plane while they train.

It opens the control plane, says goodbye at the end, and after an error sees to it that the others
learn why and that no thread is left. What is exchanged meanwhile is the subclass's business.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable
from typing import Any

import zmq
from torch.optim import Optimizer

from lightning_dsgd.backends import BackendName
from lightning_dsgd.control import Control
from lightning_dsgd.coordinator import Coordinator
from lightning_dsgd.errors import ConfigurationError, RunError
from lightning_dsgd.hosts import ADDRESS, control_address
from lightning_dsgd.monitor import Monitor
from lightning_dsgd.policy import Policy
from lightning_dsgd.refusals import refuse_finder
from lightning_dsgd.strategy import CollectiveStrategy, all_is_well
from lightning_dsgd.telling import say
from lightning_dsgd.trace import TraceWriter
from lightning_dsgd.worlds import Trainer

_LAST_WORD_SECONDS = 0.3
"""What the coordinator's last message needs to leave before its port closes."""


class CoordinatedStrategy(CollectiveStrategy):
    """Base of all three exchanges' strategies."""

    def __init__(self, *, backend: BackendName = "auto", timeout: float = 300.0) -> None:
        super().__init__(backend=backend, timeout=timeout)
        self._coordinator: Coordinator | None = None
        self._control: Control | None = None
        self._stepping = False
        self._exchanged = False

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

    # ------------------------------------------------- a step holds one exchange

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """What `backward` does within it is this step's exchange."""
        module: Any = model or self.lightning_module  # of either copy of Lightning
        self._stepping, self._exchanged = True, False
        try:
            output = self.precision_plugin.optimizer_step(
                optimizer, model=module, closure=closure, **kwargs
            )
        finally:
            self._stepping = False
        if not self._exchanged:
            raise self._no_exchange()
        return output

    def mark_exchange(self) -> None:
        """The step's gradient is complete and exchanged: that happens once."""
        if self._exchanged:
            raise ConfigurationError(
                f"the optimizer evaluates the loss several times per step, and "
                f"{type(self).__name__} exchanges one gradient per step; use another optimizer"
            )
        self._exchanged = True

    def check_step(self) -> None:
        """After a batch that ends with a step: a gradient of its own would part the ranks."""
        if not self._exchanged:
            raise self._no_exchange()
        self._exchanged = False

    def _no_exchange(self) -> ConfigurationError:
        return ConfigurationError(
            f"{type(self).__name__} exchanges gradients while the optimizer steps, and here it has "
            "not: let the module's `optimizer_step` call "
            "`optimizer.step(closure=optimizer_closure)`, for every batch"
        )

    # ------------------------------------------------------------------ start and end

    def check_trainer(self, trainer: Trainer) -> None:
        super().check_trainer(trainer)
        module = self.lightning_module
        if trainer.state.fn == "fit" and module is not None and not module.automatic_optimization:
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

    def connect_control(self, policy: Policy | None, trace: TraceWriter | None = None) -> Control:
        """Join the control plane; collective. Rank 0 brings the policy, the others None."""
        assert self._main is not None
        places, address = self.places(), ""
        if policy is not None:
            address = control_address(places[self.global_rank], places)
            with contextlib.suppress(zmq.ZMQError):  # the port; what to do about it follows
                self._coordinator = Coordinator(
                    policy, self.world_size, address, timeout=self.timeout, trace=trace, warn=say
                )
                self._coordinator.start()
        ticket = self._coordinator.ticket if self._coordinator is not None else None
        ticket, address = self._main.broadcast_object((ticket, address))
        if ticket is None:
            raise ConfigurationError(
                f"rank 0 cannot listen at {address or 'any address that other hosts reach'}; set "
                f"{ADDRESS} to an address of its host that the other hosts reach"
            )
        self._control = Control(ticket, self.global_rank, self.alarm)
        return self._control

    def finish(self) -> None:
        """After the last update: say goodbye together, then end the threads."""
        if self._control is None:
            return
        assert self._main is not None
        self._main.barrier()
        self.settle()
        self._control.leave()
        self._main.barrier()
        self._disconnect()
        all_is_well()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the others, and meet them no more: what callbacks do from now on is done alone."""
        control = self._control
        if control is not None:
            ours = exception is not control.told
            control.leave(f"{type(exception).__name__}: {exception}" if ours else None)
            if self.is_global_zero:
                time.sleep(_LAST_WORD_SECONDS)
        super().on_exception(exception)
        if control is not None:
            # the communication thread must leave its collective before its socket is closed
            self.alarm.ring(RunError(f"rank {self.global_rank} ends after an error of its own"))
            self._disconnect()
            self._main = None

    def _disconnect(self) -> None:
        self.close_exchange()
        control, coordinator = self._control, self._coordinator
        self._control = self._coordinator = None
        if control is not None:
            control.close()
        if coordinator is not None:
            coordinator.stop()
