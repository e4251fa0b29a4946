"""Lightning comes under two import names with separate classes; ours belong to both.

`lightning.pytorch` and `pytorch_lightning` are copies of one code base, each with its own registry
and base classes, and a Trainer of one refuses a strategy of the other. A class that inherits from
the bases of every copy installed is accepted by all, whichever the user imports and in whatever
order.

Being accepted is not enough: one copy's code does not recognise the other's modules, schedulers,
plugins and launchers, and raises errors that the user's `except` does not know. So a strategy
*follows* one copy, and has each inherited method and property from that one. Which, it learns when
a Trainer takes it, and gives it the accelerator first of all; until then nothing but `__init__` has
run. The choice is made at each access, by the object: its class stays the one that users name, in
`type(...)`, in `isinstance`, in YAML and in a pickle.

Callbacks and launch environments need none of that: what they inherit does nothing, or looks at no
other class of Lightning's.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from abc import ABCMeta
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any


def installed_copies() -> list[str]:
    """The import names of Lightning found on this machine."""
    names = {"pytorch_lightning": "pytorch_lightning", "lightning": "lightning.pytorch"}
    return [module for top, module in names.items() if importlib.util.find_spec(top) is not None]


def _in_every_copy(submodule: str, name: str) -> dict[str, type]:
    copies = installed_copies()
    if not copies:
        raise ImportError("neither pytorch_lightning nor lightning is installed")
    return {c: getattr(importlib.import_module(f"{c}.{submodule}"), name) for c in copies}


def of_every_copy(submodule: str, name: str) -> Any:
    """A base class that inherits from this name in every copy of Lightning."""
    bases = tuple(_in_every_copy(submodule, name).values())
    return bases[0] if len(bases) == 1 else type(name, bases, {"__module__": __name__})


# ------------------------------------------------------------------------ following a copy


def _copy_of(thing: object, copies: Iterable[str]) -> str | None:
    """Whose class this is, or is derived from."""
    modules = [cls.__module__ for cls in type(thing).__mro__]
    found = (c for c in copies if any(module.startswith(f"{c}.") for module in modules))
    return next(found, None)


class _Chosen:
    """An attribute of Lightning's class, from the copy that the object at hand follows."""

    def __init__(self, name: str, bases: dict[str, type]) -> None:
        self._name = name
        self._first = next(iter(bases))
        self._found = {
            copy: inspect.getattr_static(base, name)
            for copy, base in bases.items()
            if hasattr(base, name)
        }
        found = self._found.values()
        self.__isabstractmethod__ = any(getattr(f, "__isabstractmethod__", False) for f in found)

    def of(self, thing: object) -> Any:
        """Copies of different versions may not have the same attributes."""
        copy = getattr(thing, "_follows", self._first)
        if copy not in self._found:
            raise AttributeError(f"{copy}'s strategies have no attribute {self._name!r}")
        return self._found[copy]

    def __get__(self, thing: object, owner: type | None = None) -> Any:
        found = self.of(thing)
        return found.__get__(thing, owner) if hasattr(found, "__get__") else found


class _ChosenProperty(_Chosen):
    """One that can be set, too."""

    def __set__(self, thing: object, value: object) -> None:
        self.of(thing).__set__(thing, value)


_SPECIAL = ("__init__", "__getstate__", "__setstate__")


def _chosen(bases: dict[str, type]) -> dict[str, _Chosen]:
    """Every attribute of these classes, left to the object."""
    names = {name for base in bases.values() for name in dir(base)}
    plain = (n for n in names if n in _SPECIAL or not n.startswith(("__", "_abc_")))
    return {name: _choice(name, bases) for name in sorted(plain)}


def _choice(name: str, bases: dict[str, type]) -> _Chosen:
    settable = any(isinstance(inspect.getattr_static(b, name, 0), property) for b in bases.values())
    return (_ChosenProperty if settable else _Chosen)(name, bases)


def _strategy_base() -> Any:
    """Lightning's `ParallelStrategy`, of the copy that the Trainer is of."""
    bases = _in_every_copy("strategies", "ParallelStrategy")
    if len(bases) == 1:
        return next(iter(bases.values()))

    def attach(self: Any, accelerator: Any) -> None:
        copy = _copy_of(accelerator, bases)
        if copy is not None and copy != self._follows:
            self._follows = copy
            bases[copy].__init__(  # type: ignore[misc]  # what the other copy's has made goes
                self,
                parallel_devices=self._parallel_devices,
                cluster_environment=self.cluster_environment,
                checkpoint_io=self._checkpoint_io,
                precision_plugin=self._precision_plugin,
            )
        self._accelerator = accelerator

    taken = property(lambda self: self._accelerator, attach, doc="Set by the Trainer, first of all")
    own = {"accelerator": taken, "_follows": next(iter(bases)), "__module__": __name__}
    return ABCMeta("ParallelStrategy", tuple(bases.values()), {**_chosen(bases), **own})


def launcher_for(strategy: object) -> Any:
    """The class that starts further processes; on Ctrl+C the Trainer looks for its own copy's."""
    copy = getattr(strategy, "_follows", None) or installed_copies()[0]
    module = importlib.import_module(f"{copy}.strategies.launchers.subprocess_script")
    return module._SubprocessScriptLauncher


if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule
    from pytorch_lightning.plugins.environments import LightningEnvironment
    from pytorch_lightning.strategies import ParallelStrategy

    Trainer = Any  # half of its attributes are set by connectors, out of a type checker's sight
else:
    Callback = of_every_copy("callbacks", "Callback")
    ParallelStrategy = _strategy_base()
    LightningEnvironment = of_every_copy("plugins.environments", "LightningEnvironment")
    LightningModule = Trainer = Any

__all__ = [
    "Callback",
    "LightningEnvironment",
    "LightningModule",
    "ParallelStrategy",
    "Trainer",
    "installed_copies",
    "launcher_for",
    "of_every_copy",
]
