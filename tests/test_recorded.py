"""What is learned in simulated time, and what a recorded run tells."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lightning_dsgd.control.trace import Header, Trace, TraceError, TraceWriter, read_trace
from lightning_dsgd.simulate import (
    Cluster,
    Constant,
    Exponential,
    Link,
    Logistic,
    Network,
    PerRank,
    Quadratic,
    ShiftedExponential,
    TorchModel,
    simulate,
)
from lightning_dsgd.simulate.learning import Curve
from lightning_dsgd.simulate.replay import (
    compute_times,
    measured_seconds_per_update,
    predict,
    recorded_cluster,
    replay,
    uncensored,
)
from lightning_dsgd.simulate.rounds import Recorder
from lightning_dsgd.simulate.theory import LossModel
from lightning_dsgd.workers.messages import Dropped, Round

VARIANTS = ("k_sync", "k_batch_sync", "k_async", "k_batch_async")
COSTLY = Network(Link(0.02), Link(0.01), Link(0.005))


# --------------------------------------------------------------------------------- learning


def test_more_gradients_per_update_end_at_a_lower_noise_floor() -> None:
    floors = []
    for k in (1, 4, 8):
        learner = Quadratic(noise=1.0, learning_rate=0.2)
        result = simulate("k_sync", Cluster(8, Exponential(1.0)), k=k, updates=800, learner=learner)
        floors.append(np.mean([error for _, error in result.losses[200:]]))
    assert floors[0] / floors[1] == pytest.approx(4.0, rel=0.3)
    assert floors[1] / floors[2] == pytest.approx(2.0, rel=0.3)


def test_training_falls_at_the_versions_the_policy_dictates() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=300)
    features = rng.standard_normal((300, 5)) + labels[:, None]
    for strategy in ("k_batch_async", "k_batch_sync", "cyclic_delay"):
        learner = Logistic(features, labels, learning_rate=0.1)
        result = simulate(strategy, Cluster(4, Exponential(1.0)), updates=300, learner=learner)
        assert result.losses[-1][1] < 0.6 * result.losses[0][1], strategy
        assert [time for time, _ in result.losses] == result.times


def test_gradients_are_those_of_the_parameters_a_worker_began_with() -> None:
    """Without noise, one stale quadratic step can be worked out by hand."""
    learner = Quadratic(1, condition=1.0, noise=0.0, learning_rate=0.5)
    cluster = Cluster(2, PerRank(Constant(1.0), {1: 2.5}))
    result = simulate("k_async", cluster, k=1, updates=3, learner=learner)
    # ranks 0, 0, 1: w = 1 → 0.5 → 0.25, then rank 1's gradient at w = 1
    assert result.losses[-1][1] == pytest.approx(0.5 * (0.25 - 0.5) ** 2)


def test_any_torch_module_trains() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    features = torch.randn(200, 4)
    labels = (features.sum(dim=1) > 0).long()
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    loss = torch.nn.functional.cross_entropy
    learner = TorchModel(module, loss, features, labels, learning_rate=0.5, evaluate_every=5)
    result = simulate("k_sync", Cluster(4, Exponential(1.0)), k=2, updates=100, learner=learner)
    assert result.losses[-1][1] < 0.5 * result.losses[0][1]
    assert result.time_to(0.4) < result.seconds


@pytest.mark.parametrize("variant", VARIANTS)
def test_adasync_asks_for_more_as_the_loss_falls(variant: str) -> None:
    learner = Curve(LossModel(start=2.0, rate=0.02))
    cluster = Cluster(8, Exponential(1.0))
    result = simulate(
        "adasync", cluster, k0=2, updates=400, variant=variant, interval=5.0, learner=learner
    )
    assert result.ks[0] == 2 and result.ks[-1] == 8
    assert result.ks == sorted(result.ks)


# ------------------------------------------------------------------------ recorded runs


def _record(
    strategy: str, arguments: dict[str, object], directory: Path, cluster: Cluster
) -> Trace:
    """A simulated run in the format of a real one."""
    recorder, learner = Recorder(), Curve(LossModel(start=2.0, rate=0.01))
    simulate(
        strategy, cluster, updates=300, seed=3, recorder=recorder, learner=learner, **arguments
    )
    writer = TraceWriter(directory, Header(strategy, arguments, cluster.workers))
    for now, event in recorder.events:
        writer.event(now, event)
    for now, decision in recorder.decisions:
        writer.decision(now, decision)
    writer.close()
    return read_trace(directory)


RECORDED: list[tuple[str, dict[str, object]]] = [
    *((variant, {"k": 2}) for variant in VARIANTS),
    ("adasync", {"k0": 1, "interval": 5.0}),
    ("cyclic_delay", {}),
]


@pytest.mark.parametrize(("strategy", "arguments"), RECORDED)
def test_a_recorded_run_decides_the_same_again(
    strategy: str, arguments: dict[str, object], tmp_path: Path
) -> None:
    cluster = Cluster(4, ShiftedExponential(0.05, 0.05), COSTLY, control=0.001, overhead=0.004)
    trace = _record(strategy, arguments, tmp_path, cluster)
    assert replay(trace) is None


@pytest.mark.parametrize(("strategy", "arguments"), RECORDED)
def test_a_recorded_run_predicts_its_own_time_per_update(
    strategy: str, arguments: dict[str, object], tmp_path: Path
) -> None:
    model = PerRank(ShiftedExponential(0.05, 0.01), {3: 2.0})
    cluster = Cluster(4, model, Network(Link(0.01), Link(0.01), Link(0.01)), overhead=0.004)
    trace = _record(strategy, arguments, tmp_path, cluster)
    measured = measured_seconds_per_update(trace)
    assert predict(trace, updates=1000).seconds_per_update == pytest.approx(measured, rel=0.1)


def test_a_changed_decision_is_found_and_named(tmp_path: Path) -> None:
    trace = _record("k_sync", {"k": 2}, tmp_path, Cluster(4, Exponential(0.1)))
    now, decision = trace.decisions[5]
    assert isinstance(decision, Round)
    trace.decisions[5] = (now, Dropped(0, 1, "no reason"))
    difference = replay(trace)
    assert difference is not None and difference.index == 5
    assert "no reason" in str(difference) and "Round" in str(difference)
    del trace.decisions[5:]
    assert str(replay(trace)).startswith("decision 5: recorded nothing")


def test_a_trace_gives_each_rank_its_own_times(tmp_path: Path) -> None:
    cluster = Cluster(4, PerRank(Constant(0.1), {3: 100.0}), COSTLY)
    trace = _record("k_sync", {"k": 2}, tmp_path, cluster)
    model = compute_times(trace)
    assert model.for_rank(0).mean == pytest.approx(0.1)
    assert model.for_rank(3).mean == pytest.approx(10.0), "its first is finished, however late"
    events = [(now, event) for now, event in trace.events if getattr(event, "worker", 0) != 3]
    unseen = compute_times(Trace(trace.header, events, trace.decisions))
    assert unseen.for_rank(3).mean == pytest.approx(1.0), "never seen: ten times the slowest"
    found = recorded_cluster(trace)
    assert found.exchange("all_reduce") == pytest.approx(0.02) and found.workers == 4
    assert found.exchange("broadcast") == pytest.approx(0.01), "half of a reduction and a broadcast"


def test_cancelled_gradients_count_as_at_least_so_long() -> None:
    """Of exponential times cut off at random, the estimate has the true distribution again."""
    rng = np.random.default_rng(5)
    times, limits = rng.exponential(1.0, 4000), rng.exponential(2.0, 4000)
    finished = times[times <= limits].tolist()
    cancelled = limits[times > limits].tolist()
    found = np.array(uncensored(finished, cancelled))
    for share in (0.25, 0.5, 0.75):
        assert np.quantile(found, share) == pytest.approx(-np.log(1 - share), rel=0.08)
    assert np.median(finished) < 0.8 * np.log(2), "what finished alone looks too fast"
    assert uncensored([3.0, 1.0], []) == [3.0, 1.0]


def test_a_trace_without_times_or_updates_says_so(tmp_path: Path) -> None:
    trace = _record("k_sync", {"k": 2}, tmp_path, Cluster(4, Exponential(0.1)))
    bare = Trace(trace.header, trace.events[:1], [])
    with pytest.raises(TraceError, match="no compute times"):
        compute_times(bare)
    with pytest.raises(TraceError, match="two at least"):
        measured_seconds_per_update(bare)


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        ("subprocess:Popen", {"args": ["touch", "FILE"]}),
        ("subprocess.Popen", {"args": ["touch", "FILE"]}),
        ("k_sync", {"k": 9}),
        ("k_sync", {"args": ["touch", "FILE"]}),
        ("ad_psgd", {}),
    ],
)
def test_a_trace_names_a_registered_strategy_or_nothing_is_made_of_it(
    strategy: str, arguments: dict[str, object], tmp_path: Path
) -> None:
    good = _record("k_sync", {"k": 2}, tmp_path, Cluster(4, Exponential(0.1)))
    victim = tmp_path / "touched"
    arguments = json.loads(json.dumps(arguments).replace("FILE", str(victim)))
    forged = Trace(Header(strategy, arguments, 4), good.events, good.decisions)
    for reader in (replay, predict):
        with pytest.raises(TraceError, match="cannot be made again"):
            reader(forged)
    assert not victim.exists()
