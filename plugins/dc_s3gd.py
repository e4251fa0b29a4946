"""DC-S3GD: delay-compensated stale-synchronous SGD.

A. Rigazzi: "DC-S3GD: Delay-Compensated Stale-Synchronous SGD for Large-Scale Decentralized Neural
Network Training", arXiv 1911.02516.

Each worker makes its own step and goes on computing from where that led, while an all-reduce
averages the steps of all. When it ends, the worker moves by D (mean step minus own step) to the
common point. Its gradient, computed before the move, is corrected to first order, with the Hessian
approximated by the gradient's own outer product, diagonal only:

    g + λ g⊙g⊙D,    λ = λ₀ ‖g‖ / ‖g⊙g⊙D‖

so the correction is always λ₀ times as long as the gradient, and absent where D = 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from lightning_dsgd.backends import BackendName
from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.exchange.finite import NonFinite
from lightning_dsgd.exchange.pipeline import Wire
from lightning_dsgd.exchange.points import Points, largest, length
from lightning_dsgd.trainer.pipeline import PipelineStrategy
from lightning_dsgd.workers.policy import RoundsPolicy
from lightning_dsgd_plugins.k_family import FirstKPolicy

LambdaScope = Literal["model", "tensor"]


class ArrivalsPolicy(FirstKPolicy):
    """Counts who has come to an exchange; who brings a step of zero has come, too."""

    refuses_nonfinite = False


class DCS3GDStrategy(PipelineStrategy):
    """Stale-synchronous SGD: the all-reduce hides behind the next gradient, which is corrected.

    Args:
        lambda0: Length of the correction relative to the gradient's; 0 is plain stale-synchronous
            SGD.
        lambda_scope: 'model' takes the norms over the whole gradient, as the paper's formula reads;
            'tensor' over each parameter by itself, so that all layers are corrected by one share.
        wire: What travels: 'full' precision, or the steps rounded to 'bf16' or 'fp16'.
        backend: Collectives: 'horovod', 'torch', or 'auto' for what the launcher implies.
        timeout: Seconds after which a rank that does not come or answer ends the run, by name.
        nonfinite: When a rank's gradient holds a NaN or an infinity: 'raise' ends the run on all
            ranks, by name; 'drop' has the rank give a step of zero; 'ignore' looks for none.
    """

    paper = "Rigazzi 2019, arXiv 1911.02516"
    strategy_name = "dc_s3gd"
    plainness = 7
    corrects_staleness = True
    summary = "all-reduce of the last step hides behind the next gradient, which is then corrected"

    def __init__(
        self,
        lambda0: float = 0.2,
        lambda_scope: LambdaScope = "model",
        wire: Wire = "full",
        backend: BackendName = "auto",
        timeout: float = 300.0,
        nonfinite: NonFinite = "raise",
    ) -> None:
        if isinstance(lambda0, bool) or not 0 <= lambda0 < float("inf"):
            raise ConfigurationError(f"lambda0={lambda0!r} must be a finite number, 0 or more")
        if lambda_scope not in ("model", "tensor"):
            raise ConfigurationError(
                f"lambda_scope={lambda_scope!r} is unknown; choose 'model' or 'tensor'"
            )
        super().__init__(wire=wire, backend=backend, timeout=timeout, nonfinite=nonfinite)
        self.lambda0 = float(lambda0)
        self.lambda_scope = lambda_scope
        self._lambdas: list[Tensor] = []

    def make_policy(self, workers: int, *, version: int = 0) -> RoundsPolicy:
        """Counts who has come to an exchange, for the tally and for time-outs."""
        return ArrivalsPolicy(workers, workers, version=version)

    def correct(self, points: Points, precision: float) -> None:
        parts = points.corrigible()
        if any(gradient.is_sparse for gradient, _, _ in parts):
            raise ConfigurationError(
                "DC-S3GD works on dense gradients; make the embedding with sparse=False"
            )
        if self.lambda0 == 0 or not parts:
            self._lambdas = []
            return
        # λ would blow rounding errors up to a correction of full length
        lambda0 = self.lambda0 * points.moved(precision).double()
        pieces = [parts] if self.lambda_scope == "model" else [[part] for part in parts]
        self._lambdas = [compensate(piece, lambda0) for piece in pieces]

    def step_values(self) -> dict[str, Tensor]:
        if not self._lambdas:
            return {"lambda": torch.zeros((), device=self.root_device)}
        return {"lambda": torch.stack(self._lambdas).mean()}


@torch.no_grad()
def compensate(parts: Iterable[tuple[Tensor, Tensor, Tensor]], lambda0: Tensor | float) -> Tensor:
    """Add λ g⊙g⊙D to a gradient, in place, and give λ back; 0 if there is nothing to correct.

    Args:
        parts: The gradient g, piece by piece, with the distance D and room for as many numbers.
        lambda0: Length of the correction relative to g.
    """
    gradients, distances, rooms = (list(column) for column in zip(*parts, strict=True))
    # a product of three small numbers may vanish, so both factors are scaled to a maximum of 1
    scale_g, scale_d = _or_one(largest(gradients)), _or_one(largest(distances))
    for gradient, distance, room in zip(gradients, distances, rooms, strict=True):
        torch.div(gradient, scale_g, out=room).square_().mul_(distance).div_(scale_d)
    norm = length(rooms)
    factor = torch.where(norm > 0, lambda0 * length(gradients) / _or_one(norm), 0.0)
    for gradient, room in zip(gradients, rooms, strict=True):
        gradient.add_(room.mul_(factor))
    return factor.double() / scale_g.double() ** 2 / scale_d.double()


def _or_one(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))
