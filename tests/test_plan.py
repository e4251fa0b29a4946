"""The planner and both commands, as a user meets them."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest
import yaml

from lightning_dsgd.cli import main
from lightning_dsgd.cli.plan import read_curve, read_source
from lightning_dsgd.control.trace import FILE_NAME, Header, TraceWriter
from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.registry import algorithms
from lightning_dsgd.simulate import Cluster, Link, Network, simulate
from lightning_dsgd.simulate.cluster import describe, read_cluster
from lightning_dsgd.simulate.distributions import Constant, Exponential, PerRank, ShiftedExponential
from lightning_dsgd.simulate.planning import (
    Candidate,
    Option,
    Settings,
    candidates,
    evaluate,
    planned,
    recommend,
)
from lightning_dsgd.simulate.rounds import Recorder
from lightning_dsgd.simulate.theory import LossModel
from lightning_dsgd.workers.algorithm import spread

EXAMPLE = Path(__file__).parent.parent / "docs" / "cluster.yaml"
SLOW_RANK = Cluster(4, PerRank(ShiftedExponential(0.1, 0.01), {3: 10.0}))


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    file = tmp_path / "cluster.yaml"
    file.write_text("workers: 4\ncompute: shifted_exponential:0.1,0.05\n")
    return file


@pytest.fixture
def trace_directory(tmp_path: Path) -> Path:
    """What a K-sync run of four ranks leaves behind."""
    recorder = Recorder()
    cluster = Cluster(4, ShiftedExponential(0.05, 0.02), Network(Link(0.01), Link(0.01)))
    simulate("k_sync", cluster, k=3, updates=200, recorder=recorder)
    writer = TraceWriter(tmp_path / "trace", Header("k_sync", {"k": 3}, 4))
    for now, event in recorder.events:
        writer.event(now, event)
    for now, decision in recorder.decisions:
        writer.decision(now, decision)
    writer.close()
    return tmp_path / "trace"


# --------------------------------------------------------------------------------- planning


def test_the_spread_of_ks_covers_both_ends() -> None:
    assert spread(1) == [1]
    assert spread(2) == [1, 2]
    assert spread(16) == [1, 4, 8, 12, 15, 16]


def test_candidates_are_every_strategy_at_every_count() -> None:
    found = candidates(SLOW_RANK, [2, 4])
    assert {candidate.strategy for candidate in found} == set(planned())
    assert {candidate.workers for candidate in found} == {2, 4}
    assert candidates(SLOW_RANK, [4], ["k_sync"], [1, 4]) == [
        Candidate("k_sync", 4, {"k": 1, "cancel_late": True}),
        Candidate("k_sync", 4, {"k": 4}),
    ]
    assert all(candidate.workers > 1 for candidate in candidates(SLOW_RANK, [1], ["ad_psgd"]))


def test_a_k_that_one_of_the_counts_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="k=6 is more than the 4 workers"):
        candidates(SLOW_RANK, [8, 4], ["k_sync"], [6])


def _plan(cluster: Cluster, strategies: list[str], **settings: object) -> list[Option]:
    wanted = candidates(cluster, [cluster.workers], strategies)
    return evaluate(cluster, wanted, Settings(updates=300, **settings))  # type: ignore[arg-type]


def test_without_a_target_fresh_gradients_per_second_decide() -> None:
    found = recommend(_plan(SLOW_RANK, ["k_sync", "k_batch_async"]))
    assert (found.option.candidate.strategy, found.option.candidate.k) == ("k_sync", 3)
    assert "times as fast as k_sync, 4 workers, K=4" in found.reason
    assert "k_batch_async" in found.reason and "loss curve" in found.reason


def test_equal_workers_need_nothing_but_synchronous_training() -> None:
    found = recommend(_plan(Cluster(4, Constant(0.1)), ["k_sync", "k_batch_sync"]))
    assert found.option.candidate == Candidate("k_sync", 4, {"k": 4})


def test_a_loose_target_wants_less_synchrony_than_a_tight_one() -> None:
    loss = LossModel(start=2.0, rate=0.01, noise=0.2)
    cluster = Cluster(8, Exponential(1.0))
    ks = []
    for target in (1.0, 0.04):
        options = _plan(cluster, ["k_sync"], loss=loss, target=target)
        ks.append(recommend(options).option.candidate.k or 0)
    assert ks[0] < ks[1]


def test_a_target_below_every_floor_is_said_to_be_out_of_reach() -> None:
    loss = LossModel(start=2.0, rate=0.01, noise=8.0)
    options = _plan(SLOW_RANK, ["k_sync"], loss=loss, target=0.1)
    found = recommend(options)
    assert found.reason.startswith("no option reaches the target")
    assert all(option.seconds_to_target == math.inf for option in options)
    assert options[0].summary()["seconds_to_target"] is None


def test_adasync_is_timed_on_its_own_changing_k() -> None:
    loss = LossModel(start=2.0, rate=0.01, noise=0.2)
    (adaptive,) = _plan(Cluster(8, Exponential(1.0)), ["adasync"], loss=loss, target=0.2)
    assert adaptive.seconds_to_target is not None
    assert adaptive.seconds_to_target == adaptive.result.time_to(0.2) < math.inf
    assert adaptive.result.ks[-1] > adaptive.result.ks[0]


def test_fewer_workers_win_when_more_do_not_help() -> None:
    loss = LossModel(start=2.0, rate=0.01)
    cluster = Cluster(2, PerRank(Constant(0.1), {2: 100.0, 3: 100.0}))
    wanted = candidates(cluster, [4, 2], ["k_sync"], [2])
    options = evaluate(cluster, wanted, Settings(updates=300, loss=loss, target=0.5))
    assert recommend(options).option.candidate.workers == 2


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one strategy"):
        recommend([])


@pytest.mark.parametrize("strategy", algorithms())
def test_the_recommended_configuration_builds_the_strategy(strategy: str) -> None:
    wanted = candidates(SLOW_RANK, [4], [strategy], [3])
    best = recommend(evaluate(SLOW_RANK, wanted, Settings(updates=100)))
    chosen = best.trainer()["trainer"]["strategy"]
    module, _, name = chosen["class_path"].rpartition(".")
    made = getattr(importlib.import_module(module), name)(**chosen.get("init_args", {}))
    assert made.strategy_name == strategy


# --------------------------------------------------------------------------- plan, the command


def test_plan_prints_a_table_a_reason_and_a_configuration(
    cluster_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--strategies", "k_sync,ad_psgd", "--updates", "200", "--workers", "2,4"]
    assert main(["plan", str(cluster_file), *arguments]) == 0
    text = capsys.readouterr().out
    head, *rows = text.split("\n\n")[0].splitlines()
    assert head.split()[:3] == ["workers", "strategy", "K"]
    assert len(rows) == len(candidates(SLOW_RANK, [2, 4], ["k_sync", "ad_psgd"]))
    assert "Recommendation: k_sync" in text and "because" in text
    config = yaml.safe_load(text[text.index("# Trainer") :])
    assert config["trainer"]["strategy"]["class_path"].endswith("KSyncStrategy")


def test_plan_as_json_with_a_loss_curve_and_a_picture(
    cluster_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = tmp_path / "metrics.csv"
    model = LossModel(start=2.3, rate=0.01, noise=0.1)
    rows = [f"{step},,{model.after(step, 4)}" for step in range(0, 800, 10)]
    curve.write_text("step,val_loss,train_loss\n" + "\n".join([*rows, "800,0.1,"]) + "\n")
    picture = tmp_path / "plan.png"
    arguments = ["--json", "--updates", "200", "--strategies", "k_sync,adasync,dc_s3gd"]
    arguments += ["--loss-curve", str(curve), "--target", "0.3", "--plot", str(picture)]
    pytest.importorskip("matplotlib")
    assert main(["plan", str(cluster_file), *arguments]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["target"] == 0.3
    assert {"k_sync", "adasync", "dc_s3gd"} == {row["strategy"] for row in answer["options"]}
    assert all("seconds_to_target" in row for row in answer["options"])
    assert answer["recommendation"]["config"]["trainer"]["devices"] == 4
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plan_reads_a_trace_and_its_losses(
    trace_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--strategies", "k_sync", "--k", "3", "--updates", "500", "--json"]
    assert main(["plan", str(trace_directory), *arguments]) == 0
    (row,) = json.loads(capsys.readouterr().out)["options"]
    cluster = Cluster(4, ShiftedExponential(0.05, 0.02), Network(Link(0.01)))
    truth = simulate("k_sync", cluster, k=3, updates=500).seconds_per_update
    assert row["seconds_per_update"] == pytest.approx(truth, rel=0.1)


def test_the_example_cluster_is_readable_and_complete() -> None:
    description = read_cluster(EXAMPLE)
    assert description.workers == (8,) and description.target == 0.2
    assert description.cluster.compute.for_rank(7).mean == pytest.approx(0.3)
    assert description.cluster.exchange("all_reduce") == pytest.approx(0.021)


# ----------------------------------------------------------------------- simulate, the command


def test_simulate_prints_the_figures(
    cluster_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--strategy", "k_async", "--k", "2", "--updates", "200"]
    assert main(["simulate", str(cluster_file), *arguments]) == 0
    assert "seconds per update" in capsys.readouterr().out
    assert main(["simulate", str(cluster_file), *arguments, "--json", "--workers", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["workers"] == 2


def test_simulate_trains_and_writes_the_curve(
    cluster_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = tmp_path / "curve.csv"
    arguments = ["--strategy", "cyclic_delay", "--updates", "100", "--train", "quadratic"]
    assert main(["simulate", str(cluster_file), *arguments, "--curve", str(curve)]) == 0
    assert "last error" in capsys.readouterr().out
    assert len(curve.read_text().splitlines()) == 101


def test_simulate_trains_on_digits(cluster_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    arguments = ["--strategy", "k_sync", "--updates", "60", "--train", "digits", "--json"]
    assert main(["simulate", str(cluster_file), *arguments]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["last_error"] < answer["first_error"]


def test_simulate_replays_a_trace_and_predicts_it(
    trace_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(trace_directory), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["same_decisions"] is True and answer["first_difference"] is None
    assert answer["predicted_over_measured"] == pytest.approx(1.0, abs=0.1)


def test_a_trace_that_decides_otherwise_fails(
    trace_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = trace_directory / FILE_NAME
    file.write_text(file.read_text().replace('"number":7,', '"number":70,'))
    assert main(["simulate", str(trace_directory)]) == 1
    assert "number=70" in capsys.readouterr().out


# ------------------------------------------------------------------- mistakes: exit code 2

BAD_FILES = {
    "workers: [4\n": "is not YAML",
    "": "describes no cluster",
    "- 1\n": "describes no cluster",
    "workers: 4\n": "compute is missing",
    "compute: 1\n": "workers is missing",
    "workers: 0\ncompute: 1\n": "workers must be a count",
    "workers: []\ncompute: 1\n": "empty list",
    "workers: two\ncompute: 1\n": "workers must be a count",
    "workers: 4\ncompute: weibull:1\n": "unknown compute-time model 'weibull'",
    "workers: 4\ncompute: 1\nnetwerk: {}\n": "unknown key 'netwerk'",
    "workers: 4\ncompute: 1\nstragglers: 3\n": "stragglers must be a list",
    "workers: 4\ncompute: 1\nstragglers: [{kind: lazy}]\n": "kind='lazy' is unknown",
    "workers: 4\ncompute: 1\nnetwork: 3\n": "network must map",
    "workers: 4\ncompute: 1\nnetwork: {gather: 1}\n": "unknown exchange 'gather'",
    "workers: 4\ncompute: 1\nnetwork: {pair: {speed: 1}}\n": "unknown 'speed'",
    "workers: 4\ncompute: 1\nnetwork: {pair: {bandwidth: 0}}\n": "bandwidth must be above 0",
    "workers: 4\ncompute: 1\ncontrol: -1\n": "control must be finite and not negative",
    "workers: 4\ncompute: 1\nbytes: many\n": "bytes must be a number",
    "workers: 4\ncompute: 1\nloss: 3\n": "loss must be a mapping",
    "workers: 4\ncompute: 1\nloss: {start: 2}\n": "rate is missing",
    "workers: 4\ncompute: 1\nloss: {start: 2, rat: 1}\n": "unknown 'rat'",
    "workers: 4\ncompute: 1\nloss: {start: 2, rate: x}\n": "loss",
    "workers: 4\ncompute: 1\nloss: {start: 2, rate: 2}\n": "between 0 and 1",
}


@pytest.mark.parametrize("content", BAD_FILES, ids=BAD_FILES.values())
def test_a_bad_cluster_file_is_a_clear_message_and_code_2(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(content)
    assert main(["plan", str(file), "--strategies", "k_sync"]) == 2
    said = capsys.readouterr().err
    assert BAD_FILES[content] in said and "Traceback" not in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("command", [["plan"], ["simulate"]])
@pytest.mark.parametrize("content", ["", "half a li", '{"policy": 3}\n'])
def test_an_empty_or_truncated_trace_is_code_2(
    command: list[str], content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    assert main([*command, str(tmp_path)]) == 2
    assert FILE_NAME in capsys.readouterr().err


def test_a_trace_cut_in_its_last_line_is_code_2(
    trace_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = trace_directory / FILE_NAME
    file.write_bytes(file.read_bytes()[:-10])
    assert main(["plan", str(trace_directory)]) == 2
    assert "truncated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "FILE"], "--strategy is needed"),
        (["simulate", "FILE", "--strategy", "k_sync", "--k", "9"], "more than the 4 workers"),
        (["simulate", "FILE", "--strategy", "dc_s3gd", "--k", "2"], "has no K"),
        (["simulate", "FILE", "--strategy", "k_sync", "--updates", "0"], "at least 1"),
        (["simulate", "FILE", "--strategy", "k_sync", "--curve", "x"], "needs --train"),
        (["simulate", "FILE", "--strategy", "ad_psgd", "--train", "quadratic"], "only its timing"),
        (["simulate", "no.yaml", "--strategy", "k_sync"], "cannot read no.yaml"),
        (["plan", "FILE", "--k", "9"], "more than the 4 workers"),
        (["plan", "FILE", "--updates", "5"], "at least 100"),
        (["plan", "FILE", "--target", "1"], "needs --loss-curve"),
        (["plan", "FILE", "--loss-curve", "no.csv"], "cannot read the loss curve"),
    ],
)
def test_mistakes_on_the_command_line_are_code_2(
    arguments: list[str], message: str, cluster_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(cluster_file) if word == "FILE" else word for word in arguments]
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--strategies", "k_sink"], ["--workers", "0"], ["--workers", "four"]]
)
def test_what_the_parser_refuses_is_code_2_too(arguments: list[str], cluster_file: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(cluster_file), *arguments])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "it has: none"), ("epoch,loss\n1,2\n", "epoch, loss"), ("step,loss\n1,x\n", "convert")],
)
def test_a_bad_loss_curve_says_what_it_needs(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "curve.csv"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        read_curve(file)


def test_a_cluster_description_takes_plain_seconds_for_an_exchange() -> None:
    found = describe({"workers": [2, 4], "compute": 0.1, "network": {"all_reduce": 0.02}})
    assert found.cluster.exchange("all_reduce") == 0.02 and found.workers == (2, 4)


def test_a_source_is_told_by_what_it_is(cluster_file: Path, trace_directory: Path) -> None:
    assert read_source(str(cluster_file))[1] is None
    assert read_source(str(trace_directory))[1] is not None
    assert read_source(str(trace_directory / FILE_NAME))[1] is not None
