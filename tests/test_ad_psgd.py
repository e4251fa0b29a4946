"""AD-PSGD: the policy by itself, exchanges between threads, and training on real ranks."""

from __future__ import annotations

import csv
import itertools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zmq

import lightning_dsgd as dsgd
from lightning_dsgd.backends import on_torch
from lightning_dsgd.backends.streams import Streams
from lightning_dsgd.control.alarm import Alarm
from lightning_dsgd.control.coordinator import Coordinator
from lightning_dsgd.control.link import Control
from lightning_dsgd.exchange.gossip import GossipExchange, SharedModel
from lightning_dsgd.exchange.gradients import Flat
from lightning_dsgd.workers.messages import (
    Closed,
    Computed,
    Decision,
    Event,
    Go,
    Joined,
    Left,
    Pair,
    Segment,
)
from lightning_dsgd.workers.topology import Topology, is_active, make_topology
from lightning_dsgd_plugins.ad_psgd import GossipPolicy
from tests.launching import LAUNCHERS, launch, results

NAMES = [
    f"ad_psgd.{name}"
    for name in ("standing_still", "trains", "resumes", "resyncs", "small_things", "refuses")
]
LAST = "ad_psgd.refuses_inside"
STREAMS = Streams(torch.device("cpu"))
"""A process cannot go on after it, and horovodrun ends the others at the first to give up."""

# ------------------------------------------------------------------------------ policy


def kinds(decisions: Any, kind: type) -> list[Any]:
    return [decision for decision in decisions if isinstance(decision, kind)]


def drive(policy: GossipPolicy, ranks: int, rng: random.Random) -> tuple[list[int], list[Decision]]:
    """Let ranks compute in random order until the segment is closed; returns who made what."""
    made = [0] * ranks
    going = set(policy.present)
    seen: list[Decision] = []
    while going:
        worker = rng.choice(sorted(going))
        made[worker] += 1
        decisions = policy.handle(Computed(worker, is_active(worker)), 0.0)
        (answer,) = kinds(decisions, Go)
        assert answer.worker == worker
        if not answer.more:
            going.discard(worker)
        seen.extend(decisions)
    return made, seen


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_a_segment_has_exactly_its_gradients(ranks: int) -> None:
    rng = random.Random(ranks)
    policy = GossipPolicy(make_topology("ring", ranks))
    total = 0
    for length in (ranks, 3 * ranks + 1, 50):
        total += length
        policy.handle(Segment(total), 0.0)
        made, seen = drive(policy, ranks, rng)
        assert sum(made) == length and min(made) >= 1
        assert [c.worker for c in kinds(seen, Closed)] == list(range(ranks))
        assert all(isinstance(decision, Closed) for decision in seen[-ranks:])
        assert policy.missing() == ()


def test_pairs_follow_the_graph_and_both_ranks_hear_of_them() -> None:
    graph = make_topology("exponential", 8)
    policy = GossipPolicy(graph, seed=3)
    policy.handle(Segment(400), 0.0)
    made, seen = drive(policy, 8, random.Random(0))
    pairs = kinds(seen, Pair)
    assert len(pairs) == 2 * sum(made[rank] for rank in graph.active)
    for first, second in zip(pairs[::2], pairs[1::2], strict=True):
        assert (first.worker, first.partner) == (second.partner, second.worker)
        assert first.number == second.number and first.starts and not second.starts
        assert first.partner in graph.neighbours(first.worker) and is_active(first.worker)
    assert {pair.partner for pair in pairs if pair.worker == 0} == set(graph.neighbours(0))
    again = GossipPolicy(graph, seed=3)
    again.handle(Segment(400), 0.0)
    assert drive(again, 8, random.Random(0)) == (made, seen), "same events, same decisions"


def test_a_busy_active_rank_makes_no_pair() -> None:
    policy = GossipPolicy(make_topology("ring", 4))
    policy.handle(Segment(20), 0.0)
    assert kinds(policy.handle(Computed(0, False), 0.0), Pair) == []
    assert len(kinds(policy.handle(Computed(0, True), 0.0), Pair)) == 2


def test_the_partners_age_counts_everybodys_gradients() -> None:
    policy = GossipPolicy(make_topology("ring", 2))
    policy.handle(Segment(20), 0.0)
    policy.handle(Computed(1, False), 0.0)
    ages = [kinds(policy.handle(Computed(0, True), 0.0), Pair)[0].age for _ in range(3)]
    assert ages == [1, 2, 3]


