"""Lightning comes under two import names with separate classes; ours belong to both.

`lightning.pytorch` and `pytorch_lightning` are copies of one code base, each with its own registry
and base classes, and a Trainer of one refuses a strategy of the other. A class that inherits from
the bases of every copy installed is accepted by all, whichever the user imports and in whatever
order.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any


def installed_copies() -> list[str]:
    """The import names of Lightning found on this machine."""
    names = {"pytorch_lightning": "pytorch_lightning", "lightning": "lightning.pytorch"}
    return [module for top, module in names.items() if importlib.util.find_spec(top) is not None]


def _in_every_copy(submodule: str, name: str) -> tuple[type, ...]:
    modules = [importlib.import_module(f"{copy}.{submodule}") for copy in installed_copies()]
    return tuple(getattr(module, name) for module in modules)


def of_every_copy(submodule: str, name: str) -> Any:
    """A base class that inherits from this name in every copy of Lightning."""
    bases = _in_every_copy(submodule, name)
    if not bases:
        raise ImportError("neither pytorch_lightning nor lightning is installed")
    return bases[0] if len(bases) == 1 else type(name, bases, {"__module__": __name__})


if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule
    from pytorch_lightning.plugins.environments import LightningEnvironment
    from pytorch_lightning.strategies import ParallelStrategy
    from pytorch_lightning.strategies.launchers.subprocess_script import (
        _SubprocessScriptLauncher as SubprocessLauncher,
    )

    Trainer = Any  # half of its attributes are set by connectors, out of a type checker's sight
else:
    Callback = of_every_copy("callbacks", "Callback")
    ParallelStrategy = of_every_copy("strategies", "ParallelStrategy")
    LightningEnvironment = of_every_copy("plugins.environments", "LightningEnvironment")
    SubprocessLauncher = _in_every_copy(
        "strategies.launchers.subprocess_script", "_SubprocessScriptLauncher"
    )[0]  # no Trainer looks at its class
    LightningModule = Trainer = Any

__all__ = [
    "Callback",
    "LightningEnvironment",
    "LightningModule",
    "ParallelStrategy",
    "SubprocessLauncher",
    "Trainer",
    "installed_copies",
    "of_every_copy",
]
