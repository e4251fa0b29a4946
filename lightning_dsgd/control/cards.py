"""What ranks tell each other when they meet, and what must be the same on all of them.

Ranks that are not at the same training of their programs, or train by different rules, would
exchange gradients that do not belong together, and never notice.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lightning_dsgd.errors import ConfigurationError

_SAME = {
    "version": "have different versions of lightning-dsgd",
    "trainings": "are at different trainings of their programs",
    "doing": "are at different functions of the Trainer",
    "strategy": "have different strategies",
    "arguments": "have made their strategies with different arguments",
}


class Card(msgspec.Struct, frozen=True):
    """One rank's."""

    version: str
    trainings: int
    """How often this process has met others, this time included."""
    doing: str
    """The Trainer's function: fit, validate, test or predict."""
    strategy: str
    arguments: str
    network: str
    """Its place, see `backends.hosts`."""
    address: str
    key: bytes
    """Its public key for the control plane."""


encode_card = msgspec.msgpack.Encoder().encode
decode_card = msgspec.msgpack.Decoder(Card).decode


def check_cards(cards: Sequence[Card]) -> None:
    """Refuse, on every rank alike, what does not fit together, and say what it is."""
    for name, what in _SAME.items():
        values = [getattr(card, name) for card in cards]
        if len(set(values)) > 1:
            by_rank = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise ConfigurationError(
                f"the ranks {what} ({by_rank}); let every rank run the same program, and after a "
                "failure that it handles go on at the same point"
            )
