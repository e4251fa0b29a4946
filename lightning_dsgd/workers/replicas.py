"""Are the replicas the same? Pure: checksums in, the reason to end the run out.

Nobody waits for a comparison: each rank tells its checksum when it gets to a version, and the last
one to tell completes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

_REMEDY = "change weights on all ranks alike, or on none"


class Replicas:
    """Collects what ranks tell, version by version."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._told: dict[int, dict[int, int]] = {}

    def compare(self, worker: int, version: int, checksum: int) -> str | None:
        """One rank's checksum at a version; what is wrong, once all have come and differ."""
        told = self._told.setdefault(version, {})
        told[worker] = checksum
        if len(told) < self._workers:
            return None
        return difference(version, self._told.pop(version))


def difference(version: int, checksums: Mapping[int, int]) -> str | None:
    """Which ranks differ from most of them; None where all are the same."""
    counts = Counter(checksums.values())
    if len(counts) == 1:
        return None
    (usual, most), (_, second) = counts.most_common(2)
    after = f"after update {version} the replicas are no longer the same"
    if most == second:
        return f"{after}: {_groups(checksums)}; {_REMEDY}"
    odd = [rank for rank, value in sorted(checksums.items()) if value != usual]
    differ = f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {_list(odd)} differ"
    return f"{after}: {differ} from the other {most}; {_REMEDY}"


def _groups(checksums: Mapping[int, int]) -> str:
    """Without a majority nobody can say who is right."""
    groups: dict[int, list[int]] = {}
    for rank, value in sorted(checksums.items()):
        groups.setdefault(value, []).append(rank)
    return " differs from ".join(f"rank {_list(ranks)}" for ranks in groups.values())


def _list(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
