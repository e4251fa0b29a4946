"""How ranks meet: by a secret, if the job has one, and only if they belong together."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from lightning_dsgd.backends import on_torch
from lightning_dsgd.backends.meeting import FAILED, Meeting
from lightning_dsgd.backends.seal import SECRET, SECRET_FILE, Seal, this_seal
from lightning_dsgd.cli.doctor import Report, as_text, describe_secret
from lightning_dsgd.control.alarm import Alarm
from lightning_dsgd.control.cards import Card, check_cards, decode_card, encode_card
from lightning_dsgd.errors import ConfigurationError, PeerFailedError, RunError
from tests.launching import results
from tests.ranks.meeting import OTHER

SCENARIOS = ["meeting.mismatches", "meeting.secrets"]
MISMATCHES = {
    "strategies": ("k_async", "k_sync"),
    "arguments": ("'k': 2", "'k': 3"),
    "a trace on one": ("'trace': False", "'trace': True"),
    "comparing": ("'compare_every': 100", "'compare_every': 0"),
    "timeouts": ("'timeout': 50.0", "'timeout': 60.0"),
}
"""What is said of the others, and of the one."""
CARD = Card(
    "0.1.0", 1, "fit", "Module, max_epochs=3", "k_sync", "{'k': 2}", "host", "127.0.0.1", b"key"
)


def test_a_card_comes_back_as_it_was() -> None:
    assert decode_card(encode_card(CARD)) == CARD


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("version", "0.2.0", "different versions"),
        ("trainings", 2, "different trainings"),
        ("doing", "test", "different functions"),
        ("task", "Other, max_epochs=3", "train different things"),
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
    with pytest.raises(RunError, match=SECRET):
        none.open(ours.close(b"words"))
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
    (tmp_path / "empty").write_text("\n")
    for name, why in (("missing", "cannot be read"), ("empty", "is empty")):
        monkeypatch.setenv(SECRET_FILE, str(tmp_path / name))
        with pytest.raises(ConfigurationError, match=why):
            this_seal()


def test_the_doctor_says_whether_there_is_a_secret() -> None:
    for name in (SECRET, SECRET_FILE):
        assert describe_secret({name: "anything"}) == "set"
        assert describe_secret({name: ""}) == describe_secret({"HOME": "/"})
    without = describe_secret({"HOME": "/"})
    assert SECRET in without and "SECURITY.md" in without
    lines = as_text(Report(secret=without)).splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines if "secret" in line] == [without]


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
        self._meeting = Meeting(store, 0, rank, 2, 20.0)
        self.seal = self._meeting.seal = seal
        self._device, self._patience = torch.device("cpu"), 20.0
        self._store, self._channels, self._opened = self._meeting.store, [], 0
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


WORD = "rank 1 failed: ValueError: oh"


def _waiting_for(word: Callable[[Rank], object], secrets: tuple[str, str]) -> RunError:
    """What rank 0 says, which waits for the card of a rank that leaves this instead."""

    def meet(backend: Rank) -> object:
        if backend.rank == 1:
            return word(backend)
        began = time.monotonic()
        try:
            return backend.introduce(b"card")
        finally:
            assert time.monotonic() - began < 10.0, "of the 20 seconds that it would wait"

    waited, _ = _two(secrets, meet)
    assert isinstance(waited, RunError)
    return waited


def test_who_fails_before_it_has_shown_its_card_leaves_word() -> None:
    same = ("the job's own secret",) * 2
    error = _waiting_for(lambda rank: rank.give_word(ValueError("oh")), same)
    assert isinstance(error, PeerFailedError) and str(error) == WORD
    error = _waiting_for(lambda rank: rank.give_word(ValueError("oh\x1b[2J" + "h" * 9999)), same)
    assert str(error).startswith(f"{WORD} [2Jhhh") and len(str(error)) == 500


def test_a_strangers_word_is_not_read() -> None:
    guess = ("the job's own secret", "a stranger's guess")
    error = _waiting_for(lambda rank: rank.give_word(ValueError("oh")), guess)
    assert SECRET in str(error) and WORD not in str(error)


def test_who_cannot_read_the_secret_leaves_word_too(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(on_torch, "_store", lambda *_: store)
    monkeypatch.setattr(on_torch, "_JOBS", itertools.repeat(0))

    def connect(rank: int) -> None:
        on_torch.TorchBackend(rank, 2, "", 1, torch.device("cpu"), Alarm(), 20.0)

    monkeypatch.setenv(SECRET, "short")
    with pytest.raises(ConfigurationError, match="5 characters"):
        connect(1)
    monkeypatch.setenv(SECRET, "the job's own secret")
    with pytest.raises(RunError, match=SECRET):
        connect(0)


def test_a_rank_that_is_a_training_behind_is_told_and_tells() -> None:
    """Rank 1 has missed the training that rank 0 is at."""
    store = dist.HashStore()
    ahead, behind = Meeting(store, 2, 0, 2, 20.0), Meeting(store, 1, 1, 2, 20.0)
    with pytest.raises(ConfigurationError, match=r"different trainings .*rank 0: 3, rank 1: 2"):
        behind.introduce(b"card", Alarm())
    with pytest.raises(PeerFailedError, match=r"rank 1 failed: .*rank 0: 3, rank 1: 2"):
        ahead.introduce(b"card", Alarm())


def test_what_the_others_find_by_themselves_is_no_word() -> None:
    def work(backend: Rank) -> bool:
        backend.give_word(RunError("time is up"))
        return backend._store.check([FAILED])

    assert _two(("the job's own secret",) * 2, work) == [False, False]


@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_do_not_belong_together_are_refused_on_all(launched: Path, what: str) -> None:
    ends = [found[what] for found in results(launched, "meeting.mismatches")]
    assert len(set(ends)) == 1
    differ = "different strategies" if what == "strategies" else "made their strategies with"
    assert ends[0].startswith(f"ConfigurationError: the ranks have {differ}")
    parts = ends[0].split("rank ")[1:]
    for rank, part in enumerate(parts[:4]):
        assert part.startswith(f"{rank}: "), ends[0]
        assert MISMATCHES[what][rank == OTHER] in part, ends[0]


@pytest.mark.parametrize("how", ["different", "one has none", "one has one"])
def test_ranks_with_different_secrets_are_refused(launched: Path, how: str) -> None:
    for found in results(launched, "meeting.secrets"):
        assert found[how].startswith("RunError: a message does not come from a rank of this job")
        assert SECRET in found[how]


def test_ranks_with_one_secret_train(launched: Path) -> None:
    ends = {found["same"] for found in results(launched, "meeting.secrets")}
    assert len(ends) == 1 and ends.pop().startswith("finished ")
