"""How long a mini-batch takes: the compute-time models of the simulator and of `Stragglers`.

NumPy only, no torch: a plan must not need a training environment. A model is immutable and holds no
random state; whoever samples brings the generator, so one seed decides a whole run.

A model is written as a number of seconds, as a short string, or as a mapping (YAML)::

    0.05                                  always 50 ms
    exponential:0.1                       mean 100 ms
    shifted_exponential:0.05,0.02         50 ms and an exponential part of mean 20 ms
    0.05+pareto:2.5,0.01                  a sum of independent parts
    {model: gamma, shape: 4, mean: 0.1}
    {model: per_rank, base: exponential:0.1, factors: {3: 10}}
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_dsgd.errors import ConfigurationError

Seconds = NDArray[np.float64]
Size = int | tuple[int, ...]


class ComputeTime(abc.ABC):
    """The distribution of one mini-batch's compute time, in seconds."""

    name: ClassVar[str]

    @property
    @abc.abstractmethod
    def mean(self) -> float:
        """The expected time; infinite where it has none."""

    @abc.abstractmethod
    def sample(self, rng: np.random.Generator, size: Size) -> Seconds:
        """Independent draws."""

    def draw(self, rng: np.random.Generator) -> float:
        """One draw."""
        return float(self.sample(rng, 1)[0])

    def for_rank(self, rank: int) -> ComputeTime:
        """The model of one worker: the same for all unless ranks differ."""
        return self

    def sample_ranks(self, rng: np.random.Generator, ranks: int, count: int = 1) -> Seconds:
        """`count` draws for every rank: an array of shape (ranks, count)."""
        return self.sample(rng, (ranks, count))

    def scaled(self, factor: float) -> ComputeTime:
        """The same shape, `factor` times as long."""
        return self if factor == 1.0 else Scaled(self, factor)


@dataclass(frozen=True)
class Constant(ComputeTime):
    """Always the same."""

    name: ClassVar[str] = "constant"
    seconds: float

    def __post_init__(self) -> None:
        _at_least_zero(self, seconds=self.seconds)

    @property
    def mean(self) -> float:
        return self.seconds

    def sample(self, rng: np.random.Generator, size: Size) -> Seconds:
        return np.full(size, self.seconds)


@dataclass(frozen=True)
class Exponential(ComputeTime):
    """Memoryless: the textbook straggler."""

    name: ClassVar[str] = "exponential"
    scale: float

    def __post_init__(self) -> None:
        _positive(self, scale=self.scale)

    @property
    def mean(self) -> float:
        return self.scale

    def sample(self, rng: np.random.Generator, size: Size) -> Seconds:
        return rng.exponential(self.scale, size)


@dataclass(frozen=True)
class ShiftedExponential(ComputeTime):
    """A least time every mini-batch needs, and an exponential part of mean `scale`."""

    name: ClassVar[str] = "shifted_exponential"
    shift: float
    scale: float

    def __post_init__(self) -> None:
        _at_least_zero(self, shift=self.shift)
        _positive(self, scale=self.scale)

    @property
    def mean(self) -> float:
        return self.shift + self.scale

    def sample(self, rng: np.random.Generator, size: Size) -> Seconds:
        return self.shift + rng.exponential(self.scale, size)


@dataclass(frozen=True)
class Pareto(ComputeTime):
    """Heavy tail: P(X > x) = (minimum / x) ** alpha, so rare mini-batches take very long."""

    name: ClassVar[str] = "pareto"
    alpha: float
    minimum: float

    def __post_init__(self) -> None:
        _positive(self, alpha=self.alpha, minimum=self.minimum)

    @property
    def mean(self) -> float:
        if self.alpha <= 1.0:
            return float("inf")
        return self.alpha * self.minimum / (self.alpha - 1.0)

    def sample(self, rng: np.random.Generator, size: Size) -> Seconds:
        return self.minimum * (1.0 + rng.pareto(self.alpha, size))


@dataclass(frozen=True)
class Gamma(ComputeTime):
    """A sum of many small steps: `shape` 1 is exponential, a large one is nearly constant."""

    name: ClassVar[str] = "gamma"
    shape: float
    scale: float

    def __post_init__(self) -> None:
        _positive(self, shape=self.shape, scale=self.scale)

    @property
    def mean(self) -> float:
        return self.shape * self.scale

    def sample(self, rng: np.random.Generator, size: Size) -> Seconds:
        return rng.gamma(self.shape, self.scale, size)


