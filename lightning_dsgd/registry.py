"""The installed algorithms, found by entry point. No Lightning here: see `trainer.names`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from lightning_dsgd.errors import ConfigurationError

GROUP = "lightning_dsgd.algorithms"


def algorithms() -> dict[str, EntryPoint]:
    """Every installed algorithm by name, third parties' included."""
    return {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda p: p.name)}


def load(name: str) -> type[Any]:
    """The strategy class of that name; an unknown one is refused with the choices."""
    known = algorithms()
    if name not in known:
        raise ConfigurationError(f"unknown algorithm {name!r}; installed: {', '.join(known)}")
    cls: type[Any] = known[name].load()
    return cls
