"""Who gave how much: the running count of a run's decisions, per worker."""

from __future__ import annotations

from typing import Any

import msgspec

from lightning_dsgd.workers.messages import (
    Applied,
    Contribution,
    Decision,
    Dropped,
    Event,
    Held,
    Passed,
    Round,
)


class WorkerTally(msgspec.Struct):
    """One worker's share of the run."""

    contributions: int = 0
    computed: int = 0
    cancelled: int = 0
    cancelled_seconds: float = 0.0
    used: int = 0
    batches: int = 0
    dropped: int = 0
    nonfinite: int = 0
    passed: int = 0
    held: int = 0
    seconds: float = 0.0
    staleness: int = 0
    max_staleness: int = 0

    @property
    def mean_seconds(self) -> float:
        """Mean time this worker took for a mini-batch that it finished."""
        return self.seconds / self.computed if self.computed else float("nan")

    def pace(self) -> str:
        """Seconds per gradient; of those that were all cancelled, what is known at least."""
        if self.computed:
            return f"{self.mean_seconds:.4f}"
        return f">{self.cancelled_seconds / self.cancelled:.4f}" if self.cancelled else "-"

    @property
    def mean_staleness(self) -> float:
        """Mean age, in updates, of its contributions when they were used."""
        return self.staleness / self.used if self.used else 0.0


class Tally:
    """Counts events and decisions as they pass."""

    def __init__(self, workers: int) -> None:
        self.workers = [WorkerTally() for _ in range(workers)]
        self.rounds = 0
        self.foreign = 0
        """Connections and messages that were not ours, and were dropped."""

    def event(self, event: Event) -> None:
        """Count what a worker announced."""
        if isinstance(event, Contribution):
            worker = self.workers[event.worker]
            worker.contributions += 1
            worker.computed += len(event.seconds)
            worker.seconds += sum(event.seconds)
            worker.nonfinite += not event.finite
        elif isinstance(event, Applied):
            worker = self.workers[event.worker]
            worker.cancelled += len(event.cancelled)
            worker.cancelled_seconds += sum(event.cancelled)

    def decision(self, decision: Decision) -> None:
        """Count what was decided."""
        if isinstance(decision, Round):
            self._round(decision)
        elif isinstance(decision, Dropped):
            self.workers[decision.worker].dropped += 1
        elif isinstance(decision, Passed):
            self.workers[decision.worker].passed += 1
        elif isinstance(decision, Held):
            self.workers[decision.worker].held += 1

    def _round(self, decision: Round) -> None:
        self.rounds += 1
        parts = zip(decision.workers, decision.batches, decision.staleness(), strict=True)
        for rank, batches, staleness in parts:
            worker = self.workers[rank]
            worker.used += 1
            worker.batches += batches
            worker.staleness += staleness
            worker.max_staleness = max(worker.max_staleness, staleness)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for a report or a file."""
        return {
            "rounds": self.rounds,
            "foreign": self.foreign,
            "workers": [msgspec.to_builtins(worker) for worker in self.workers],
        }

    def table(self) -> str:
        """The run at a glance: who was slow, whose work was used."""
        head = (
            f"{'rank':>4}  {'s/gradient':>10}  {'used':>6}  {'dropped':>7}  {'cancelled':>9}  "
            f"{'mini-batches':>12}  {'mean staleness':>14}"
        )
        odd = any(worker.nonfinite for worker in self.workers)
        head += f"  {'not finite':>10}" * odd
        lines = [f"{self.rounds} updates", head]
        for rank, worker in enumerate(self.workers):
            lines.append(
                f"{rank:>4}  {worker.pace():>10}  {worker.used:>6}  {worker.dropped:>7}  "
                f"{worker.cancelled:>9}  "
                f"{worker.batches:>12}  {worker.mean_staleness:>14.2f}"
                + f"  {worker.nonfinite:>10}"
                * odd
            )
        return "\n".join(lines)
