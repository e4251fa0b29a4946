"""Closed forms against identities and sampling, and compute-time models as users write them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.simulate.distributions import (
    ComputeTime,
    Constant,
    Empirical,
    Exponential,
    Gamma,
    Pareto,
    PerRank,
    Scaled,
    ShiftedExponential,
    Sum,
    parse_compute_time,
)
from lightning_dsgd.simulate.theory import (
    LossModel,
    adasync_k,
    fit_loss,
    gamma_cdf,
    harmonic,
    k_async_upper_bound,
    order_statistic,
    time_per_update,
)
from lightning_dsgd_plugins.adasync import synchrony

MODELS: list[ComputeTime] = [
    Constant(0.3),
    Exponential(2.0),
    ShiftedExponential(1.0, 0.5),
    Pareto(2.5, 1.0),
    Gamma(0.4, 2.0),
    Gamma(9.0, 0.1),
    Empirical((0.1, 0.2, 0.2, 5.0)),
    Scaled(Exponential(1.0), 3.0),
]


def _name(model: object) -> str:
    return type(model).__name__


# ------------------------------------------------------------------------ order statistics


@pytest.mark.parametrize("model", MODELS, ids=_name)
@pytest.mark.parametrize("workers", [1, 8, 64])
def test_order_statistics_add_up_to_all_workers_means(model: ComputeTime, workers: int) -> None:
    total = sum(order_statistic(model, k, workers) for k in range(1, workers + 1))
    assert total == pytest.approx(workers * model.mean, rel=1e-9)


@pytest.mark.parametrize("model", MODELS, ids=_name)
@pytest.mark.parametrize("k", [1, 5, 8])
def test_order_statistics_agree_with_sampling(model: ComputeTime, k: int) -> None:
    draws = np.sort(model.sample(np.random.default_rng(3), (40_000, 8)), axis=1)[:, k - 1]
    error = 3.0 * draws.std() / math.sqrt(len(draws))
    assert order_statistic(model, k, 8) == pytest.approx(draws.mean(), abs=error + 1e-12)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_gamma_of_shape_one_is_exponential(k: int) -> None:
    exact = order_statistic(Exponential(0.7), k, 8)
    assert order_statistic(Gamma(1.0, 0.7), k, 8) == pytest.approx(exact, rel=1e-9)


def test_gamma_cdf_has_the_known_special_cases() -> None:
    x = np.array([1e-6, 0.1, 1.0, 1.4, 1.6, 5.0, 40.0])
    assert gamma_cdf(1.0, x) == pytest.approx(1.0 - np.exp(-x), abs=1e-14)
    halves = [math.erf(math.sqrt(value)) for value in x]
    assert gamma_cdf(0.5, x) == pytest.approx(halves, abs=1e-14)


def test_exponential_order_statistics_are_harmonic_numbers() -> None:
    assert harmonic(4) == pytest.approx(25 / 12)
    assert order_statistic(Exponential(1.0), 4, 8) == pytest.approx(0.6345238)
    assert order_statistic(Exponential(1.0), 9_999, 10_000) == pytest.approx(harmonic(10_000) - 1)


def test_a_pareto_without_mean_has_no_slowest_worker_on_average() -> None:
    assert Pareto(0.9, 1.0).mean == math.inf
    assert order_statistic(Pareto(0.9, 1.0), 8, 8) == math.inf
    assert math.isfinite(order_statistic(Pareto(0.9, 1.0), 6, 8))


@pytest.mark.parametrize("k", [0, 9])
def test_an_impossible_k_is_refused(k: int) -> None:
    with pytest.raises(ConfigurationError, match="1 to 8"):
        order_statistic(Exponential(1.0), k, 8)


def test_a_model_without_order_statistics_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="simulate it instead"):
        order_statistic(Sum((Constant(1.0), Exponential(1.0))), 1, 2)


# ------------------------------------------------------------------------- time per update


@pytest.mark.parametrize(
    ("model", "k", "expected"),
    [
        (Exponential(1.0), 4, (0.635, 0.500, 0.635, 0.500)),
        (ShiftedExponential(1.0, 1.0), 4, (1.635, None, None, 1.00)),
        (ShiftedExponential(1.0, 1.0), 8, (3.72, None, 3.72, 2.00)),
        (Pareto(2.5, 1.0), 4, (1.30, None, None, 0.833)),
    ],
    ids=_name,
)
def test_the_published_table(
    model: ComputeTime, k: int, expected: tuple[float | None, ...]
) -> None:
    variants = ("k_sync", "k_batch_sync", "k_async", "k_batch_async")
    for variant, value in zip(variants, expected, strict=True):
        found = time_per_update(variant, model, k, 8)
        assert found == (None if value is None else pytest.approx(value, abs=0.005)), variant


def test_constant_times_make_k_batch_sync_count_whole_passes() -> None:
    assert time_per_update("k_batch_sync", Constant(2.0), 9, 8) == 4.0
    assert time_per_update("k_batch_sync", Constant(2.0), 8, 8) == 2.0


def test_the_k_async_bound_is_the_k_sync_time() -> None:
    model = ShiftedExponential(1.0, 1.0)
    assert k_async_upper_bound(model, 4, 8) == time_per_update("k_sync", model, 4, 8)


def test_batch_variants_refuse_k_zero() -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        time_per_update("k_batch_async", Exponential(1.0), 0, 8)


# -------------------------------------------------------------------------- loss and AdaSync


def test_updates_to_a_target_invert_the_loss() -> None:
    model = LossModel(start=2.3, rate=0.01, noise=0.4, optimum=0.1)
    for fresh in (1.0, 0.3):
        updates = model.updates_to(0.5, k=4, fresh=fresh)
        assert model.after(updates, k=4, fresh=fresh) == pytest.approx(0.5)


def test_more_gradients_lower_the_floor_and_staleness_raises_it() -> None:
    model = LossModel(start=2.3, rate=0.01, noise=0.4)
    assert model.floor(8) < model.floor(2) < model.floor(2, fresh=0.2)
    assert model.updates_to(model.floor(2), k=2) == math.inf
    assert model.updates_to(3.0, k=2) == 0.0


def test_a_fit_finds_the_curve_it_was_given() -> None:
    truth = LossModel(start=2.3, rate=0.004, noise=0.8, optimum=0.1)
    steps = np.arange(0.0, 2000.0, 10.0)
    noise = 0.01 * np.random.default_rng(0).standard_normal(len(steps))
    losses = np.array([truth.after(step, 4) for step in steps]) + noise
    found = fit_loss(steps, losses, k=4, optimum=0.1)
    assert found.rate == pytest.approx(truth.rate, rel=0.05)
    assert found.noise == pytest.approx(truth.noise, rel=0.05)
    assert found.start == pytest.approx(truth.start, rel=0.02)


@pytest.mark.parametrize(
    ("losses", "message"),
    [([1.0, 0.5], "three"), ([1.0, math.nan, 0.5], "finite"), ([0.1, 0.5, 0.9], "does not fall")],
)
def test_a_useless_curve_is_refused(losses: list[float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit_loss(np.arange(len(losses)) * 10.0, np.array(losses), k=1)


@pytest.mark.parametrize(
    "wrong", [{"rate": 0.0}, {"rate": 1.0}, {"staleness": 2.0}, {"noise": -1.0}, {"start": -1.0}]
)
def test_an_impossible_loss_model_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="loss"):
        LossModel(**{"start": 2.0, "rate": 0.1, **wrong})


@pytest.mark.parametrize("workers", [4, 8, 64])
@pytest.mark.parametrize("ratio", [0.2, 1.0, 3.0, 50.0])
@pytest.mark.parametrize("counted", ["workers", "batches"])
def test_adasync_plugin_and_theory_agree(workers: int, ratio: float, counted: str) -> None:
    for k0 in (1, workers // 2, workers):
        plugin = synchrony(ratio, k0, workers, counts_batches=counted == "batches")
        expected = max(1, min(workers, round(plugin)))
        assert adasync_k(k0, workers, ratio, 1.0, counted=counted) == expected


def test_adasync_starts_where_it_was_told_to() -> None:
    for k0 in range(1, 9):
        assert adasync_k(k0, 8, 2.3, 2.3) == k0


# ----------------------------------------------------------------------- compute-time models


@pytest.mark.parametrize(
    ("written", "model"),
    [
        (0.05, Constant(0.05)),
        ("0.05", Constant(0.05)),
        ("1e+1", Constant(10.0)),
        ("exponential:0.1", Exponential(0.1)),
        ("shifted_exponential:0.05,0.02", ShiftedExponential(0.05, 0.02)),
        ("0.05+pareto:2.5,0.01", Sum((Constant(0.05), Pareto(2.5, 0.01)))),
        ("empirical:1,2,3", Empirical((1.0, 2.0, 3.0))),
        ([1, 2], Empirical((1.0, 2.0))),
        ({"model": "gamma", "shape": 4, "mean": 0.1}, Gamma(4.0, 0.025)),
        ({"model": "exponential", "mean": "1e-1"}, Exponential(0.1)),
        ({"model": "scaled", "base": 0.1, "factor": 2}, Scaled(Constant(0.1), 2.0)),
        ({"model": "sum", "parts": [1, 2]}, Sum((Constant(1.0), Constant(2.0)))),
        (
            {"model": "per_rank", "base": 0.1, "factors": {3: 10}},
            PerRank(Constant(0.1), {3: 10.0}),
        ),
        (
            {"model": "per_rank", "base": 0.1, "models": {0: "exponential:1"}},
            PerRank(Constant(0.1), models={0: Exponential(1.0)}),
        ),
    ],
    ids=str,
)
def test_models_are_read_as_they_are_written(written: object, model: ComputeTime) -> None:
    assert parse_compute_time(written) == model


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("weibull:1", "unknown compute-time model 'weibull'; known: constant"),
        ("exponential", "takes scale"),
        ("exponential:x", "must be a number"),
        ("pareto:2.5", "takes alpha, minimum"),
        ("exponential:-1", "above 0"),
        ("pareto:0,1", "alpha must be above 0"),
        (-0.1, "must not be negative"),
        ("nan", "must not be negative"),
        ("per_rank:1", "as a mapping"),
        ({"mean": 1}, "names no model"),
        ({"model": "gamma", "shape": 1}, "scale missing"),
        ({"model": "constant", "second": 1}, "unknown second"),
        ({"model": "per_rank", "base": 1, "factors": 3}, "must map ranks"),
        ({"model": "per_rank", "base": 1, "factors": {"a": 3}}, "where a rank belongs"),
        ({"model": "per_rank", "base": 1, "factors": {1: 0}}, "above 0"),
        ([], "at least one"),
        ([1, -1], "not negative"),
        (None, "must be a number"),
        (True, "must be a number"),
    ],
    ids=str,
)
def test_a_wrong_model_is_refused_with_what_it_takes(written: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_compute_time(written)


def test_ranks_get_their_own_factor_and_model() -> None:
    model = PerRank(Constant(1.0), {1: 3.0, 2: 2.0}, {2: Constant(5.0)})
    times = model.sample_ranks(np.random.default_rng(0), 3, 2)
    assert times.tolist() == [[1.0, 1.0], [3.0, 3.0], [10.0, 10.0]]
    assert [model.for_rank(rank).mean for rank in range(4)] == [1.0, 3.0, 10.0, 1.0]
    doubled = Sum((model.scaled(2.0), Constant(1.0)))
    assert doubled.sample_ranks(np.random.default_rng(0), 3)[:, 0].tolist() == [3.0, 7.0, 21.0]
    assert doubled.for_rank(1).draw(np.random.default_rng(0)) == 7.0


@pytest.mark.parametrize("model", MODELS, ids=_name)
def test_samples_have_the_mean_that_is_claimed(model: ComputeTime) -> None:
    draws = model.sample_ranks(np.random.default_rng(1), 4, 50_000)
    assert draws.shape == (4, 50_000)
    assert draws.mean() == pytest.approx(model.mean, rel=0.03)
