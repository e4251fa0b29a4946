"""What outlives what: groups a fork, a store the training it was made for, a failure its cure."""

from __future__ import annotations

import subprocess
import sys

from tests.launching import ROOT, environment

FORK = """
import gc, os, weakref
os.register_at_fork(after_in_child=lambda: gc.collect())  # first of all, as it may happen
import torch
from lightning_dsgd.alarm import Alarm
from lightning_dsgd.backends import on_torch

store = torch.distributed.HashStore()
on_torch._store = lambda *rest: store
backend = on_torch.TorchBackend(0, 1, "", 1, torch.device("cpu"), Alarm(), 60.0)
backend.channel("main").sum_(torch.ones(3))
backend.itself, seen = backend, weakref.ref(backend)
gc.disable()
del backend  # garbage from here on, not collected yet
if (child := os.fork()) == 0:
    os._exit(0 if seen() is not None else 7)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
gc.collect()
print("child", code, "parent", seen() is None)
"""


def said(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_childs_garbage_collector_leaves_groups_alone() -> None:
    """Such as a DataLoader's worker's: it has no threads for them."""
    assert said(FORK) == ["child", "0", "parent", "True"]


STORE = """
import gc, socket, threading
from lightning_dsgd.backends import on_torch

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
first = on_torch._store("127.0.0.1", port, 0, 2, 60.0)   # rank 0's first training
ahead = on_torch._store("127.0.0.1", port, 1, 2, 60.0)   # rank 1 is at its second already
answer = []
waiting = threading.Thread(target=lambda: answer.append(ahead.get("second")))
waiting.start()
del first
gc.collect()
second = on_torch._store("127.0.0.1", port, 0, 2, 60.0)
second.set("second", "training")
waiting.join(30)
print(answer[0].decode())
"""


def test_a_rank_may_be_a_training_ahead_of_rank_0() -> None:
    assert said(STORE) == ["training"]


MEETING = """
import socket
from lightning_dsgd.backends import on_torch

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
for rank in (1, 0):  # nobody is there; then rank 0 is, alone
    try:
        store = on_torch._store("127.0.0.1", port, rank, 4, 1.0)
        on_torch._own_address(store, 0, 4, "127.0.0.1", 1.0)
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_ranks_that_do_not_come_are_named() -> None:
    nowhere, alone = " ".join(said(MEETING)).split("RoundTimeoutError: ")
    assert nowhere.startswith("RunError: rank 1: ranks cannot meet at 127.0.0.1:")
    assert alone == "rank 0 has waited 1 s for rank 1, 2, 3 to start"


EXIT = """
import os, sys
from lightning_dsgd import strategy

def code(*before):
    if (child := os.fork()) == 0:
        for act in before:
            act()
        strategy._leave()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def fail():
    strategy._exit_without_destructors([])

def raise_at_the_end():
    sys.last_value = ValueError()

print(code(fail), code(fail, strategy.all_is_well),
      code(fail, strategy.all_is_well, raise_at_the_end))
"""


def test_a_failure_that_was_handled_does_not_fail_the_program() -> None:
    assert said(EXIT) == ["1", "0", "1"]
