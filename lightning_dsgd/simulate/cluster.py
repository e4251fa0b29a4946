"""A cluster as the simulator sees it: how long computing, exchanging and telling take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped]  # ships no types

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.simulate.delays import Delays
from lightning_dsgd.simulate.distributions import (
    ComputeTime,
    Constant,
    Empirical,
    PerRank,
    Seconds,
    Sum,
    parse_compute_time,
)

EXCHANGES = ("all_reduce", "broadcast", "pair")


@dataclass(frozen=True)
class Link:
    """One kind of exchange: a start-up time, and a time per byte."""

    latency: float = 0.0
    bandwidth: float = float("inf")
    """Bytes per second of the model's gradient, the algorithm's own factor included."""

    def seconds(self, size: float) -> float:
        """How long this many bytes take."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Network:
    """What each kind of exchange costs."""

    all_reduce: Link = field(default_factory=Link)
    broadcast: Link = field(default_factory=Link)
    pair: Link = field(default_factory=Link)


@dataclass(frozen=True)
class Cluster:
    """Workers, their compute times and what lies between them."""

    workers: int
    compute: ComputeTime
    network: Network = field(default_factory=Network)
    size: float = 0.0
    """Bytes of one gradient."""
    control: float = 0.0
    """One way between a worker and the coordinator, in seconds."""
    overhead: float = 0.0
    """What a worker does between two mini-batches, such as its optimizer step, in seconds."""
    stragglers: Delays | None = None
    """What slows workers: the callback `Stragglers`, or its rules alone."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigurationError(f"workers={self.workers} must be at least 1")

    @property
    def times(self) -> ComputeTime:
        """Compute times with what the stragglers callback adds to them."""
        if self.stragglers is None:
            return self.compute
        return slowed(self.compute, self.stragglers, self.workers)

    def exchange(self, kind: str) -> float:
        """Seconds of one exchange of a whole gradient."""
        link: Link = getattr(self.network, kind)
        return link.seconds(self.size)

    def with_workers(self, workers: int) -> Cluster:
        """The same machines, more or fewer of them."""
        return replace(self, workers=workers)


def slowed(base: ComputeTime, stragglers: Delays, workers: int) -> PerRank:
    """Each rank's compute time under the callback's rules.

    The callback draws its random pairs for all ranks together; here each rank is drawn with the
    same chance on its own, two in `workers`.
    """
    in_pair = min(2, workers)
    pairs = [
        Empirical((seconds,) * in_pair + (0.0,) * (workers - in_pair))
        for seconds in stragglers.pairs
    ]
    models: dict[int, ComputeTime] = {}
    for rank in range(workers):
        own = base.for_rank(rank).scaled(stragglers.factor_of(rank, workers))
        delays = stragglers.delays_of(rank, workers)
        models[rank] = Sum((own, *delays, *pairs)) if delays or pairs else own
    return PerRank(base, models=models)


class Draws:
    """Compute times by rank, drawn in blocks because one draw at a time is ten times dearer."""

    def __init__(self, model: ComputeTime, workers: int, rng: np.random.Generator) -> None:
        self._model = model
        self._rng = rng
        self._block = max(8, min(256, 1_000_000 // workers))
        block: Seconds = model.sample_ranks(rng, workers, self._block)
        self._left: list[list[float]] = block.tolist()

    def next(self, worker: int) -> float:
        """This worker's next mini-batch."""
        left = self._left[worker]
        if not left:
            left.extend(self._model.for_rank(worker).sample(self._rng, self._block).tolist())
        return left.pop()


# ------------------------------------------------------------------------------ from YAML


@dataclass(frozen=True)
class Description:
    """A cluster file: the cluster, the worker counts to look at, and what is known of the loss."""

    cluster: Cluster
    workers: tuple[int, ...]
    loss: Mapping[str, Any] | None = None
    target: float | None = None


_KEYS = (
    "workers",
    "compute",
    "stragglers",
    "bytes",
    "network",
    "control",
    "overhead",
    "loss",
    "target",
)


