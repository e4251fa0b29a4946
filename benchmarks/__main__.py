"""The project's figures: `python -m benchmarks NAME... [--repetitions N] [--report | --smoke]`."""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.harness import (
    Asked,
    Benchmark,
    Case,
    conduct,
    every_rank,
    options,
    report,
    spread,
    table,
)


class Given(argparse.Namespace):
    """The command line."""

    names: list[str]
    repetitions: int
    report: bool
    smoke: bool


TENFOLD = [*every_rank(0.05)[:3], {"kind": "slow", "rank": 3, "seconds": 0.5}]


def overhead(given: Given) -> Benchmark:
    """Nobody is slow: what does plain synchronous training cost beside Lightning's DDP?"""
    common: Case = {"widths": [1024, 1024], "batch": 256, "steps": 60, "warm_up": 10}
    cases = [
        {**common, "strategy": "backup_workers", "arguments": {"backups": 0}},
        {**common, "strategy": "ddp"},
    ]
    runs = yield Asked([cases] * given.repetitions)
    ours = [run[0][0]["per_update"] for run in runs]
    ddp = [run[1][0]["per_update"] for run in runs]
    ratios = [a / b for a, b in zip(ours, ddp, strict=True)]
    text = table(
        ["4 ranks, torch, no slow rank", "seconds per update: median (range)"],
        [
            ["backup_workers, backups=0", spread(ours)],
            ["Lightning DDP", spread(ddp)],
            ["ratio, launch by launch", spread(ratios, 3)],
        ],
    )
    text += (
        "\n\nA perceptron of 1.1 million parameters, 256 rows per rank and update; both in each "
        f"launch, {given.repetitions} launches."
    )
    data = {"ours": ours, "ddp": ddp, "ratios": ratios}
    report(
        "overhead", "Overhead over DDP", _command("overhead", given), text, data, write=given.report
    )


SCENARIOS: dict[str, list[dict[str, Any]]] = {
    "nobody slow": every_rank(0.05),
    "rank 3 ten times slower": TENFOLD,
    "two random ranks 0.2 s late": [*every_rank(0.05), {"kind": "random_pair", "seconds": 0.2}],
    "30 ms + Pareto(1.5, 20 ms)": [
        *every_rank(0.03),
        {"kind": "pareto", "alpha": 1.5, "minimum": 0.02},
    ],
}
SYNCHRONOUS = "backup_workers, backups=0"
RIVALS: dict[str, Case] = {
    SYNCHRONOUS: {"strategy": "backup_workers", "arguments": {"backups": 0}},
    "backup_workers, backups=1": {"strategy": "backup_workers", "arguments": {"backups": 1}},
    "k_batch_sync, k=3": {"strategy": "k_batch_sync", "arguments": {"k": 3}},
    "k_async, k=3": {"strategy": "k_async", "arguments": {"k": 3}},
    "k_batch_async, k=3": {"strategy": "k_batch_async", "arguments": {"k": 3}},
    "Lightning DDP": {"strategy": "ddp"},
}


def straggler(given: Given, launcher: str = "torchrun") -> Benchmark:
    """Every strategy in every scenario, in one launch; DDP needs torchrun."""
    base = "Lightning DDP" if launcher == "torchrun" else SYNCHRONOUS
    rivals = [name for name in RIVALS if launcher == "torchrun" or name != "Lightning DDP"]
    pairs = [(scenario, name) for name in rivals for scenario in SCENARIOS]
    common: Case = {"steps": 25, "warm_up": 5, "seed": 1}
    cases = [{**common, **RIVALS[name], "stragglers": SCENARIOS[s]} for s, name in pairs]
    runs = yield Asked([cases] * given.repetitions, launcher)
    pace = {pair: [run[i][0]["per_update"] for run in runs] for i, pair in enumerate(pairs)}
    rows = []
    for scenario in SCENARIOS:
        for name in rivals:
            both = zip(pace[scenario, base], pace[scenario, name], strict=True)
            ratios = [theirs / ours for theirs, ours in both]
            rows.append([scenario, name, spread(pace[scenario, name]), spread(ratios, 2)])
    text = table(["scenario", "strategy", "seconds per update", f"times the pace of {base}"], rows)
    text += (
        f"\n\n4 ranks under {launcher}, 50 ms per mini-batch where nothing else is said; median "
        f"and range of {given.repetitions} launches, every strategy and scenario in each. An "
        "update holds 4 gradients with DDP and backups=0, 3 with the others."
    )
    name = "straggler" if launcher == "torchrun" else f"straggler_{launcher}"
    data = [{"scenario": s, "strategy": n, "seconds": pace[s, n]} for s, n in pairs]
    report(name, "Slow ranks", _command(name, given), text, data, write=given.report)


