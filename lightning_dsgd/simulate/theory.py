"""What mathematics says about time per update and error: what the simulator is held against.

Closed forms only, from S. Dutta et al., "Slow and Stale Gradients Can Win the Race",
arXiv 1803.01113, and the order statistics behind them. Nothing here imports the simulator or a
policy, so that agreement between the two means something.

Notation: P workers, K gradients per update, X the time of one mini-batch, X_{K:P} the K-th smallest
of P independent draws of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.simulate.distributions import (
    ComputeTime,
    Constant,
    Empirical,
    Exponential,
    Gamma,
    Pareto,
    Scaled,
    ShiftedExponential,
)

Variant = Literal["k_sync", "k_batch_sync", "k_async", "k_batch_async"]
Floats = NDArray[np.float64]


def harmonic(n: int) -> float:
    """H_n = 1 + 1/2 + … + 1/n."""
    return math.fsum(1.0 / i for i in range(1, n + 1))


# --------------------------------------------------------------------- order statistics


def order_statistic(model: ComputeTime, k: int, workers: int) -> float:
    """E[X_{K:P}]: how long the K-th of P workers takes on average."""
    if not 1 <= k <= workers:
        raise ConfigurationError(f"k={k} must lie in 1 to {workers}, the number of workers")
    if isinstance(model, Scaled):
        return model.factor * order_statistic(model.base, k, workers)
    if isinstance(model, Constant):
        return model.seconds
    if isinstance(model, Exponential):
        return model.scale * (harmonic(workers) - harmonic(workers - k))
    if isinstance(model, ShiftedExponential):
        return model.shift + order_statistic(Exponential(model.scale), k, workers)
    if isinstance(model, Pareto):
        return _pareto(model, k, workers)
    if isinstance(model, Empirical):
        return _empirical(model, k, workers)
    if isinstance(model, Gamma):
        return _gamma(model, k, workers)
    raise ConfigurationError(
        f"no order statistics for {model.name}; simulate it instead, or name one of: constant, "
        "exponential, shifted_exponential, pareto, gamma, empirical, scaled"
    )


def _pareto(model: Pareto, k: int, workers: int) -> float:
    rest = workers - k + 1.0
    if rest - 1.0 / model.alpha <= 0.0:
        return math.inf
    logs = (
        math.lgamma(workers + 1.0)
        - math.lgamma(workers + 1.0 - 1.0 / model.alpha)
        + math.lgamma(rest - 1.0 / model.alpha)
        - math.lgamma(rest)
    )
    return model.minimum * math.exp(logs)


def _empirical(model: Empirical, k: int, workers: int) -> float:
    """Exact for drawing with replacement: a step function's order statistics are binomial tails."""
    times = np.sort(np.asarray(model.seconds))
    below = np.arange(1, len(times)) / len(times)
    return float(times[0] + np.sum(np.diff(times) * _fewer_than(k, workers, below)))


def _gamma(model: Gamma, k: int, workers: int) -> float:
    """E[X] = ∫ P(X > x) dx, by Gauss-Legendre on x = top·t³: dense where the density is."""
    spread = math.sqrt(model.shape) + math.log(workers + 1.0)
    top = model.shape + 12.0 * spread + 30.0
    nodes, weights = _legendre()
    t = (nodes + 1.0) / 2.0
    tail = _fewer_than(k, workers, gamma_cdf(model.shape, top * t**3))
    return float(model.scale * np.sum(weights / 2.0 * tail * 3.0 * top * t**2))


@cache
def _legendre() -> tuple[Floats, Floats]:
    """Nodes and weights on -1 to 1; finding them costs more than using them."""
    return np.polynomial.legendre.leggauss(400)


def _fewer_than(k: int, workers: int, chance: Floats) -> Floats:
    """P(fewer than K of P have arrived) when each has with this chance: a binomial's lower tail."""
    p = np.clip(np.asarray(chance, dtype=np.float64), 1e-300, 1.0 - 1e-16)
    log_p, log_q = np.log(p), np.log1p(-p)
    total = np.zeros_like(p)
    log_ways = 0.0
    for arrived in range(k):
        total += np.exp(log_ways + arrived * log_p + (workers - arrived) * log_q)
        log_ways += math.log((workers - arrived) / (arrived + 1.0))
    return np.minimum(total, 1.0)


def gamma_cdf(shape: float, x: Floats) -> Floats:
    """P(X ≤ x) for a gamma variable of scale 1: series below the mean, continued fraction above."""
    x = np.maximum(np.asarray(x, dtype=np.float64), 1e-300)
    log_front = shape * np.log(x) - x - math.lgamma(shape)
    small = x < shape + 1.0
    series = np.exp(log_front) * _gamma_series(shape, np.where(small, x, 1.0))
    fraction = 1.0 - np.exp(log_front) * _gamma_fraction(shape, np.where(small, shape + 2.0, x))
    joined: Floats = np.where(small, series, fraction)
    return joined


def _gamma_series(shape: float, x: Floats) -> Floats:
    term: Floats = np.full_like(x, 1.0 / shape)
    total: Floats = term.copy()
    n = shape
    while np.any(term > 1e-16 * total):
        n += 1.0
        term *= x / n
        total += term
    return total


def _gamma_fraction(shape: float, x: Floats) -> Floats:
    """Lentz's method for the upper tail."""
    b = x + 1.0 - shape
    c = np.full_like(x, 1e300)
    d = 1.0 / b
    h: Floats = d.copy()
    for i in range(1, 10_000):
        a = -i * (i - shape)
        b = b + 2.0
        d = 1.0 / (a * d + b)
        c = b + a / c
        h *= c * d
        if np.all(np.abs(c * d - 1.0) < 1e-14):
            break
    return h


