"""The graphs of AD-PSGD: connected, bipartite, and as fast as their spectral gap says."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_dsgd import ConfigurationError
from lightning_dsgd.workers.topology import NAMES, Topology, is_active, make_topology

SIZES = [2, 3, 4, 5, 6, 7, 8, 9, 16, 33]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_every_edge_joins_an_active_to_a_passive_rank(name: str, size: int) -> None:
    graph = make_topology(name, size)  # refuses itself if it is not connected
    assert all(is_active(a) != is_active(b) for a, b in graph.edges)
    assert all(graph.neighbours(rank) for rank in range(size))
    assert graph.active == list(range(0, size, 2))


def test_neighbours_as_documented() -> None:
    assert make_topology("ring", 6).edges == [(0, 1), (0, 5), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert make_topology("ring", 5).edges == [(0, 1), (1, 2), (2, 3), (3, 4)]  # a line
    assert make_topology("exponential", 16).neighbours(0) == [1, 3, 5, 7, 9, 11, 13, 15]
    assert make_topology("exponential", 32).neighbours(0) == [1, 3, 5, 9, 15, 17, 23, 27, 29, 31]
    assert make_topology("bipartite", 7).neighbours(2) == [1, 3, 5]


def test_what_cannot_work_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigurationError, match="at least 2 ranks"):
        make_topology("ring", 1)
    with pytest.raises(ConfigurationError, match="choose ring, exponential, bipartite"):
        make_topology("star", 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="not connected: rank 2"):
        Topology(4, [(0, 1), (2, 3)])
    with pytest.raises(ConfigurationError, match="joins two active"):
        Topology(3, [(0, 1), (0, 2)])
    with pytest.raises(ConfigurationError, match="no edge"):
        Topology(3, [(0, 1), (1, 5)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_mixing_keeps_the_mean_and_contracts(name: str, size: int) -> None:
    graph = make_topology(name, size)
    mixing = graph.mixing()
    assert np.allclose(mixing, mixing.T) and np.allclose(mixing.sum(0), 1.0)
    assert 0.0 < graph.spectral_gap() <= 1.0 + 1e-12


def test_known_gaps() -> None:
    assert make_topology("ring", 2).spectral_gap() == pytest.approx(1.0)  # at once
    # four ranks on a ring: each edge with chance 1/4, the cycle's Laplacian has 0, 2, 2, 4
    assert make_topology("ring", 4).spectral_gap() == pytest.approx(0.25)
    gaps = [make_topology(name, 32).spectral_gap() for name in NAMES]
    assert gaps == sorted(gaps), "more edges mix faster"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [3, 4, 8])
def test_random_exchanges_contract_at_the_predicted_rate(name: str, size: int) -> None:
    """From the slowest direction: exactly the gap at first, and never slower on average."""
    graph = make_topology(name, size)
    slowest = np.linalg.eigh(graph.mixing())[1][:, -2]
    rng = np.random.default_rng(1)
    steps, runs = 8, 3000
    models = np.tile(slowest, (runs, 1))
    squares = []
    for _ in range(steps):
        for x in models:
            start = graph.active[rng.integers(len(graph.active))]
            ends = graph.neighbours(start)
            pair = [start, ends[rng.integers(len(ends))]]
            x[pair] = x[pair].mean()
        squares.append(np.square(models).sum(1).mean())
    factor = 1.0 - graph.spectral_gap()
    assert squares[0] == pytest.approx(factor, rel=0.05)
    assert squares[-1] <= 1.25 * factor**steps