def closed_forms(given: Given) -> Benchmark:
    """Exponential compute times of mean 0.1 s, 4 ranks, K = 2, against the formulas."""
    from lightning_dsgd.simulate.theory import harmonic  # the package takes seconds to import

    ranks, k, mean = 4, 2, 0.1
    workers = (harmonic(ranks) - harmonic(ranks - k)) * mean
    batches = k / ranks * mean
    expected = {"k_sync": workers, "k_batch_sync": batches, "k_async": workers}
    expected["k_batch_async"] = batches
    cases = [
        {
            "strategy": name,
            "arguments": {"k": k},
            "steps": 360,
            "warm_up": 10,
            "seed": 1,
            "widths": [16],
            "batch": 8,
            "lr": 0.01,
            "stragglers": [{"kind": "exponential", "mean": mean}],
        }
        for name in expected
    ]
    runs = yield Asked(_seeded(cases, range(1, given.repetitions + 1)))
    rows, data = [], {}
    for index, (name, value) in enumerate(expected.items()):
        measured = statistics.mean(run[index][0]["per_update"] for run in runs)
        exchange = statistics.median(run[index][0]["exchange"] for run in runs)
        ratio = measured / (value + exchange)
        data[name] = {"closed": value, "exchange": exchange, "measured": measured, "ratio": ratio}
        cells = [f"{number:.4f}" for number in (value, exchange, measured)]
        rows.append([name, *cells, f"{ratio:.3f}"])
    head = ["K = 2 of 4, Exp(0.1 s)", "closed form", "one exchange", "measured", "ratio"]
    text = table(head, rows)
    text += (
        f"\n\nMean seconds per update over {given.repetitions} launches of 350 updates each; the "
        "ratio is measured over (closed form + exchange)."
    )
    title, command = "Time per update against theory", _command("closed_forms", given)
    report("closed_forms", title, command, text, data, write=given.report)


CONTENDERS: dict[str, Case] = {
    "synchronous": {"strategy": "backup_workers", "arguments": {"backups": 0}},
    "backup_workers": {"strategy": "backup_workers", "arguments": {"backups": 1}},
    "k_sync, k=2": {"strategy": "k_sync", "arguments": {"k": 2}},
    "k_batch_sync, k=3": {"strategy": "k_batch_sync", "arguments": {"k": 3}},
    "k_async, k=2": {"strategy": "k_async", "arguments": {"k": 2}},
    "k_batch_async, k=2": {"strategy": "k_batch_async", "arguments": {"k": 2}},
    "adasync, k_sync": {"strategy": "adasync", "arguments": {"k0": 1, "interval": 0.5}},
    "cyclic_delay, mean": {"strategy": "cyclic_delay"},
    "cyclic_delay, delay=2": {"strategy": "cyclic_delay", "arguments": {"delay": 2}},
}


SMALL: Case = {
    "widths": [128],
    "evaluate": True,
    "stragglers": [{"kind": "exponential", "mean": 0.002}],
}
DIGITS: Case = {**SMALL, "data": "digits", "batch": 32, "lr": 0.1, "gradients": 2400}
FASHION: Case = {**SMALL, "data": "fashion", "batch": 64, "lr": 0.05, "gradients": 4000}


def accuracy(given: Given) -> Benchmark:
    """Digits: every strategy with the same number of gradients as synchronous SGD."""
    chosen = {name: case for name, case in CONTENDERS.items() if "cyclic" not in name}
    return _accuracy("accuracy", "Accuracy on digits", chosen, DIGITS, given)


def cyclic_digits(given: Given) -> Benchmark:
    """Digits: cyclic updates with the same number of gradients as synchronous SGD."""
    title = "Accuracy of cyclic updates on digits"
    return _accuracy("cyclic_digits", title, _cyclic_contenders(0.1), DIGITS, given)


