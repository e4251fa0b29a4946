"""What ranks tell each other when they meet, and what must be the same on all of them.

Ranks that are not at the same training of their programs, or train by different rules, would
exchange gradients that do not belong together, and never notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from lightning_dsgd.errors import ConfigurationError

_SAME = {
    "version": "have different versions of lightning-dsgd",
    "trainings": "are at different trainings of their programs",
    "doing": "are at different functions of the Trainer",
    "task": "train different things",
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
    task: str
    """The module's class, and for how long it is trained."""
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
    for name in _SAME:
        values = {rank: getattr(card, name) for rank, card in enumerate(cards)}
        if len(set(values.values())) > 1:
            raise mismatch(name, values)


def mismatch(name: str, values: Mapping[int, object]) -> ConfigurationError:
    """These ranks' cards differ there."""
    by_rank = ", ".join(f"rank {rank}: {value}" for rank, value in sorted(values.items()))
    return ConfigurationError(
        f"the ranks {_SAME[name]} ({by_rank}); let every rank run the same program, and after a "
        "failure that it handles go on at the same point"
    )