@dataclass(frozen=True)
class Empirical(ComputeTime):
    """Measured times, drawn with replacement."""

    name: ClassVar[str] = "empirical"
    seconds: tuple[float, ...]
    _times: Seconds = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        times = np.asarray(self.seconds, dtype=np.float64)
        if times.size == 0:
            raise ConfigurationError("empirical: give at least one measured time")
        if not np.isfinite(times).all() or times.min() < 0.0:
            raise ConfigurationError("empirical: measured times must be finite and not negative")
        object.__setattr__(self, "seconds", tuple(times.tolist()))
        object.__setattr__(self, "_times", times)

    @property
    def mean(self) -> float:
        return float(self._times.mean())

    def sample(self, rng: np.random.Generator, size: Size) -> Seconds:
        return self._times[rng.integers(len(self._times), size=size)]


@dataclass(frozen=True)
class Scaled(ComputeTime):
    """Another model, so many times as long."""

    name: ClassVar[str] = "scaled"
    base: ComputeTime
    factor: float

    def __post_init__(self) -> None:
        _positive(self, factor=self.factor)

    @property
    def mean(self) -> float:
        return self.base.mean * self.factor

    def sample(self, rng: np.random.Generator, size: Size) -> Seconds:
        return self.base.sample(rng, size) * self.factor

    def for_rank(self, rank: int) -> ComputeTime:
        return self.base.for_rank(rank).scaled(self.factor)

    def sample_ranks(self, rng: np.random.Generator, ranks: int, count: int = 1) -> Seconds:
        return self.base.sample_ranks(rng, ranks, count) * self.factor


@dataclass(frozen=True)
class Sum(ComputeTime):
    """Independent parts one after the other, such as the real work and an injected delay."""

    name: ClassVar[str] = "sum"
    parts: tuple[ComputeTime, ...]

    @property
    def mean(self) -> float:
        return sum(part.mean for part in self.parts)

    def sample(self, rng: np.random.Generator, size: Size) -> Seconds:
        total = np.zeros(size)
        for part in self.parts:
            total += part.sample(rng, size)
        return total

    def for_rank(self, rank: int) -> ComputeTime:
        return Sum(tuple(part.for_rank(rank) for part in self.parts))

    def sample_ranks(self, rng: np.random.Generator, ranks: int, count: int = 1) -> Seconds:
        total = np.zeros((ranks, count))
        for part in self.parts:
            total += part.sample_ranks(rng, ranks, count)
        return total


@dataclass(frozen=True)
class PerRank(ComputeTime):
    """A base model for all, slowed by a factor on some ranks or replaced by a rank's own model."""

    name: ClassVar[str] = "per_rank"
    base: ComputeTime
    factors: Mapping[int, float] = field(default_factory=dict)
    models: Mapping[int, ComputeTime] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, factor in self.factors.items():
            _positive(self, **{f"factors[{rank}]": factor})

    @property
    def mean(self) -> float:
        """That of the base: the mean over ranks depends on how many there are."""
        return self.base.mean

    def sample(self, rng: np.random.Generator, size: Size) -> Seconds:
        return self.base.sample(rng, size)

    def for_rank(self, rank: int) -> ComputeTime:
        model = self.models.get(rank, self.base).for_rank(rank)
        return model.scaled(self.factors.get(rank, 1.0))

    def sample_ranks(self, rng: np.random.Generator, ranks: int, count: int = 1) -> Seconds:
        times = self.base.sample_ranks(rng, ranks, count)
        for rank in sorted(set(self.models) | set(self.factors)):
            if rank in self.models and rank < ranks:
                times[rank] = self.models[rank].sample(rng, count)
            if rank < ranks:
                times[rank] *= self.factors.get(rank, 1.0)
        return times


# ------------------------------------------------------------------- from YAML and strings

MODELS: dict[str, type[ComputeTime]] = {
    model.name: model
    for model in (
        Constant,
        Exponential,
        ShiftedExponential,
        Pareto,
        Gamma,
        Empirical,
        Scaled,
        Sum,
        PerRank,
    )
}


def parse_compute_time(value: object) -> ComputeTime:
    """A model from a number, a short string or a mapping; a clear error for anything else."""
    if isinstance(value, ComputeTime):
        return value
    if isinstance(value, str):
        return _from_string(value)
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if isinstance(value, Sequence):
        return Empirical(tuple(_number("empirical", "seconds", item) for item in value))
    return Constant(_number("constant", "seconds", value))


def _from_string(text: str) -> ComputeTime:
    parts = [_from_term(term) for term in _terms(text)]
    return parts[0] if len(parts) == 1 else Sum(tuple(parts))