def cyclic_fashion(given: Given) -> Benchmark:
    """Fashion-MNIST: cyclic updates with the same number of gradients as synchronous SGD."""
    title = "Accuracy of cyclic updates on Fashion-MNIST"
    return _accuracy("cyclic_fashion", title, _cyclic_contenders(0.05), FASHION, given)


def _cyclic_contenders(rate: float) -> dict[str, Case]:
    """Both ways to combine, at the rate of synchronous SGD and at others that suit them."""
    found = {"synchronous": CONTENDERS["synchronous"]}
    for combine, factor in (("mean", 1.0), ("mean", 2.0), ("sum", 0.25), ("sum", 0.5)):
        lr = rate * factor
        found[f"cyclic_delay, {combine}, rate {lr:g}"] = {
            "strategy": "cyclic_delay",
            "arguments": {"combine": combine},
            "lr": lr,
        }
    return found


def _accuracy(
    name: str, title: str, contenders: dict[str, Case], common: Case, given: Given
) -> Benchmark:
    cases = [{**common, **case} for case in contenders.values()]
    runs = yield Asked(_seeded(cases, range(given.repetitions)))
    found = {
        label: [run[index][0]["accuracy"] * 100 for run in runs]
        for index, label in enumerate(contenders)
    }
    base = statistics.mean(found["synchronous"])
    rows = [
        [
            label,
            " ".join(f"{value:.1f}" for value in values),
            f"{statistics.mean(values):.2f}",
            f"{statistics.mean(values) - base:+.2f}",
            str(int(statistics.median(run[index][0]["updates"] for run in runs))),
        ]
        for index, (label, values) in enumerate(found.items())
    ]
    seeds = f"accuracy, {given.repetitions} seeds"
    text = table(["strategy", seeds, "mean", "to synchronous", "updates"], rows)
    text += (
        f"\n\n{common['gradients']} gradients of {common['batch']} rows each, SGD with rate "
        f"{common['lr']} where nothing else is said, no momentum, random pauses of mean 2 ms."
    )
    report(name, title, _command(name, given), text, found, write=given.report)


def cyclic(given: Given) -> Benchmark:
    """Cyclic updates with one slow rank: who idles, and how many mini-batches a second."""
    common: Case = {"warm_up": 4, "stragglers": TENFOLD}
    named: dict[str, Case] = {
        "cyclic_delay, skip_after=0.1": {
            "strategy": "cyclic_delay",
            "arguments": {"skip_after": 0.1},
            "gradients": 700,
        },
        "cyclic_delay": {"strategy": "cyclic_delay", "gradients": 700},
        "cyclic_delay, delay=2 (fixed)": {
            "strategy": "cyclic_delay",
            "arguments": {"delay": 2},
            "gradients": 120,
        },
        "synchronous": {
            "strategy": "backup_workers",
            "arguments": {"backups": 0},
            "gradients": 80,
        },
    }
    for case in named.values():
        case.setdefault("arguments", {})["rounds_per_epoch"] = 100_000
    cases = [{**common, **case} for case in named.values()]
    runs = yield Asked([cases] * given.repetitions)
    rows, data = [], {}
    rates = {n: [r[i][0]["used"] / r[i][0]["seconds"] for r in runs] for i, n in enumerate(named)}
    base = statistics.median(rates["synchronous"])
    for index, name in enumerate(named):
        idle = [
            statistics.median(
                run[index][rank]["idle"] / run[index][rank]["seconds"] for run in runs
            )
            for rank in range(len(runs[0][index]))
        ]
        data[name] = {"idle": idle, "rate": rates[name]}
        shares = " ".join(f"{100 * share:.1f}" for share in idle)
        rate = spread(rates[name], 1)
        rows.append([name, shares, rate, f"{statistics.median(rates[name]) / base:.1f}"])
    head = ["rank 3 ten times slower", "idle %, rank 0-3", "mini-batches/s", "times synchronous"]
    text = table(head, rows)
    report("cyclic", "Cyclic updates", _command("cyclic", given), text, data, write=given.report)


LEARNING: Case = {"data": "digits", "lr": 0.1}
"""The one case where the loss must fall: K follows it."""
PREDICTED: dict[str, Case] = {
    name: CONTENDERS[name] | (LEARNING if "adasync" in name else {}) for name in CONTENDERS
}


