"""Lightning's view of the device: `Trainer(accelerator="lag")` once this is imported."""

from __future__ import annotations

from typing import Any

import torch

import tests.lag as lag
from tests.ranks.lightning_copy import pl


class LagAccelerator(pl.accelerators.Accelerator):  # type: ignore[misc]  # either copy's
    """One device per process, however many processes there are."""

    def setup_device(self, device: torch.device) -> None:
        if device.type != "lag":
            raise ValueError(f"this accelerator is for lag, not for {device}")
        lag.set_device(device)

    def teardown(self) -> None:
        lag.empty_cache()

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {"allocated_bytes": lag.memory_allocated()}

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return 1 if devices in ("auto", -1, "-1") else int(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("lag", 0)] * LagAccelerator.parse_devices(devices)

    @staticmethod
    def auto_device_count() -> int:
        return lag.device_count()

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "lag"


pl.accelerators.AcceleratorRegistry.register(
    "lag", LagAccelerator, description="The test device", override=True
)
