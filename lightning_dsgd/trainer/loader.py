"""Epochs counted in rounds: a loader that asks, item by item, whether a batch is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol

from torch.utils.data import SequentialSampler

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.trainer.refusals import by_rank, refuse_empty_batch
from lightning_dsgd.trainer.worlds import Trainer


class TurnKeeper(Protocol):
    """Who decides what the next Lightning iteration is for."""

    def begin_epoch(self) -> None:
        """Called once, before the first iteration."""

    def begin_iteration(self) -> bool:
        """True if the iteration needs a fresh batch, False if it only replays an update."""


class RoundsLoader:
    """Wraps a rank's training loader.

    - It lasts for a given number of iterations, the same on every rank.
    - When a fast rank runs out of its shard, the shard starts over, shuffled anew.
    - An iteration that only replays an update sees a batch that stays for later: nothing is
    consumed.
    """

    def __init__(self, loader: Any, length: int, keeper: TurnKeeper) -> None:
        self.loader = loader
        self._length = length
        self._keeper = keeper
        self._epoch = 0
        self._restarts = 0
        self._source: Iterator[Any] | None = None
        self._next: list[Any] = []

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet while unpickling or copying
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts an epoch of its own; an iterator cannot be copied."""
        return {**vars(self), "_source": None, "_next": []}

    @property
    def _iterator(self) -> Any:
        """Lightning sets it to None to end a DataLoader's persistent workers."""
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self.loader._iterator = value

    def __iter__(self) -> Iterator[Any]:
        self._source, self._next, self._restarts = None, [], 0
        self._keeper.begin_epoch()
        for _ in range(self._length):
            yield self.take() if self._keeper.begin_iteration() else self.peek()

    def peek(self) -> Any:
        """The next batch, which stays the next."""
        if not self._next:
            self._next.append(self._batch())
        return self._next[0]

    def take(self) -> Any:
        """The next batch."""
        return self._next.pop() if self._next else self._batch()

    def _batch(self) -> Any:
        batch = self._fetch()
        refuse_empty_batch(batch)
        return batch

    def _fetch(self) -> Any:
        if self._source is None:
            self._source = iter(self.loader)
        try:
            return next(self._source)
        except StopIteration:
            self._start_over()
        try:
            return next(self._source)
        except StopIteration:
            raise ConfigurationError("the training loader of this rank is empty") from None

    def _start_over(self) -> None:
        self._restarts += 1
        set_epoch = _sampler_epoch(self.loader)
        if set_epoch is not None:
            # far from any epoch number in use, so that no order is seen twice
            set_epoch(_current_epoch(self.loader) + 1_000_003 * self._restarts)
        self._source = iter(self.loader)


def _sampler(loader: Any) -> Any:
    sampler = getattr(loader, "sampler", None)
    if not hasattr(sampler, "set_epoch"):
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return sampler


def _sampler_epoch(loader: Any) -> Callable[[int], None] | None:
    return getattr(_sampler(loader), "set_epoch", None)


def _current_epoch(loader: Any) -> int:
    return int(getattr(_sampler(loader), "epoch", 0)) % 1_000_003


def keeps_order(loader: Any) -> bool:
    """Does it give the same batches in every epoch? Only where that is plain to see."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is not None and not hasattr(batches, "sampler"):
        return False  # somebody's own, whose order is its business
    sampler = _sampler(loader)
    return isinstance(sampler, SequentialSampler) or getattr(sampler, "shuffle", None) is False


def local_length(loader: Any, limit: int | float | None) -> int | None:
    """This rank's batches per epoch; an endless loader has as many as the Trainer's limit says."""
    if isinstance(loader, Sized) and _has_length(loader):
        return len(loader)
    return limit if isinstance(limit, int) else None


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True


def agreed_length(lengths: list[int | None]) -> int:
    """The common length of all ranks' shards; a clear refusal where there is none."""
    if None in lengths:
        raise ConfigurationError(
            "the training data has no length, so an epoch has no number of updates; give "
            "`rounds_per_epoch` to the strategy, or limit_train_batches as a number to the Trainer"
        )
    if len(set(lengths)) > 1:
        raise ConfigurationError(
            f"the ranks' training data differ in length ({by_rank(lengths)}); give every rank the "
            "same number of batches, or set `rounds_per_epoch` on the strategy"
        )
    length = lengths[0]
    assert length is not None
    return length


def require_one_loader(trainer: Trainer) -> None:
    """Refuse several training dataloaders: their batches could not be dealt out one by one."""
    loaders = trainer.fit_loop._combined_loader
    if loaders is not None and len(loaders.flattened) != 1:
        raise ConfigurationError(
            f"training takes one dataloader and there are {len(loaders.flattened)}; combine them "
            "into one dataset"
        )