def prediction(given: Given) -> Benchmark:
    """Real runs against simulations from their own records, and from a synchronous run's."""
    from lightning_dsgd.control.trace import read_trace
    from lightning_dsgd.simulate.replay import (
        measured_seconds_per_update,
        predict,
        recorded_cluster,
        replay,
    )

    updates, draws = (20, 1) if given.smoke else (320, 10)
    common: Case = {"steps": 320, "widths": [16], "batch": 8, "lr": 0.01}
    common["stragglers"] = [{"kind": "exponential", "mean": 0.06}]
    own: dict[str, list[float]] = {name: [] for name in PREDICTED}
    other: dict[str, list[float]] = {name: [] for name in PREDICTED}
    decisions = 0
    cases = [{**common, **case} for case in PREDICTED.values()]
    with tempfile.TemporaryDirectory() as folder:
        launches = _seeded(cases, range(given.repetitions))
        files = [_traced(seeded, f"{folder}/{seed}") for seed, seeded in enumerate(launches)]
        yield Asked(launches)
        recorded = [[read_trace(file) for file in found] for found in files]
    for traces in recorded:
        for trace in traces:
            difference = replay(trace)
            if difference is not None:
                raise SystemExit(f"{trace.header.strategy}, replayed: {difference}")
            decisions += len(trace.decisions)
        synchronous = recorded_cluster(traces[0])
        for name, trace in zip(PREDICTED, traces, strict=True):
            for found, cluster in ((own, recorded_cluster(trace)), (other, synchronous)):
                predicted = statistics.mean(
                    predict(trace, updates=updates, seed=draw, cluster=cluster).seconds_per_update
                    for draw in range(draws)
                )
                found[name].append(predicted / measured_seconds_per_update(trace))
    rows = [[name, spread(own[name], 3), spread(other[name], 3)] for name in PREDICTED]
    head = ["predicted / measured seconds per update", "from its own record"]
    text = table([*head, "from the synchronous run's"], rows)
    text += (
        f"\n\nMedian and range of {given.repetitions} launches; of 320 updates the first tenth "
        "counts neither in the run nor in the ten simulations. A record gives compute times, "
        "exchange and overhead; a synchronous one knows nothing of broadcasts, which are taken as "
        "half an all-reduce. AdaSync is told the losses of its own run. "
        f"All {decisions} decisions came out the same when replayed."
    )
    command = _command("prediction", given)
    data = {"own": own, "synchronous": other}
    report("prediction", "Prediction of real runs", command, text, data, write=given.report)


def _seeded(cases: list[Case], seeds: Iterable[int]) -> list[list[Case]]:
    """A launch of all cases for each seed."""
    return [[{**case, "seed": seed} for case in cases] for seed in seeds]


def _traced(cases: list[Case], prefix: str) -> list[str]:
    """Have each case leave a trace, in a file whose name begins so; the files."""
    files = [f"{prefix}-{number}" for number in range(len(cases))]
    for case, file in zip(cases, files, strict=True):
        case["arguments"] = {**case.get("arguments", {}), "trace": file}
    return files


BENCHMARKS: dict[str, Callable[[Given], Benchmark]] = {
    "overhead": overhead,
    "straggler": straggler,
    "straggler_horovodrun": functools.partial(straggler, launcher="horovodrun"),
    "closed_forms": closed_forms,
    "accuracy": accuracy,
    "cyclic_digits": cyclic_digits,
    "cyclic_fashion": cyclic_fashion,
    "cyclic": cyclic,
    "prediction": prediction,
}


def _command(name: str, given: Given) -> str:
    return f"python -m benchmarks {name} --repetitions {given.repetitions} --report"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=BENCHMARKS)
    parser.add_argument("--repetitions", type=int, default=3, help="launches, or seeds")
    parser.add_argument("--report", action="store_true", help="write benchmarks/reports/NAME.*")
    given: Given = options(parser, repetitions=1)
    chosen = [BENCHMARKS[name](given) for name in given.names]
    for together in [chosen] if given.smoke else [[one] for one in chosen]:
        conduct(together, smoke=given.smoke)


if __name__ == "__main__":
    main()
