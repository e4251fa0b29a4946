"""Slow workers on demand: the rules, alone and in a Trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_dsgd import ConfigurationError, Stragglers
from tests.ranks.toy import Toy, loader, trainer_for


def pauses(
    stragglers: Stragglers, rank: int, steps: int = 200, computed: float = 0.1
) -> np.ndarray:
    return np.array([stragglers.pause(rank, 4, step, computed) for step in range(steps)])


def test_a_factor_multiplies_what_computing_takes() -> None:
    slow = Stragglers().slow(rank=3, factor=10, seconds=0.5)
    assert slow.pause(3, 4, 0, 0.1) == pytest.approx(9 * 0.1 + 0.5)
    assert slow.pause(2, 4, 0, 0.1) == 0.0


def test_ranks_may_be_counted_from_the_last() -> None:
    slow = Stragglers().slow(rank=-1, factor=3).recorded([0.5], ranks=[-2])
    assert [slow.pause(rank, 4, 0, 0.1) for rank in range(4)] == pytest.approx([0, 0, 0.5, 0.2])


def test_a_rule_for_a_rank_that_is_not_there_is_refused() -> None:
    slow = Stragglers().slow(rank=1).exponential(0.1, ranks=[4])
    trainer = trainer_for("auto", [slow], devices=1, max_epochs=1)
    with pytest.raises(ConfigurationError, match="no rank 1 among 1 workers"):
        trainer.fit(Toy(), loader())


def test_random_pauses_have_their_mean_and_follow_the_seed() -> None:
    first = pauses(Stragglers(seed=1).exponential(0.1), 0, 4000)
    assert first.mean() == pytest.approx(0.1, rel=0.1)
    np.testing.assert_array_equal(first, pauses(Stragglers(seed=1).exponential(0.1), 0, 4000))
    assert not np.array_equal(first, pauses(Stragglers(seed=2).exponential(0.1), 0, 4000))
    assert not np.array_equal(first, pauses(Stragglers(seed=1).exponential(0.1), 1, 4000))
    tail = pauses(Stragglers(seed=1).pareto(2.5, 0.01, ranks=[1]), 1, 4000)
    assert tail.min() >= 0.01 and tail.max() > 0.05


def test_two_ranks_at_random_in_each_step() -> None:
    chosen = Stragglers(seed=3).random_pair(0.2)
    for step in range(50):
        slow = {rank for rank in range(4) if chosen.pause(rank, 4, step, 0.0) == 0.2}
        assert len(slow) == 2 and slow == set(chosen.pair(step, 4))
    assert len({chosen.pair(step, 4) for step in range(50)}) > 3


def test_recorded_pauses_come_in_order_and_again() -> None:
    slow = Stragglers().recorded([0.1, 0.3, 0.2], ranks=[0])
    assert list(pauses(slow, 0, 5)) == [0.1, 0.3, 0.2, 0.1, 0.3]


def test_rules_from_yaml_are_the_same_object() -> None:
    rules: list[dict[str, Any]] = [
        {"kind": "slow", "rank": 1, "factor": 2},
        {"kind": "exponential", "mean": 0.1},
    ]
    again = Stragglers(seed=4).slow(rank=1, factor=2).exponential(0.1)
    np.testing.assert_array_equal(pauses(Stragglers(rules, seed=4), 1), pauses(again, 1))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"kind": "sleepy"}, "'sleepy' is unknown"),
        ({"kind": "slow", "rnk": 1}, "rnk"),
        ({"kind": "slow", "rank": 1, "factor": 0.5}, "factor=0.5"),
        ({"kind": "exponential", "mean": -1.0}, "exponential"),
        ({"kind": "recorded", "seconds": []}, "at least one"),
        ({"kind": "recorded", "seconds": "x"}, "recorded"),
        ({"kind": "random_pair", "seconds": -1.0}, "seconds=-1.0"),
        ({"kind": "slow", "rank": "3"}, "rank='3'"),
        ({"kind": "exponential", "mean": 0.1, "ranks": [1.5]}, "rank=1.5"),
        ("slow", "no mapping"),
    ],
)
def test_bad_rules_are_refused(rule: Any, text: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        Stragglers([rule])
    assert text in str(error.value)
