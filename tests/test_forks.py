"""A process that forks while it exchanges: the child does not hang."""

from __future__ import annotations

import os
import threading
import time

import torch
import torch.distributed as dist

from lightning_dsgd.backends import forks
from lightning_dsgd.backends.forks import FORKS
from lightning_dsgd.backends.seal import Seal
from tests.test_meeting import Rank

FORKED = 200


def fork() -> bool:
    """Has the child come to its end?"""
    child = os.fork()
    if child == 0:
        os._exit(0)
    deadline = time.monotonic() + 5.0
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return False
        time.sleep(1e-3)
    return True


def test_a_fork_waits_for_an_operation_but_not_for_long() -> None:
    for seconds in (0.03, 3 * forks._PATIENCE):
        begun, ended = threading.Event(), threading.Event()

        def operation(
            seconds: float = seconds, begun: threading.Event = begun, over: threading.Event = ended
        ) -> None:
            with FORKS.apart():
                begun.set()
                time.sleep(seconds)
                over.set()

        thread = threading.Thread(target=operation)
        thread.start()
        begun.wait()
        assert fork()
        assert ended.is_set() is (seconds < forks._PATIENCE)
        thread.join()


def test_an_operation_waits_for_a_fork() -> None:
    FORKS.before()
    begun = threading.Event()

    def operation() -> None:
        with FORKS.apart():
            begun.set()

    thread = threading.Thread(target=operation)
    thread.start()
    assert not begun.wait(0.2)
    FORKS.after()
    assert begun.wait(5.0)
    thread.join()


def test_children_do_not_hang_while_ranks_exchange() -> None:
    """Without keeping apart, one in a thousand does."""
    store, over, backends = dist.HashStore(), threading.Event(), []

    def exchange(rank: int) -> None:
        backend = Rank(rank, store, Seal(None))
        backends.append(backend)
        channel, more = backend.channel("rounds"), torch.ones(1)
        while more.item():
            channel.sum_(torch.zeros(4))
            more.fill_(not over.is_set())
            channel.sum_(more)
            more.fill_(more.item() == 2)

    threads = [threading.Thread(target=exchange, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        assert all(fork() for _ in range(FORKED))
    finally:
        over.set()
        for thread in threads:
            thread.join(20.0)
        for backend in backends:
            backend.close()