def read_cluster(path: str | Path) -> Description:
    """A cluster file; every error names the file and the key."""
    file = Path(path)
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} is not YAML: {_one_line(error)}") from None
    if not isinstance(content, Mapping):
        raise ConfigurationError(f"{file} describes no cluster; it needs workers and compute")
    try:
        return describe(content)
    except ConfigurationError as error:
        raise ConfigurationError(f"{file}: {error}") from None


def describe(content: Mapping[str, Any]) -> Description:
    """A cluster from the mapping that a cluster file holds."""
    unknown = sorted(str(key) for key in content if key not in _KEYS)
    if unknown:
        raise ConfigurationError(f"unknown key {unknown[0]!r}; known: {', '.join(_KEYS)}")
    missing = [key for key in ("workers", "compute") if key not in content]
    if missing:
        raise ConfigurationError(f"{missing[0]} is missing")
    counts = _counts(content["workers"])
    cluster = Cluster(
        workers=counts[0],
        compute=parse_compute_time(content["compute"]),
        network=_network(content.get("network", {})),
        size=_at_least_zero("bytes", content.get("bytes", 0)),
        control=_at_least_zero("control", content.get("control", 0)),
        overhead=_at_least_zero("overhead", content.get("overhead", 0)),
        stragglers=_stragglers(content.get("stragglers")),
    )
    loss = content.get("loss")
    if loss is not None and not isinstance(loss, Mapping):
        raise ConfigurationError(
            f"loss must be a mapping such as {{start: 2.3, rate: 0.01}}: {loss}"
        )
    target = content.get("target")
    return Description(cluster, counts, loss, None if target is None else _number("target", target))


def _stragglers(rules: object) -> Delays | None:
    """The callback's own rules, written as in a Trainer's configuration."""
    if rules is None:
        return None
    if not isinstance(rules, list) or not all(isinstance(rule, Mapping) for rule in rules):
        raise ConfigurationError(
            f"stragglers must be a list such as [{{kind: slow, rank: 3, factor: 10}}]: {rules!r}"
        )
    return Delays(rules)


def constant_cluster(workers: int, seconds: float) -> Cluster:
    """Equal workers, free communication: the simplest thing to compare with."""
    return Cluster(workers, Constant(seconds))


def _counts(value: object) -> tuple[int, ...]:
    counts = value if isinstance(value, list) else [value]
    for count in counts:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigurationError(f"workers must be a count or a list of counts, not {value!r}")
    if not counts:
        raise ConfigurationError("workers is an empty list")
    return tuple(counts)


def _network(value: object) -> Network:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"network must map {', '.join(EXCHANGES)}, not {value!r}")
    unknown = sorted(str(key) for key in value if key not in EXCHANGES)
    if unknown:
        raise ConfigurationError(
            f"network: unknown exchange {unknown[0]!r}; known: {', '.join(EXCHANGES)}"
        )
    return Network(**{kind: _link(kind, link) for kind, link in value.items()})


def _link(kind: str, value: object) -> Link:
    """Latency and bandwidth, or a plain number of seconds."""
    if not isinstance(value, Mapping):
        return Link(latency=_at_least_zero(f"network.{kind}", value))
    unknown = sorted(str(key) for key in value if key not in ("latency", "bandwidth"))
    if unknown:
        raise ConfigurationError(
            f"network.{kind}: unknown {unknown[0]!r}; known: latency, bandwidth"
        )
    latency = _at_least_zero(f"network.{kind}.latency", value.get("latency", 0))
    bandwidth = _number(f"network.{kind}.bandwidth", value.get("bandwidth", "inf"))
    if not bandwidth > 0.0:
        raise ConfigurationError(f"network.{kind}.bandwidth must be above 0, not {bandwidth}")
    return Link(latency, bandwidth)


def _at_least_zero(key: str, value: object) -> float:
    number = _number(key, value)
    if not 0.0 <= number < float("inf"):
        raise ConfigurationError(f"{key} must be finite and not negative, not {value}")
    return number


def _number(key: str, value: object) -> float:
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    raise ConfigurationError(f"{key} must be a number, not {value!r}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
