"""Who leaves an epoch alone is found, in whatever order the ranks' words come; nobody else is."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from lightning_dsgd.workers.departures import Departures

Word = tuple[int, str, int]


def told(words: Iterable[Word], workers: int) -> str | None:
    departures = Departures(workers)
    acts = {"leaves": departures.leaves, "goes on": departures.goes_on}
    answers = (acts[what](worker, version) for worker, what, version in words)
    return next((answer for answer in answers if answer is not None), None)


@st.composite
def runs(draw: st.DrawFn, alone: bool) -> tuple[int, int, list[Word]]:
    """Workers, who leaves alone, and all words; a worker may be late and skip any gradient."""
    workers = draw(st.integers(2, 5))
    ends = sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=3)))
    loner = draw(st.integers(0, workers - 1))
    said: list[list[Word]] = []
    for worker in range(workers):
        words: list[Word] = []
        for first, end in zip([0, *ends], ends, strict=False):
            mine = range(first, end) if alone else draw(_some_of(first, end))
            words += [(worker, "goes on", version) for version in mine]
            words.append((worker, "leaves", end))
        said.append(words)
    if alone:
        leaves = draw(st.integers(0, ends[-1] - 1))
        before = [
            word for word in said[loner] if word[2] < leaves or word[1:] == ("leaves", leaves)
        ]
        said[loner] = [*before, (loner, "leaves", leaves)]
    return workers, loner, draw(_merged(said))


@st.composite
def _some_of(draw: st.DrawFn, first: int, end: int) -> list[int]:
    return [version for version in range(first, end) if draw(st.booleans())]


@st.composite
def _merged(draw: st.DrawFn, said: list[list[Word]]) -> list[Word]:
    """Each worker's words in order, and any order between them."""
    order = draw(st.permutations([w for w, words in enumerate(said) for _ in words]))
    queues = [iter(words) for words in said]
    return [next(queues[worker]) for worker in order]


@given(runs(alone=False))
def test_ranks_that_leave_together_are_left_in_peace(run: tuple[int, int, list[Word]]) -> None:
    workers, _, words = run
    assert told(words, workers) is None


@given(runs(alone=True))
def test_who_leaves_sooner_is_named(run: tuple[int, int, list[Word]]) -> None:
    workers, loner, words = run
    reason = told(words, workers)
    assert reason is not None
    assert reason.startswith(f"rank {loner} has left its epoch after update ")


def test_several_are_named_together() -> None:
    words = [(1, "leaves", 3), (3, "leaves", 3), (0, "goes on", 2), (2, "goes on", 3)]
    reason = told(words, 4)
    assert reason is not None
    assert reason.startswith("rank 1, 3 have left their epoch after update 3")


def test_who_only_replays_is_found_when_it_leaves() -> None:
    words = [(0, "leaves", 3), (1, "leaves", 5)]
    reason = told(words, 2)
    assert reason is not None and reason.startswith("rank 0 has left its epoch after update 3")
