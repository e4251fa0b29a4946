"""DC-S3GD: its formula, its loop against independent ones, and its place in Lightning."""

from __future__ import annotations

import copy
import csv
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_dsgd import ConfigurationError, DCS3GDStrategy, WeightDecayWarmup
from lightning_dsgd.exchange.gradients import FlatLayout
from lightning_dsgd.exchange.points import Points
from lightning_dsgd_plugins.dc_s3gd import compensate
from tests.launching import KINDS, read, results
from tests.ranks.toy import BATCH, LR, MOMENTUM, Toy, dataset, flat, trainer_for

RANKS = 4
REPEATED = {"launched": KINDS}
SCENARIOS = [
    f"dc_s3gd.{name}"
    for name in (
        "by_model",
        "by_tensor",
        "stale",
        "half_wire",
        "brain_wire",
        "scheduled",
        "corrections",
        "common_points",
        "resume",
        "mixed",
        "thawed",
        "logged",
        "unequal",
    )
]


@pytest.fixture
def out(launched: Path) -> Path:
    return launched / "dc_s3gd"


# --------------------------------------------------------------------------- formula


def parts_of(gradient: list[Any], distance: list[Any], dtype: torch.dtype) -> list[Any]:
    tensors = [torch.tensor(value, dtype=dtype) for value in gradient]
    distances = [torch.tensor(value, dtype=dtype) for value in distance]
    return [(g, d, torch.empty_like(g)) for g, d in zip(tensors, distances, strict=True)]


def joined(parts: list[Any]) -> np.ndarray:
    return np.concatenate([part[0].double().numpy().ravel() for part in parts])