def test_a_gradient_before_its_segment_waits_for_it() -> None:
    policy = GossipPolicy(make_topology("ring", 2))
    assert list(policy.handle(Computed(1, False), 0.0)) == []
    assert kinds(policy.handle(Segment(2), 0.0), Go) == [Go(1, False)]
    assert policy.missing() == (0,)


def test_a_rank_that_leaves_hands_its_right_on() -> None:
    policy = GossipPolicy(make_topology("bipartite", 4))
    policy.handle(Segment(10), 0.0)
    policy.handle(Left(3), 0.0)
    made, seen = drive(policy, 4, random.Random(1))
    assert sum(made) == 10 and made[3] == 0
    assert all(pair.partner != 3 for pair in kinds(seen, Pair))
    policy.handle(Joined(3), 0.0)
    policy.handle(Segment(20), 0.0)
    made, _ = drive(policy, 4, random.Random(1))
    assert sum(made) == 10 and made[3] >= 1
    policy.handle(Segment(24), 0.0)
    for rank in range(3):
        policy.handle(Computed(rank, False), 0.0)
    assert len(kinds(policy.handle(Left(3), 0.0), Closed)) == 3, "the others are not kept waiting"


# ------------------------------------------------------------- exchanges between threads


class Recording(GossipPolicy):
    """Keeps the pairs in the order in which they were decided."""

    def __init__(self, graph: Topology, seed: int) -> None:
        super().__init__(graph, seed=seed)
        self.order: list[tuple[int, int]] = []

    def handle(self, event: Event, now: float) -> Any:
        decisions = super().handle(event, now)
        self.order += [(p.worker, p.partner) for p in kinds(decisions, Pair) if p.starts]
        return decisions


