"""How ranks meet: by a secret, if the job has one, and only if they belong together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from lightning_dsgd.backends import on_torch
from lightning_dsgd.backends.seal import SECRET, SECRET_FILE, Seal, this_seal
from lightning_dsgd.control.alarm import Alarm
from lightning_dsgd.control.cards import Card, check_cards, decode_card, encode_card
from lightning_dsgd.errors import ConfigurationError, RunError

CARD = Card("0.1.0", 1, "fit", "k_sync", "{'k': 2}", "host", "127.0.0.1", b"key")


def test_a_card_comes_back_as_it_was() -> None:
    assert decode_card(encode_card(CARD)) == CARD


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("version", "0.2.0", "different versions"),
        ("trainings", 2, "different trainings"),
        ("doing", "test", "different functions"),
        ("strategy", "k_async", "different strategies"),
        ("arguments", "{'k': 3}", "different arguments"),
    ],
)
def test_ranks_that_do_not_belong_together_are_told(field: str, value: object, said: str) -> None:
    check_cards([CARD, CARD, msgspec.structs.replace(CARD, address="10.0.0.2", key=b"other")])
    other = msgspec.structs.replace(CARD, **{field: value})
    with pytest.raises(ConfigurationError, match=rf"{said}.*rank 2: {value}"):
        check_cards([CARD, CARD, other])


def test_only_who_has_the_secret_is_read() -> None:
    ours, theirs, none = Seal(b"0123456789abcdef"), Seal(b"fedcba9876543210"), Seal(None)
    assert ours.open(ours.close(b"words")) == b"words" and none.open(b"words") == b"words"
    assert ours and not none
    for forged in (b"words", b"", theirs.close(b"words"), ours.close(b"words")[:-1] + b"z"):
        with pytest.raises(RunError, match=SECRET):
            ours.open(forged)


def test_the_environment_says_which_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    assert not this_seal()
    monkeypatch.setenv(SECRET, "short")
    with pytest.raises(ConfigurationError, match="at least 16"):
        this_seal()
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    monkeypatch.setenv(SECRET_FILE, str(tmp_path / "secret"))
    assert this_seal().open(Seal(b"0123456789abcdef").close(b"x")) == b"x"
    monkeypatch.setenv(SECRET_FILE, str(tmp_path / "missing"))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        this_seal()


class Touch:
    """What a stranger would send."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.file,)


class Rank(on_torch.TorchBackend):
    """One whose secret is not the environment's."""

    def __init__(self, rank: int, store: dist.Store, seal: Seal) -> None:
        on_torch.Backend.__init__(self, rank, 2, Alarm(), 20.0)
        self.seal = seal
        self._device, self._patience, self._store = torch.device("cpu"), 20.0, store
        self._cards, self._channels, self._opened = [], [], 0
        self._gloo_devices = [on_torch._device("127.0.0.1")]


def _two(secrets: tuple[str, str], work: Callable[[Rank], Any]) -> list[Any]:
    """Two ranks in two threads over real groups, with a secret each."""
    store = dist.HashStore()
    found: list[Any] = [None, None]

    def rank(number: int, seal: Seal) -> None:
        try:
            found[number] = work(Rank(number, store, seal))
        except RunError as error:
            found[number] = error

    threads = [
        threading.Thread(target=rank, args=(number, Seal(secret.encode())))
        for number, secret in enumerate(secrets)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_a_strangers_object_is_never_unpickled(tmp_path: Path) -> None:
    """Somebody without the secret has taken rank 0's place."""
    victim = tmp_path / "touched"

    def broadcast(backend: Rank) -> object:
        channel = backend.channel("main")
        return channel.broadcast_object(Touch(victim) if backend.rank == 0 else None)

    _, ours = _two(("a stranger's guess", "the job's own secret"), broadcast)
    assert isinstance(ours, RunError) and not victim.exists()
    same = ("the job's own secret",) * 2
    _two(same, broadcast)
    assert victim.exists(), "with the secret it is Lightning's own object"


def test_whatever_ranks_send_each_other_arrives() -> None:
    def exchange(backend: Rank) -> object:
        channel, rank = backend.channel("main"), backend.rank
        cards = backend.introduce(f"card {rank}".encode())
        mixed = [torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16)][rank]
        empty = torch.zeros((0, 4) if rank else (2, 0))
        tensors = channel.gather_tensors(mixed) + channel.gather_tensors(empty)
        return cards, channel.gather_data([rank, None], list[int | None]), tensors

    first, second = _two(("the job's own secret",) * 2, exchange)
    for cards, data, tensors in (first, second):
        assert cards == [b"card 0", b"card 1"] and data == [[0, None], [1, None]]
        assert [t.dtype for t in tensors[:2]] == [torch.int64, torch.bfloat16]
        assert tensors[0].tolist() == [0, 1, 2] and tensors[1].shape == (2, 2)
        assert [t.shape for t in tensors[2:]] == [(2, 0), (0, 4)]
