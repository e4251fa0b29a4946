"""torchmetrics looks for torch.distributed's default group; here it is shown our collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_dsgd.trainer.collective import CollectiveStrategy


class _OtherRanks:
    """What a metric asks about the other ranks.

    A copy of the metric, in memory or in a file, knows of none until a Trainer takes it: it would
    hold the strategy otherwise.
    """

    def __init__(self, strategy: CollectiveStrategy | None = None) -> None:
        self._strategy = strategy

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    def available(self) -> bool:
        return self._strategy is not None and self._strategy.is_distributed

    def gather(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        assert self._strategy is not None and self._strategy._main is not None
        self._strategy.check_meeting("a metric's synchronisation, as with dist_sync_on_step=True,")
        return self._strategy._main.gather_tensors(tensor)


def connect_metrics(model: nn.Module, strategy: CollectiveStrategy) -> None:
    """Let every metric in the module meet the other ranks by our collectives."""
    from torchmetrics import Metric

    others = _OtherRanks(strategy)
    for module in model.modules():
        if isinstance(module, Metric):
            module.distributed_available_fn = others.available
            module.dist_sync_fn = others.gather