# ---------------------------------------------------------------------- time per update


def time_per_update(variant: Variant, model: ComputeTime, k: int, workers: int) -> float | None:
    """Expected seconds per update with free communication; None where there is no closed form."""
    if variant == "k_sync":
        return order_statistic(model, k, workers)
    if k < 1:
        raise ConfigurationError(f"k={k} must be at least 1")
    if variant == "k_batch_async":
        return k * model.mean / workers  # renewal theorem: P workers, one gradient per E[X] each
    if variant == "k_batch_sync":
        return _k_batch_sync(model, k, workers)
    if isinstance(model, Exponential) or k == workers:
        return order_statistic(model, k, workers)
    return None


def _k_batch_sync(model: ComputeTime, k: int, workers: int) -> float | None:
    if isinstance(model, Exponential):
        return k * model.scale / workers
    if isinstance(model, Constant):
        return math.ceil(k / workers) * model.seconds
    return None


def k_async_upper_bound(model: ComputeTime, k: int, workers: int) -> float:
    """E[X_{K:P}]: K-async takes at most this long where X is new-longer-than-used."""
    return order_statistic(model, k, workers)


# ------------------------------------------------------------------------ error and AdaSync


@dataclass(frozen=True)
class LossModel:
    """Dutta et al.'s error bound read as a curve: a geometric fall onto a noise floor.

    loss(J) = floor + (start - floor) * (1 - rate)^J  with  floor = optimum + noise / K.

    In the paper's letters `rate` is eta*c and `noise` is eta*L*sigma^2 / (2*c*m). Stale gradients
    weaken both by gamma' = 1 - gamma + p0/2 (never above 1), where p0 is the share of
    gradients that are not stale and gamma, here `staleness`, says how far a stale gradient points
    elsewhere: 0 not at all, 1 anywhere.
    """

    start: float
    rate: float
    noise: float = 0.0
    optimum: float = 0.0
    staleness: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 < self.rate < 1.0:
            raise ConfigurationError(f"loss: rate={self.rate} must lie between 0 and 1")
        if not 0.0 <= self.staleness <= 1.0:
            raise ConfigurationError(f"loss: staleness={self.staleness} must lie in 0 to 1")
        if self.noise < 0.0 or self.start <= self.optimum:
            raise ConfigurationError("loss: noise must not be negative, start must exceed optimum")

    def slowdown(self, fresh: float) -> float:
        """gamma' of updates of which this share is fresh."""
        return max(1e-9, min(1.0, 1.0 - self.staleness + fresh / 2.0)) if fresh < 1.0 else 1.0

    def floor(self, k: float, fresh: float = 1.0) -> float:
        """The loss that K gradients per update end at."""
        return self.optimum + self.noise / (k * self.slowdown(fresh))

    def after(self, updates: float, k: float, fresh: float = 1.0) -> float:
        """The expected loss after so many updates."""
        floor = self.floor(k, fresh)
        fall = math.exp(updates * math.log1p(-self.rate * self.slowdown(fresh)))
        return floor + (self.start - floor) * fall

    def updates_to(self, target: float, k: float, fresh: float = 1.0) -> float:
        """Updates until the loss is at the target; infinite if the floor lies above it."""
        floor = self.floor(k, fresh)
        if target >= self.start:
            return 0.0
        if target <= floor:
            return math.inf
        ratio = (target - floor) / (self.start - floor)
        return math.log(ratio) / math.log1p(-self.rate * self.slowdown(fresh))


def fit_loss(
    updates: Floats, losses: Floats, *, k: float, optimum: float = 0.0, staleness: float = 0.5
) -> LossModel:
    """The curve nearest to measured losses: least squares over the rate, floor and start linear.

    One curve cannot tell the optimum from the noise floor; `optimum` says how to split them.
    """
    x = np.asarray(updates, dtype=np.float64)
    y = np.asarray(losses, dtype=np.float64)
    if len(x) < 3 or len(x) != len(y) or not np.isfinite(y).all() or np.ptp(x) <= 0.0:
        raise ConfigurationError(
            "a loss curve needs at least three finite points at different updates"
        )
    best = min(_fits(x, y), key=lambda fit: fit[0])
    _, rate, floor, height = best
    if height <= 0.0:
        raise ConfigurationError("the loss curve does not fall, so it says nothing about a target")
    noise = max(0.0, floor - optimum) * k
    return LossModel(max(floor, optimum) + height, rate, noise, optimum, staleness)


def _fits(x: Floats, y: Floats) -> list[tuple[float, float, float, float]]:
    span = float(x.max() - x.min())
    fits = []
    for rate in np.geomspace(0.05 / span, min(0.5, 200.0 / span), 400):
        fall = np.exp(x * np.log1p(-rate))
        columns = np.stack([np.ones_like(x), fall], axis=1)
        (floor, height), *_ = np.linalg.lstsq(columns, y, rcond=None)
        error = float(np.sum((columns @ np.array([floor, height]) - y) ** 2))
        fits.append((error, float(rate), float(floor), float(height)))
    return fits


def adasync_k(
    k0: int, workers: int, first_loss: float, loss: float, *, counted: str = "workers"
) -> int:
    """AdaSync's K at a loss: the smaller the loss, the more gradients an update waits for."""
    ratio = first_loss / loss
    if counted == "batches":
        root = k0 * math.sqrt(ratio)
    elif k0 >= workers:
        root = float(workers)
    else:
        c = k0**2 * ratio / (workers - k0)
        root = (-c + math.sqrt(c * c + 4.0 * c * workers)) / 2.0
    return max(1, min(workers, round(root)))