def _terms(text: str) -> list[str]:
    """Split at every plus that is not the sign of an exponent (1e+3)."""
    terms = [""]
    for index, letter in enumerate(text):
        exponent = text[index - 1 : index].lower() == "e" and text[index - 2 : index - 1].isdigit()
        if letter == "+" and not exponent:
            terms.append("")
        else:
            terms[-1] += letter
    return terms


def _from_term(text: str) -> ComputeTime:
    name, colon, rest = text.strip().partition(":")
    if not colon and name not in MODELS:
        return Constant(_number("compute time", "seconds", name))
    cls = _model(name)
    if cls in (Scaled, Sum, PerRank):
        raise ConfigurationError(f"{name}: write this model as a mapping, {{model: {name}, …}}")
    numbers = [_number(name, "argument", item) for item in rest.split(",") if item.strip()]
    if cls is Empirical:
        return Empirical(tuple(numbers))
    wanted = list(inspect.signature(cls).parameters)
    if len(numbers) != len(wanted):
        raise ConfigurationError(
            f"{text.strip()!r}: {name} takes {', '.join(wanted)}, as in "
            f"'{name}:{','.join('0.1' for _ in wanted)}'"
        )
    return cls(*numbers)


def _from_mapping(mapping: Mapping[Any, Any]) -> ComputeTime:
    given = {str(key): item for key, item in mapping.items()}
    if "model" not in given:
        raise ConfigurationError(
            f"compute time {dict(mapping)!r} names no model; choose one of: {', '.join(MODELS)}"
        )
    name = str(given.pop("model"))
    cls = _model(name)
    given = _with_mean(name, given)
    wanted = inspect.signature(cls).parameters
    unknown = sorted(set(given) - set(wanted))
    absent = [
        key for key, spec in wanted.items() if spec.default is spec.empty and key not in given
    ]
    if unknown or absent:
        wrong = f"unknown {', '.join(unknown)}" if unknown else f"{', '.join(absent)} missing"
        raise ConfigurationError(f"{name}: {wrong}; it takes {', '.join(wanted)}")
    return cls(**{key: _argument(name, key, item) for key, item in given.items()})


def _with_mean(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """`mean` in place of `scale`, where people think in means."""
    if "mean" not in given or "scale" in given or name not in ("exponential", "gamma"):
        return given
    rest = {key: item for key, item in given.items() if key != "mean"}
    mean = _number(name, "mean", given["mean"])
    shape = _number(name, "shape", given.get("shape", 1.0))
    return {**rest, "scale": mean / shape if shape else 0.0}


def _argument(model: str, key: str, value: object) -> object:
    if key == "base":
        return parse_compute_time(value)
    if key == "parts" and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(parse_compute_time(item) for item in value)
    if key in ("factors", "models"):
        return _by_rank(model, key, value)
    if model == Empirical.name and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_number(model, key, item) for item in value)
    return _number(model, key, value)


def _by_rank(model: str, key: str, value: object) -> dict[int, Any]:
    """A list is rank by rank, a mapping names the ranks."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{model}: {key} must map ranks, as in {{3: 10}}, not {value!r}")
    ranks = {_rank(model, key, rank): item for rank, item in value.items()}
    if key == "models":
        return {rank: parse_compute_time(item) for rank, item in ranks.items()}
    return {rank: _number(model, f"{key}[{rank}]", item) for rank, item in ranks.items()}


def _rank(model: str, key: str, value: object) -> int:
    if isinstance(value, bool) or not str(value).isdigit():
        raise ConfigurationError(f"{model}: {key} has {value!r} where a rank belongs")
    return int(str(value))


def _model(name: str) -> type[ComputeTime]:
    try:
        return MODELS[name.strip()]
    except KeyError:
        known = ", ".join(MODELS)
        raise ConfigurationError(f"unknown compute-time model {name!r}; known: {known}") from None


def _number(model: str, key: str, value: object) -> float:
    """A float, also from YAML's strings such as 1e-3, which YAML 1.1 takes for text."""
    if not isinstance(value, bool) and isinstance(value, (int, float, str)):
        try:
            return float(value)
        except ValueError:
            pass
    raise ConfigurationError(f"{model}: {key} must be a number, not {value!r}")


def _positive(model: ComputeTime, **values: float) -> None:
    for key, value in values.items():
        if not (np.isfinite(value) and value > 0.0):
            raise ConfigurationError(f"{model.name}: {key} must be above 0, not {value}")


def _at_least_zero(model: ComputeTime, **values: float) -> None:
    for key, value in values.items():
        if not (np.isfinite(value) and value >= 0.0):
            raise ConfigurationError(f"{model.name}: {key} must not be negative, not {value}")
