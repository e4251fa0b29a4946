"""Where configurations of earlier versions look for `lightning_dsgd.WeightDecayWarmup`."""

from __future__ import annotations

from lightning_dsgd.trainer.warmup import WeightDecayWarmup

__all__ = ["WeightDecayWarmup"]
