"""Where ranks meet before they have a channel: the launcher's store, in which each leaves its card.

Each training of a process has a place of its own there, by its number. A rank that will not come
leaves word, for those who wait for it; one that the others do not wait for any more is told so.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch.distributed as dist

from lightning_dsgd.backends.seal import Seal
from lightning_dsgd.control.alarm import Alarm
from lightning_dsgd.control.cards import mismatch
from lightning_dsgd.errors import PeerFailedError, RoundTimeoutError, RunError

GLANCE = 0.02
"""Seconds between two looks while ranks wait for each other's cards."""
_LONG_GLANCE = 1.0
"""The same, at where the missing ones are."""
FAILED = "failed"
"""Under which a rank leaves word that it will not come, while others wait for its card."""
_LONGEST_WORD = 500
"""Characters of it."""


class Meeting:
    """One rank's, at one training."""

    def __init__(
        self, store: dist.Store, number: int, rank: int, world_size: int, patience: float
    ) -> None:
        self.seal = Seal(None)
        """For a word, should there be no secret where there must be one."""
        self._everybody = dist.PrefixStore("lightning-dsgd", store)
        self._everybody.set(f"at/{rank}", str(number))
        self.store = self._at(number)
        self._number = number
        self._rank, self._world_size = rank, world_size
        self._patience = patience
        self._cards: list[str] = []

    def _at(self, number: int) -> dist.Store:
        return dist.PrefixStore(str(number), self._everybody)

    def introduce(self, card: bytes, alarm: Alarm) -> list[bytes]:
        """All ranks' cards, in rank order."""
        keys = [f"card-{len(self._cards)}-{rank}" for rank in range(self._world_size)]
        self._cards.append(keys[self._rank])
        self.store.set(keys[self._rank], self.seal.close(card))  # type: ignore[arg-type]  # bytes, too
        self._await_cards(keys, alarm)
        return [self.seal.open(data) for data in self.store.multi_get(keys)]

    def _await_cards(self, keys: list[str], alarm: Alarm) -> None:
        began = time.monotonic()
        deadline, look = began + self._patience, began + _LONG_GLANCE
        while not self.store.check(keys):
            self._heed_word()
            time.sleep(GLANCE)
            alarm.check()
            if time.monotonic() > look:
                look += _LONG_GLANCE
                self._refuse_if_behind(self._missing(keys))
            if time.monotonic() > deadline:
                missing = ", ".join(map(str, self._missing(keys)))
                raise RoundTimeoutError(
                    f"rank {self._rank} has waited {self._patience:g} s for rank {missing} to start"
                )

    def _missing(self, keys: Sequence[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

    def _refuse_if_behind(self, missing: Sequence[int]) -> None:
        """Who is at a later training does not come to this one, and waits there in vain."""
        for rank in missing:
            there = self._everybody.check([f"at/{rank}"])
            number = int(self._everybody.get(f"at/{rank}")) if there else -1
            if number > self._number:
                error = mismatch("trainings", {self._rank: self._number + 1, rank: number + 1})
                self._leave_word(error, self._at(number))
                raise error

    def _heed_word(self) -> None:
        if self.store.check([FAILED]):
            word = self.seal.open(self.store.get(FAILED))[: 4 * _LONGEST_WORD]
            text = word.decode(errors="replace")[:_LONGEST_WORD]
            raise PeerFailedError("".join(c if c.isprintable() else " " for c in text))

    def give_word(self, error: BaseException) -> None:
        """What is no rank's own, such as a time that has run out, the others find by themselves."""
        if not isinstance(error, RunError):
            self._leave_word(error, self.store)

    def _leave_word(self, error: BaseException, store: dist.Store) -> None:
        text = f"rank {self._rank} failed: {type(error).__name__}: {error}"[:_LONGEST_WORD]
        with contextlib.suppress(Exception):
            store.set(FAILED, self.seal.close(text.encode()))  # type: ignore[arg-type]  # bytes, too
            time.sleep(5 * GLANCE)  # all have looked, should the store end with this process

    def withdraw(self) -> None:
        """Nobody is to meet this rank again. The store may be gone with rank 0, or stopped with it,
        and then no deadline of its own ends the wait."""
        for card in self._cards:
            with contextlib.suppress(Exception):
                self.store.delete_key(card)
