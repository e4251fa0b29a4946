"""Who averages with whom: graphs as arithmetic. Nothing here communicates.

Even ranks are *active* and start exchanges, odd ranks are *passive* and answer them. Every edge
joins an active rank to a passive one, so no two ranks can wait for each other in a circle.

============  ==========================================
name          an active rank's neighbours
============  ==========================================
ring          the ranks before and after it
exponential   those 1, 3, 5, 9, ... (2^k + 1) away
bipartite     every passive rank
============  ==========================================

With an odd number of ranks, the ring would join its last rank to rank 0, both of them active. That
edge, and any other of two ranks of one kind, is left out: the ring becomes a line, and every world
size works.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from lightning_dsgd.errors import ConfigurationError

TopologyName = Literal["ring", "exponential", "bipartite"]
NAMES: tuple[str, ...] = get_args(TopologyName)

Matrix = npt.NDArray[np.float64]


def is_active(rank: int) -> bool:
    """Does this rank start exchanges?"""
    return rank % 2 == 0


class Topology:
    """A connected graph between active and passive ranks."""

    def __init__(self, world_size: int, edges: Iterable[tuple[int, int]]) -> None:
        self.world_size = world_size
        self.edges = sorted({(min(edge), max(edge)) for edge in edges})
        self._neighbours: list[list[int]] = [[] for _ in range(world_size)]
        for a, b in self.edges:
            self._check(a, b)
            self._neighbours[a].append(b)
            self._neighbours[b].append(a)
        unreached = self._unreached()
        if unreached:
            raise ConfigurationError(
                f"the graph is not connected: rank {unreached[0]} is out of rank 0's reach, so "
                "their models would never meet"
            )

    def _check(self, a: int, b: int) -> None:
        if not 0 <= a < b < self.world_size:
            raise ConfigurationError(f"no edge ({a}, {b}) among {self.world_size} ranks")
        if is_active(a) == is_active(b):
            kind = "active (even)" if is_active(a) else "passive (odd)"
            raise ConfigurationError(f"the edge ({a}, {b}) joins two {kind} ranks")

    def _unreached(self) -> list[int]:
        found, frontier = {0}, [0]
        while frontier:
            new = set(self._neighbours[frontier.pop()]) - found
            found |= new
            frontier.extend(new)
        return sorted(set(range(self.world_size)) - found)

    @property
    def active(self) -> list[int]:
        """The ranks that start exchanges."""
        return [rank for rank in range(self.world_size) if is_active(rank)]

    def neighbours(self, rank: int) -> list[int]:
        """Whom this rank exchanges with."""
        return self._neighbours[rank]

    def mixing(self) -> Matrix:
        """The expected effect of one exchange: a random active rank, a random neighbour of it."""
        mean = np.eye(self.world_size)
        for start in self.active:
            for end in self._neighbours[start]:
                chance = 1.0 / (len(self.active) * len(self._neighbours[start]))
                mean -= chance * (
                    np.eye(self.world_size) - pair_mixing(self.world_size, start, end)
                )
        return mean

    def spectral_gap(self) -> float:
        """By what share one exchange shrinks the squared distance to the mean model, at least.

        A pair's averaging is a projection, so the expected square after it is a quadratic form in
        the expected mixing matrix, and that matrix's second eigenvalue bounds it.
        """
        return float(1.0 - np.linalg.eigvalsh(self.mixing())[-2])


def pair_mixing(world_size: int, a: int, b: int) -> Matrix:
    """The matrix that replaces two models by their mean and leaves the others."""
    matrix = np.eye(world_size)
    matrix[np.ix_([a, b], [a, b])] = 0.5
    return matrix


def make_topology(name: TopologyName, world_size: int) -> Topology:
    """The graph of that name on so many ranks."""
    if name not in NAMES:
        raise ConfigurationError(f"topology={name!r} is unknown; choose {', '.join(NAMES)}")
    if world_size < 2:
        raise ConfigurationError(f"a graph needs at least 2 ranks, and there are {world_size}")
    hops = _hops(name, world_size)
    ends = [(rank, (rank + hop) % world_size) for rank in range(0, world_size, 2) for hop in hops]
    return Topology(world_size, [(a, b) for a, b in ends if is_active(a) != is_active(b)])


def _hops(name: TopologyName, world_size: int) -> list[int]:
    """How far an active rank's neighbours are, in both directions."""
    if name == "ring":
        ahead = [1]
    elif name == "exponential":
        ahead = [1, *(2**k + 1 for k in range(1, world_size.bit_length()))]
    else:
        ahead = list(range(1, world_size))
    ahead = [hop for hop in ahead if hop < world_size]
    return [*ahead, *(-hop for hop in ahead)]
