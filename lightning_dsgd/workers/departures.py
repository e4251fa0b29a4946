"""Does anybody leave an epoch alone? Pure: who has left and who goes on in, the reason to end out.

All ranks leave an epoch after the same update. One that leaves sooner would be waited for: an
exception that Lightning takes for the end of the data does that, or a flag that one rank alone has
set. What one rank says comes in order; between ranks any order is possible.
"""

from __future__ import annotations

from collections.abc import Mapping

_REMEDY = (
    "look there for a StopIteration (a bare `next(...)`, in the dataset too), a -1 from "
    "on_train_batch_start, or a trainer.should_stop that is not set on all ranks at once, by what "
    "trainer.strategy.reduce_boolean_decision says"
)


class Departures:
    """Every worker's way from epoch to epoch."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._epoch = [0] * workers
        """How many each has left."""
        self._begun = [-1] * workers
        """The version at which each has last begun a gradient."""
        self._left: dict[int, dict[int, int]] = {}
        """Epoch by epoch, who has left it at which version, until all have."""

    def goes_on(self, worker: int, version: int) -> str | None:
        """It has begun a gradient at that version; what is wrong, if anything."""
        self._begun[worker] = version
        left = self._left.get(self._epoch[worker], {})
        return _alone({other: at for other, at in left.items() if at <= version})

    def leaves(self, worker: int, version: int) -> str | None:
        """It has left its epoch, and stands at that version; what is wrong, if anything."""
        epoch = self._epoch[worker]
        self._epoch[worker] += 1
        left = self._left.setdefault(epoch, {})
        left[worker] = version
        if len(left) == self._workers:
            del self._left[epoch]
        stay = (self._begun[other] for other in range(self._workers) if other not in left)
        farthest = max([*stay, *(at - 1 for at in left.values())])
        return _alone({other: at for other, at in left.items() if at <= farthest})


def _alone(left: Mapping[int, int]) -> str | None:
    """Of those who have left too soon."""
    if not left:
        return None
    ranks = ", ".join(str(rank) for rank in sorted(left))
    has = "has left its" if len(left) == 1 else "have left their"
    at = min(left.values())
    return f"rank {ranks} {has} epoch after update {at}, and others go on; {_REMEDY}"