@pytest.mark.parametrize("scale", [1.0, 1e-9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_correction_is_lambda0_times_as_long_as_the_gradient(dtype: Any, scale: float) -> None:
    rng = np.random.default_rng(0)
    gradient = [rng.normal(size=(3, 4)) * scale, rng.normal(size=5) * scale]
    distance = [rng.normal(size=(3, 4)) * scale, rng.normal(size=5) * scale]
    parts = parts_of(gradient, distance, dtype)
    before = joined(parts)
    factor = compensate(parts, 0.2)
    correction = joined(parts) - before
    assert np.linalg.norm(correction) == pytest.approx(0.2 * np.linalg.norm(before), rel=1e-5)
    moved = np.concatenate([part[1].double().numpy().ravel() for part in parts])
    direction = before * before * moved
    expected = 0.2 * np.linalg.norm(before) / np.linalg.norm(direction)
    assert float(factor) == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(correction, expected * direction, rtol=1e-2, atol=1e-6 * scale)


@pytest.mark.parametrize(
    ("gradient", "distance"), [([1.0, 2.0], [0.0, 0.0]), ([0.0, 0.0], [1.0, 2.0]), ([1, 0], [0, 1])]
)
def test_nothing_to_correct_leaves_the_gradient(gradient: Any, distance: Any) -> None:
    parts = parts_of([gradient], [distance], torch.float32)
    assert float(compensate(parts, 0.2)) == 0.0
    assert parts[0][0].tolist() == gradient


def test_equal_steps_make_no_move_but_rounding() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(50, 40)
    points = Points(FlatLayout(layer.parameters()))
    points.mark()
    with torch.no_grad():
        layer.weight.add_(torch.randn(40, 50) / 100)
    step = points.stepped()[0]
    step.copy_((step + step + step) / 3)
    points.rejoin()
    assert not points.moved(3 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize(
    "arguments",
    [
        {"lambda0": -0.1},
        {"lambda0": float("nan")},
        {"lambda_scope": "layer"},
        {"wire": "int8"},
        {"timeout": 0.0},
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        DCS3GDStrategy(**arguments)


# --------------------------------------------------------------------------- oracles


def split(point: np.ndarray) -> list[np.ndarray]:
    first, bias, last, offset = np.split(point, np.cumsum([48, 8, 24]))
    return [first.reshape(8, 6), bias, last.reshape(3, 8), offset]


def gradient_at(point: np.ndarray, inputs: np.ndarray, targets: np.ndarray) -> list[np.ndarray]:
    """Of the toy network's mean squared error, by hand."""
    first, bias, last, offset = split(point)
    hidden = np.tanh(inputs @ first.T + bias)
    wrong = 2 * (hidden @ last.T + offset - targets) / targets.size
    back = (wrong @ last) * (1 - hidden**2)
    return [back.T @ inputs, back.sum(0), wrong.T @ hidden, wrong.sum(0)]


def corrected(gradient: list[np.ndarray], moved: np.ndarray, lambda0: float) -> list[np.ndarray]:
    """Over the tensors given."""
    pieces = np.split(moved, np.cumsum([g.size for g in gradient])[:-1])
    direction = [g * g * d.reshape(g.shape) for g, d in zip(gradient, pieces, strict=True)]
    long = np.sqrt(sum((d**2).sum() for d in direction))
    if long == 0:
        return gradient
    factor = lambda0 * np.sqrt(sum((g**2).sum() for g in gradient)) / long
    return [g + factor * d for g, d in zip(gradient, direction, strict=True)]


def numpy_loop(workers: int, steps: int, lambda0: float, scope: str) -> np.ndarray:
    """The paper's loop for all workers at once: momentum SGD as U."""
    inputs, targets = (tensor.numpy() for tensor in dataset(workers * steps * BATCH).tensors)
    points = [flat(Toy().double()) for _ in range(workers)]
    momentum = [np.zeros_like(points[0]) for _ in range(workers)]
    updates: list[np.ndarray] | None = None
    for step in range(steps):
        gradients = []
        for worker in range(workers):
            rows = [(step * BATCH + i) * workers + worker for i in range(BATCH)]
            gradients.append(gradient_at(points[worker], inputs[rows], targets[rows]))
        for worker in range(workers):
            gradient = gradients[worker]
            if updates is not None:
                moved = sum(updates) / workers - updates[worker]
                gradient = correct(gradient, moved, lambda0, scope)
                points[worker] = points[worker] + moved
            whole = np.concatenate([g.ravel() for g in gradient])
            momentum[worker] = MOMENTUM * momentum[worker] + whole
        updates = [-LR * momentum[worker] for worker in range(workers)]
        points = [point + update for point, update in zip(points, updates, strict=True)]
    assert updates is not None
    return points[0] + sum(updates) / workers - updates[0]


def correct(
    gradient: list[np.ndarray], moved: np.ndarray, lambda0: float, scope: str
) -> list[np.ndarray]:
    if scope == "model":
        return corrected(gradient, moved, lambda0)
    pieces = np.split(moved, np.cumsum([g.size for g in gradient])[:-1])
    return [corrected([g], d, lambda0)[0] for g, d in zip(gradient, pieces, strict=True)]


def test_equals_the_papers_loop(out: Path) -> None:
    ranks = results(out, "by_model")
    expected = numpy_loop(RANKS, 100, 0.2, "model")
    for result in ranks:
        np.testing.assert_allclose(result["end"], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "lambda0", "scope"), [("by_tensor", 0.2, "tensor"), ("stale", 0.0, "model")]
)
def test_variants_equal_the_loop_too(out: Path, name: str, lambda0: float, scope: str) -> None:
    ranks = results(out, name)
    expected = numpy_loop(RANKS, 100, lambda0, scope)
    for result in ranks:
        np.testing.assert_allclose(result["end"], expected, atol=1e-6, rtol=0)


def torch_loop(workers: int, module_class: Any) -> np.ndarray:
    """The same with torch's optimizers, two mini-batches to a step, clipping, and a schedule."""
    inputs, targets = dataset(workers * 60 * BATCH).tensors
    replicas = [copy.deepcopy(module_class().double()) for _ in range(workers)]
    tools = [replica.configure_optimizers() for replica in replicas]
    updates: list[torch.Tensor] = []
    for step in range(30):
        news = []
        for worker, replica in enumerate(replicas):
            optimizer = tools[worker]["optimizer"]
            optimizer.zero_grad()
            for part in (2 * step, 2 * step + 1):
                rows = [(part * BATCH + i) * workers + worker for i in range(BATCH)]
                (replica.training_step([inputs[rows], targets[rows]], 0) / 2).backward()
            before = nn.utils.parameters_to_vector(replica.parameters()).detach()
            if updates:
                moved = sum(updates) / workers - updates[worker]
                before = before + moved
                gradient = torch.cat([p.grad.ravel() for p in replica.parameters()])
                change = gradient * gradient * moved
                change *= 0.2 * gradient.norm() / change.norm()
                offset = 0
                for p in replica.parameters():
                    p.grad += change[offset : offset + p.numel()].view_as(p)
                    offset += p.numel()
                nn.utils.vector_to_parameters(before.clone(), replica.parameters())
            nn.utils.clip_grad_norm_(replica.parameters(), 0.5)
            optimizer.step()
            tools[worker]["lr_scheduler"]["scheduler"].step()
            news.append(nn.utils.parameters_to_vector(replica.parameters()).detach() - before)
        updates = news
    last = nn.utils.parameters_to_vector(replicas[0].parameters()).detach()
    return (last + sum(updates) / workers - updates[0]).numpy()


def test_adam_groups_accumulation_clipping_and_schedule(out: Path) -> None:
    from tests.ranks.dc_s3gd import Scheduled

    expected = torch_loop(RANKS, Scheduled)
    for result in results(out, "scheduled"):
        assert result["steps"] == 30
        np.testing.assert_allclose(result["end"], expected, atol=1e-6, rtol=0)


def test_the_correction_keeps_its_length_in_training(out: Path) -> None:
    for result in results(out, "corrections"):
        assert len(result["shares"]) == 11  # not the first step: nothing had been exchanged
        np.testing.assert_allclose(result["shares"], 0.2, rtol=1e-9)


def test_steps_rounded_on_the_wire_stay_close(out: Path) -> None:
    full = numpy_loop(RANKS, 30, 0.2, "model")
    half = results(out, "half_wire")
    assert all((result["end"] == half[0]["end"]).all() for result in half)
    assert 0 < np.abs(half[0]["end"] - full).max() < 1e-2
    if not out.parents[1].name.startswith("horovodrun"):
        brain = results(out, "brain_wire")
        assert all((result["end"] == brain[0]["end"]).all() for result in brain)
        assert 0 < np.abs(brain[0]["end"] - full).max() < 1e-1
    else:
        for outcome in read(out, "brain_wire"):
            assert outcome["error"] == "ConfigurationError" and "fp16" in outcome["message"]


def test_one_worker_is_plain_training() -> None:
    ours, plain, before = Toy(), Toy(), dict(os.environ)
    for module, strategy in ((ours, DCS3GDStrategy()), (plain, "auto")):
        trainer = trainer_for(strategy, devices=1, max_epochs=2)
        trainer.fit(module, torch.utils.data.DataLoader(dataset(64), batch_size=BATCH))
    assert (flat(ours) == flat(plain)).all()
    assert dict(os.environ) == before, "a later training may still start workers"


# ------------------------------------------------------------------- life with Lightning


def test_all_ranks_stand_at_one_point_where_it_matters(out: Path) -> None:
    seen = [result["seen"] for result in results(out, "common_points")]
    assert all(other == seen[0] for other in seen)
    moments = [moment for moment, _ in seen[0]]
    assert moments.count("validation") >= 6 and moments.count("epoch") == 2
    assert moments.count("checkpoint") >= 4 and "end" in moments
    tested = [result["tested"] for result in results(out, "common_points")]
    assert all(other == tested[0] for other in tested)


def test_between_drains_ranks_are_at_points_of_their_own(out: Path) -> None:
    first, second = [result["tentative"] for result in results(out, "common_points")][:2]
    assert first - second


def test_resumed_equals_uninterrupted_bit_for_bit(out: Path) -> None:
    ranks = results(out, "resume")
    assert {result["whole"] for result in ranks} == {result["resumed"] for result in ranks}
    assert len({result["whole"] for result in ranks}) == 1
    assert all(result["steps"] == 30 for result in ranks)
    assert ranks[0]["momentum"] != ranks[1]["momentum"]


@pytest.mark.parametrize("name", ["mixed", "thawed"])
def test_features_end_at_one_point(out: Path, name: str) -> None:
    ranks = results(out, name)
    assert len({result["digest"] for result in ranks}) == 1
    assert all(result.get("finite", True) and result.get("moved", True) for result in ranks)


def test_logs_distance_lambda_and_what_was_hidden(out: Path) -> None:
    assert results(out, "logged")[0]["rows"]
    with open(out / "logged" / "version_0" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 3, 5]
    for row in rows:
        assert float(row["dsgd/distance"]) > 0 and float(row["dsgd/lambda"]) > 0
        assert 0 <= float(row["dsgd/hidden"]) <= 1


def test_threads_end_and_the_tally_stays(out: Path) -> None:
    ranks = results(out, "by_model")
    assert all(result["threads"] == [] for result in ranks)
    tally = ranks[0]["tally"]
    assert tally["rounds"] == 100
    assert all(worker["used"] == 100 for worker in tally["workers"])


def test_unequal_shares_of_data_are_refused(out: Path) -> None:
    for outcome in read(out, "unequal"):
        assert outcome["error"] == "ConfigurationError"
        assert "rank 1: 4" in outcome["message"]


# --------------------------------------------------------------------------- warm-up


def test_weight_decay_grows_and_is_resumed_from_the_optimizers_state() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, weight_decay=0.5)
    seen = []
    for step in (0, 2, 4, 9):
        trainer = SimpleNamespace(global_step=step, optimizers=[optimizer])
        WeightDecayWarmup(steps=4, start=0.2).on_train_batch_start(trainer, None, None, 0)
        seen.append(optimizer.param_groups[0]["weight_decay"])
        again = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        again.load_state_dict(optimizer.state_dict())
        optimizer = again
    assert seen == pytest.approx([0.1, 0.3, 0.5, 0.5])


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"steps": 3, "start": 1.5}])
def test_warm_up_refuses_what_it_cannot_do(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=list(arguments)[-1]):
        WeightDecayWarmup(**arguments)