class Ranks:
    """Real exchanges over real process groups, one thread per rank."""

    def __init__(self, graph: Topology, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
        store = dist.HashStore()
        monkeypatch.setattr(on_torch, "_store", lambda *_: store)
        monkeypatch.setattr(on_torch, "_JOBS", itertools.repeat(0))
        self.graph = graph
        self.size = graph.world_size
        self.policy = Recording(graph, seed)
        self.alarm = Alarm()
        self.made = 0
        self.keys = [zmq.curve_keypair() for _ in range(self.size)]
        public = [key for key, _ in self.keys]
        self.coordinator = Coordinator(public, "127.0.0.1", timeout=60.0)
        self.coordinator.begin(self.policy)
        self.coordinator.start()
        self.exchanges: list[Any] = [None] * self.size
        self.controls: list[Any] = [None] * self.size
        self.each(self._connect)

    def _connect(self, rank: int) -> None:
        backend = on_torch.TorchBackend(
            rank, self.size, "", 0, torch.device("cpu"), self.alarm, 60.0, self.graph.edges
        )
        control = self.controls[rank] = Control(
            self.coordinator.ticket, rank, self.alarm, self.keys[rank]
        )
        self.exchanges[rank] = GossipExchange(
            rank,
            backend.pairs(),
            control,
            SharedModel(Flat([torch.zeros(5, dtype=torch.float64)]), STREAMS),
            lambda: Flat([torch.zeros(5, dtype=torch.float64)]),
            self.alarm,
            STREAMS,
            active=is_active(rank),
            timeout=60.0,
        )
        control.await_welcome()

    def each(self, work: Callable[[int], None]) -> None:
        """Run this on all ranks at once; an error on any of them is the test's."""
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                work(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "deadlock"
        if errors:
            raise errors[0]

    def put(self, models: np.ndarray) -> None:
        for exchange, row in zip(self.exchanges, models, strict=True):
            exchange.model.replace([torch.from_numpy(row.copy())])

    def models(self) -> np.ndarray:
        rows = [[torch.zeros(5, dtype=torch.float64)] for _ in range(self.size)]
        for exchange, row in zip(self.exchanges, rows, strict=True):
            exchange.model.read(row)
        return np.stack([row[0].numpy() for row in rows])

    def segment(self, gradients: int, step: float, seed: int) -> np.ndarray:
        """One segment at random speeds, with random steps; returns what the steps add up to."""
        moved = np.zeros((self.size, 5))
        self.made += gradients
        self.controls[0].announce(Segment(self.made))

        def train(rank: int) -> None:
            rng = np.random.default_rng([seed, rank])
            exchange = self.exchanges[rank]
            before = [torch.zeros(5, dtype=torch.float64)]
            while True:
                time.sleep(float(rng.exponential(0.0005 if is_active(rank) else 0.005)))
                while exchange._under_way and rng.random() < 0.95:  # mostly: more exchanges
                    time.sleep(0.0005)
                exchange.computed()
                seen = exchange.model.read(before)
                delta = rng.normal(scale=step, size=5) if step else np.zeros(5)
                time.sleep(float(rng.exponential(0.0002)))
                if step:
                    exchange.model.move(before, [before[0] + torch.from_numpy(delta)], seen)
                moved[rank] += delta
                if not exchange.may_go_on():
                    return exchange.await_close(self.made)

        self.each(train)
        return moved

    def close(self) -> None:
        for control in self.controls:
            control.leave()
        for exchange, control in zip(self.exchanges, self.controls, strict=True):
            exchange.close()
            control.close()
        self.coordinator.stop()


@pytest.mark.parametrize("size", [2, 4, 5])
def test_thousands_of_random_exchanges_keep_the_mean(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 on each world size, while every rank also takes steps of its own."""
    ranks = Ranks(make_topology("bipartite" if size == 4 else "ring", size), monkeypatch, size)
    start = np.random.default_rng(size).normal(size=(size, 5))
    ranks.put(start)
    moved = np.zeros((size, 5))
    for round_ in itertools.count():
        moved += ranks.segment(1000, 0.1, seed=round_)
        if ranks.policy.pairs >= 2000:
            break
    counts = [exchange.counts for exchange in ranks.exchanges]
    ranks.close()
    expected = (start + moved).mean(0)
    assert ranks.models().mean(0) == pytest.approx(expected, rel=1e-11, abs=1e-11)
    assert sum(count.started for count in counts) == ranks.policy.pairs
    assert sum(count.answered for count in counts) == ranks.policy.pairs
    assert all(count.started == 0 for count in counts[1::2]), "passive ranks only answer"
    assert not [t.name for t in threading.enumerate() if t.name.startswith("dsgd")]


@pytest.mark.parametrize("size", [4, 5])
def test_without_steps_models_meet_at_the_spectral_gaps_rate(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_topology("ring", size)
    ranks = Ranks(graph, monkeypatch)
    slowest = np.linalg.eigh(graph.mixing())[1][:, -2]
    rates = []
    for round_ in range(40):
        ranks.put(np.tile(slowest[:, None], 5))
        began = len(ranks.policy.order)
        ranks.segment(5 * size, 0.0, seed=round_)
        pairs = ranks.policy.order[began:]
        expected = replay(slowest, pairs)
        assert ranks.models()[:, 0] == pytest.approx(expected, abs=1e-14), "in decided order"
        rates.append((len(pairs), float(expected @ expected)))
    ranks.close()
    factor = 1.0 - graph.spectral_gap()
    predicted = np.mean([factor**pairs for pairs, _ in rates])
    assert np.mean([square for _, square in rates]) < 3 * predicted
    firsts = [replay(slowest, [pair]) for pair in ranks.policy.order]
    assert np.mean([first @ first for first in firsts]) == pytest.approx(factor, rel=0.15)


def replay(models: np.ndarray, pairs: list[tuple[int, int]]) -> np.ndarray:
    models = models.copy()
    for pair in pairs:
        models[list(pair)] = models[list(pair)].mean()
    return models


# --------------------------------------------------------------------------- real ranks


REPEATED = {"out": LAUNCHERS}


@pytest.fixture(scope="session")
def out(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A launch of its own: Horovod must know all pairs when it starts, and each costs it a bit."""
    launcher, _ = request.param
    directory = tmp_path_factory.mktemp(f"ad_psgd-{launcher}")
    names = [*NAMES, LAST] if launcher == "torchrun" else NAMES
    done = launch(launcher, names, directory)
    assert done.returncode == 0, done.stdout[-6000:]
    return directory / "ad_psgd"


def test_exchanges_alone_lead_to_the_mean(out: Path) -> None:
    found = results(out, "standing_still")
    start = np.stack([result["start"] for result in found])
    own = np.stack([result["own"] for result in found])
    mean = start.mean(0)
    assert own.mean(0) == pytest.approx(mean, abs=1e-12)
    for result in found:
        assert result["end"] == pytest.approx(mean, abs=1e-12)
        assert result["threads"] == [], "all threads are joined"
    pairs = sum(result["counts"].started for result in found)
    assert pairs == sum(result["counts"].answered for result in found) > 0
    before = np.square(start - mean).sum()
    bound = before * (1.0 - make_topology("bipartite", 4).spectral_gap()) ** pairs
    assert 4 * found[0]["consensus"] ** 2 < 100 * bound + 1e-20


def test_all_ranks_leave_an_epoch_together_with_the_mean(out: Path) -> None:
    found = results(out, "trains")
    assert len({result["digest"] for result in found}) == 1
    assert len({result["own"].tobytes() for result in found}) > 1, "own models differ"
    own = np.mean([result["own"] for result in found], axis=0)
    assert found[0]["end"] == pytest.approx(own, abs=1e-12)
    assert len({str(result["statistics"]) for result in found}) == 1
    assert any(found[0]["statistics"])
    assert {result["epochs"] for result in found} == {3}


def test_fast_ranks_make_more_of_the_epochs_gradients(out: Path) -> None:
    found = results(out, "trains")
    gradients = found[0]["gradients"]
    assert sum(gradients) == 3 * 4 * 10 // 2
    assert [result["steps"] for result in found] == gradients
    assert gradients[3] == min(gradients) < max(gradients)


def test_schedules_logs_and_checkpoints(out: Path) -> None:
    found = results(out, "trains")
    assert found[0]["lr"] == pytest.approx([0.01 / 8, 0.02 / 8]), "one step of it per epoch"
    for name in ("val_loss", "weights", "loss_all"):
        assert len({result["metrics"][name] for result in found}) == 1
    with open(Path(found[0]["log"]) / "metrics.csv") as file:
        columns = set(csv.DictReader(file).fieldnames or ())
    expected = {f"dsgd/{name}/{r}" for name in ("started", "answered") for r in range(4)}
    assert expected | {"dsgd/consensus", "dsgd/partner_age", "dsgd/partner_age/2"} <= columns
    (path,) = found[0]["last"]
    saved = torch.load(path, weights_only=False)["state_dict"]
    weights = torch.cat(
        [saved[n].flatten() for n in saved if "running" not in n and "num" not in n]
    )
    assert float(weights.sum()) == pytest.approx(found[0]["end"].sum()), "a checkpoint has the mean"


def test_training_resumes_after_the_epoch_of_the_checkpoint(out: Path) -> None:
    found = results(out, "resumes")
    assert len({result["digest"] for result in found}) == 1
    assert {str(result["epochs"]) for result in found} == {"[3, 4]"}
    assert found[0]["gradients"] == 2 * 4 * 10


def test_training_goes_on_from_the_mean_or_the_own_model(out: Path) -> None:
    found = results(out, "resyncs")
    for name in ("never", "epoch", "steps"):
        assert len({result[name]["mean"].tobytes() for result in found}) == 1
    for result in found:
        assert np.array_equal(result["epoch"]["own"], result["epoch"]["mean"])
        assert np.array_equal(result["steps"]["own"], result["steps"]["mean"])
    assert any(
        not np.array_equal(result["never"]["own"], result["never"]["mean"]) for result in found
    )


def test_small_things(out: Path) -> None:
    found = results(out, "small_things")
    assert len({result["digest"] for result in found}) == 1
    assert found[0]["gradients"] == 40


def test_layers_are_frozen_and_freed(out: Path) -> None:
    first, *others = [np.array(result["tuned"]) for result in results(out, "small_things")]
    assert all(np.array_equal(tuned, first) for tuned in others)
    changed = first[1:] != first[:-1]
    assert changed[:, :56].any(1).tolist() == [False, True, True, True]
    assert changed[:, 56:].any(1).tolist() == [True, True, False, False]


def test_refusals_say_what_and_what_instead(out: Path) -> None:
    for result in results(out, "refuses"):
        for expected, message in result.items():
            assert expected in message


def test_a_collective_inside_the_epoch_is_refused(out: Path) -> None:
    if out.parent.name.startswith("ad_psgd-horovodrun"):
        pytest.skip("horovodrun does not let the other ranks tell")
    for result in results(out, "refuses_inside"):
        assert "inside the epoch" in result["message"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": "star"}, "choose ring, exponential, bipartite"),
        ({"resync_every": 0}, "resync_every=0"),
        ({"resync_every": "often"}, "resync_every='often'"),
        ({"gradients_per_epoch": 0}, "gradients_per_epoch=0"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(dsgd.ConfigurationError, match=message):
        dsgd.ADPSGDStrategy(**arguments)
