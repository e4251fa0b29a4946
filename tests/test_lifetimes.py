"""What outlives what: groups a fork, a store the training it was made for, a failure its cure."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_dsgd.registry import algorithms
from lightning_dsgd.trainer import leaving
from tests.conftest import asked
from tests.launching import LAUNCHERS, ROOT, all_gone, command, environment, launch, results
from tests.ranks.lifetimes import ABSENT
from tests.ranks.toy import trainer_for

FORK = """
import gc, os, weakref
os.register_at_fork(after_in_child=lambda: gc.collect())  # first of all, as it may happen
import torch
from lightning_dsgd.control.alarm import Alarm
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
import torch
from lightning_dsgd.backends import on_torch
from lightning_dsgd.control.alarm import Alarm

on_torch.MEETING_SECONDS = 1.0
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
for rank in (1, 0):  # nobody is there; then rank 0 is, alone
    try:
        on_torch.TorchBackend(rank, 4, "127.0.0.1", port, torch.device("cpu"), Alarm(), 1.0)
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_ranks_that_do_not_come_are_named() -> None:
    nowhere, alone = " ".join(said(MEETING)).split("RoundTimeoutError: ")
    assert nowhere.startswith("RunError: rank 1: ranks cannot meet at 127.0.0.1:")
    assert alone == "rank 0 has waited 1 s for rank 1, 2, 3 to start"


EXIT = """
import os, sys
from lightning_dsgd.trainer import leaving

def code(*before):
    if (child := os.fork()) == 0:
        for act in before:
            act()
        leaving._leave()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def fail():
    leaving.exit_without_destructors()

def raise_at_the_end():
    sys.last_value = ValueError()

print(code(fail), code(fail, leaving.all_is_well),
      code(fail, leaving.all_is_well, raise_at_the_end))
"""


def test_a_failure_that_was_handled_does_not_fail_the_program() -> None:
    assert said(EXIT) == ["1", "0", "1"]


def _pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("way", [copy.deepcopy, _pickled])
@pytest.mark.parametrize("name", algorithms())
def test_a_trainers_copy_has_locks_and_processes_of_its_own(name: str, way: Any) -> None:
    trainer = trainer_for(name, devices=2)
    started = subprocess.Popen([sys.executable, "-c", ""])
    trainer.strategy.launcher.procs.append(started)
    other = way(trainer).strategy
    assert started.wait(60) == 0
    assert type(other) is type(trainer.strategy) and other.alarm is not trainer.strategy.alarm
    assert other.launcher.procs == []
    assert other.launcher.cluster_environment is other.cluster_environment


MISSES = """
import os, sys, time
from pathlib import Path

if os.environ.get("HOROVOD_RANK", os.environ.get("LOCAL_RANK", "0")) == "1":
    Path(sys.argv[1]).write_text(str(os.getpid()))
    time.sleep(600)
from lightning_dsgd.backends import on_torch
on_torch.MEETING_SECONDS = 2.0
from tests.ranks.toy import Toy, loader, trainer_for
import lightning_dsgd as dsgd

strategy = dsgd.BackupWorkersStrategy(backups=0, timeout=2.0)
trainer_for(strategy, devices=2, max_epochs=1).fit(Toy(), loader())
"""


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        ("python", "RoundTimeoutError: rank 0 has waited 2 s for rank 1 to start"),
        ("horovodrun", "rank 0 has waited 2 s for the other ranks to start"),
    ],
)
def test_a_rank_that_misses_the_start_is_not_left_behind(
    launcher: str, said: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(MISSES)
    done = subprocess.run(
        [*command(launcher, 2), str(program), str(tmp_path / "pid")],
        cwd=ROOT,
        env=environment(HOROVOD_GLOO_TIMEOUT_SECONDS="4"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
    )
    assert done.returncode != 0 and said in done.stdout, done.stdout[-3000:]
    assert all_gone([int((tmp_path / "pid").read_text())])


CRASHES = """
import os
from lightning_fabric.strategies.launchers import subprocess_script
subprocess_script._ChildProcessObserver.__init__.__defaults__ = (0.02,)  # it looks all the time
import lightning_dsgd as dsgd
from tests.ranks.toy import Toy, loader, trainer_for

class Crashes(Toy):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.global_step == 4:
            os._exit(3)
        return super().training_step(batch, batch_idx)

strategy = dsgd.BackupWorkersStrategy(backups=0, timeout=60.0)
trainer_for(strategy, devices=2, max_epochs=1).fit(Crashes(), loader())
"""


def test_a_rank_that_crashes_is_named_before_lightning_ends_all(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(CRASHES)
    done = subprocess.run(
        [*command("python", 2), str(program)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
    )
    assert done.returncode != 0
    assert "rank 0 ends: PeerLostError: rank 1" in done.stdout, done.stdout[-3000:]


def test_a_started_rank_that_failed_is_not_held_back_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 may never come to say anything."""
    monkeypatch.setattr(leaving, "_LAST_CHANCE", 0.2)
    processes = [subprocess.Popen([sys.executable, "-c", f"exit({code})"]) for code in (3, 0)]
    started: list[Any] = list(processes)
    leaving.let_failures_be_said(started)
    failed, fine = started
    assert [process.wait(60) for process in processes] == [3, 0]
    assert (failed.poll(), fine.poll()) == (None, 0)
    time.sleep(0.3)
    assert failed.poll() == failed.returncode == 3 and failed.pid == processes[0].pid


@pytest.fixture(scope="module")
def trainings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str, int], Future[Path]]]:
    """Every launch that is asked for, two at a time."""

    def run(launcher: str, name: str, ranks: int, out: Path) -> Path:
        launch(launcher, [f"lifetimes.{name}"], out, ranks=ranks)
        return out

    with ThreadPoolExecutor(2) as pool:
        yield {
            wanted: pool.submit(run, *wanted, tmp_path_factory.mktemp("trainings"))
            for wanted in asked(request.session, "trained")
        }


@pytest.fixture
def trained(request: pytest.FixtureRequest, trainings: dict[Any, Future[Path]]) -> Path:
    """Where ranks have left what came of it."""
    return trainings[request.param].result()


def several(name: str, ranks: int) -> pytest.MarkDecorator:
    """A test of what came of it, under each launcher."""
    wanted = [(launcher, name, ranks) for launcher in LAUNCHERS]
    return pytest.mark.parametrize("trained", wanted, ids=LAUNCHERS, indirect=True)


@several("failures", ranks=2)
def test_failures_leave_no_threads_and_no_descriptors(trained: Path) -> None:
    for found in results(trained, "lifetimes.failures", ranks=2):
        assert found["last"] == "finished"
        assert all("rank 1" in end or "a mistake" in end for end in found["ends"]), found
        threads, descriptors = (b - a for a, b in zip(found["before"], found["after"], strict=True))
        assert threads <= 2 and descriptors <= 4, found  # of some dozen for each failure


@several("one_apart", ranks=4)
def test_ranks_one_training_apart_do_not_train_together(
    trained: Path, request: pytest.FixtureRequest
) -> None:
    launcher = request.node.callspec.id
    for rank, found in enumerate(results(trained, "lifetimes.one_apart")):
        first, *_, last = found["ends"]
        assert first == "finished" and found["steps"] == 0 and found["seconds"] < 30.0, found
        if launcher == "torchrun":
            assert "at different trainings" in last and f"rank {ABSENT}: 2" in last, found
        elif rank != ABSENT:
            assert "start it anew" in last, found
        else:
            assert last.startswith(("RoundTimeoutError", "RunError")), found
