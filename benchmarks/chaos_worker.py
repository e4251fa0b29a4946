"""One rank that lives through a list of faults, and notes how each of its trainings ends.

    python -m benchmarks.chaos_worker FOLDER

FOLDER/faults.json lists them. Each has a folder of its own, with files per rank: what it said, and
a note of how it ended, when, and what it had open then. The file "fault" shows that the fault came.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_dsgd
from lightning_dsgd.control.trace import FILE_NAME
from lightning_dsgd.workers.messages import Contribution, encode

Fault = dict[str, Any]


def own_rank() -> int:
    """Under any launcher."""
    names = ("HOROVOD_RANK", "RANK", "LOCAL_RANK")
    return int(next((os.environ[name] for name in names if name in os.environ), "0"))


class Nameless(Exception):
    """One that says nothing, and cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def mark(folder: Path) -> None:
    """The fault comes now; one without a mark has not come."""
    (folder / "fault").write_text(str(time.time()))


def _die(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _crash(folder: Path) -> None:
    ctypes.string_at(0)


def _vanish(folder: Path) -> None:
    os._exit(0)


def _stop(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _interrupt(folder: Path) -> None:
    signal.raise_signal(signal.SIGINT)


def _terminate(folder: Path) -> None:
    signal.raise_signal(signal.SIGTERM)


def _pause(folder: Path) -> None:
    """Stopped for two seconds, by a child that does not share our fate."""
    me = os.getpid()
    if os.fork() == 0:
        try:
            _hold(me, folder)
        finally:
            os.kill(me, signal.SIGCONT)
            os._exit(0)


def _hold(pid: int, folder: Path) -> None:
    """The mark is the child's: it has seen the process stand still."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(2.0)
    if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
        mark(folder)


def _raiser(kind: type[BaseException], *arguments: Any) -> Callable[[Path], None]:
    """A new one each time: an error keeps the frames that it has passed, and what they hold."""

    def act(folder: Path) -> None:
        raise kind(*arguments)

    return act


ACTS: dict[str, Callable[[Path], None]] = {
    "ValueError": _raiser(ValueError, "a mistake"),
    "KeyError": _raiser(KeyError, "a key"),
    "MemoryError": _raiser(MemoryError),
    "OSError": _raiser(OSError, 5, "a broken disk"),
    "Nameless": _raiser(Nameless),
    "SystemExit": _raiser(SystemExit, 3),
    "KeyboardInterrupt": _raiser(KeyboardInterrupt),
    "StopIteration": _raiser(StopIteration),
    "kill": _die,
    "crash": _crash,
    "vanish": _vanish,
    "stop": _stop,
    "stop and continue": _pause,
    "SIGINT": _interrupt,
    "SIGTERM": _terminate,
    "NaN": lambda folder: None,
    "NaN, dropped": lambda folder: None,
}
"""What can come over a rank at some place; the rest is arranged before, or comes from outside."""
NOT_FINITE = "is not finite"


def said(folder: Path) -> str:
    """By all ranks, so far."""
    return "".join(file.read_text() for file in sorted(folder.glob("said.*")))


class Net(pl.LightningModule):
    """Comes to harm where and when its fault says.

    Once, but for NaNs: one in a gradient that is cancelled does no harm, so they go on until they
    have ended the training, or somebody has said that one is dropped.
    """

    def __init__(self, fault: Fault, folder: Path) -> None:
        super().__init__()
        self.net = torch.nn.Linear(16, 4)
        self.fault, self.folder, self.done = fault, folder, False

    def is_over(self) -> bool:
        if self.fault["kind"].startswith("NaN"):
            return NOT_FINITE in said(self.folder)
        return self.done

    def harm(self, place: str) -> float:
        """Gives the loss's factor, if it comes to that."""
        fault, kind = self.fault, self.fault["kind"]
        if kind not in ACTS or fault["place"] != place or self.global_rank != fault["victim"]:
            return 1.0
        if self.global_step < fault["step"] or self.is_over():
            return 1.0
        self.done = True
        if kind != "stop and continue":
            mark(self.folder)
        ACTS[kind](self.folder)
        return float("nan") if kind.startswith("NaN") else 1.0

    def setup(self, stage: str) -> None:
        self.harm("set-up")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.01)
        return self.net(batch[0]).square().mean() * self.harm("training_step")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """All ranks need each other's share of what it logs."""
        self.log("loss", self.net(batch[0]).square().mean(), sync_dist=True)
        in_fit = "sanity check" if self.trainer.sanity_checking else "validation_step"
        self.harm("validate" if self.trainer.state.fn == "validate" else in_fit)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.net(batch[0]).square().mean(), sync_dist=True)
        self.harm("test")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.harm("on_before_optimizer_step")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Outside(pl.Callback):
    """For what comes from outside: who trains where, until when, and whom rank 0 has met."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        """The ticket holds nothing that is secret."""
        here = pl_module.folder / f"training.{trainer.global_rank}"
        if not here.exists():
            ticket = trainer.strategy.control._ticket
            message = encode(Contribution(0, 1, 0)).hex()
            here.write_text(json.dumps([ticket.endpoint, ticket.key.decode(), message]))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """What is to come must come before the last epoch."""
        last = trainer.current_epoch == trainer.max_epochs - 1
        deadline = time.monotonic() + 25.0 * (last and pl_module.fault["outside"])
        while time.monotonic() < deadline and not (pl_module.folder / "fault").exists():
            time.sleep(0.02)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            met = trainer.strategy._coordinator.tally.foreign
            (pl_module.folder / "foreign").write_text(str(met))


Made = tuple[str, dict[str, Any]]
OTHERS: dict[str, Callable[[str, dict[str, Any]], Made]] = {
    "other arguments": lambda name, given: (name, {**given, "nonfinite": "ignore"}),
    "other strategy": lambda name, given: ("KSyncStrategy", {"timeout": given["timeout"], "k": 1}),
}
"""What the victim makes of the strategy."""


def strategy_for(fault: Fault, folder: Path) -> Any:
    """As the fault says; one rank may see it differently."""
    arguments = {"timeout": fault["timeout"], **fault["arguments"]}
    if fault["kind"] == "full disk":
        arguments["trace"] = str(folder / "trace")
        (folder / "trace").mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (folder / "trace" / FILE_NAME).symlink_to("/dev/full")
        mark(folder)
    if fault["kind"] == "NaN, dropped":
        arguments["nonfinite"] = "drop"
    own = (fault["strategy"], arguments)
    if own_rank() == fault["victim"] and fault["kind"] in OTHERS:
        mark(folder)
        own = OTHERS[fault["kind"]](*own)
    return getattr(lightning_dsgd, own[0])(**own[1])


def train(fault: Fault, folder: Path) -> None:
    """One training, to whatever end."""
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(24 * fault["ranks"], 16))
    data = DataLoader(rows, batch_size=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=fault["ranks"],
        strategy=strategy_for(fault, folder),
        callbacks=[Outside()],
        max_epochs=fault["epochs"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = Net(fault, folder)
    loaders = [data, data] if fault["doing"] == "fit" else [data]
    getattr(trainer, fault["doing"])(net, *loaders)
    if not all(parameter.isfinite().all() for parameter in net.parameters()):
        raise ArithmeticError("the trained model is not finite")


def opened() -> tuple[int, int]:
    """Threads and descriptors of this process, garbage aside."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def come_late(fault: Fault, folder: Path) -> None:
    """Long after all the others are there."""
    deadline = time.monotonic() + 180.0
    while len(list(folder.parent.glob("pid.*"))) < fault["ranks"]:
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)
    time.sleep(6.0)
    mark(folder)


def live_through(fault: Fault, folder: Path) -> bool:
    """One fault, and is all well after it? The note is complete as soon as it has its name."""
    folder.mkdir(exist_ok=True)
    if fault["kind"] == "late start" and own_rank() == fault["victim"]:
        come_late(fault, folder)
    try:
        with (folder / f"said.{own_rank()}").open("w") as file, contextlib.redirect_stdout(file):
            train(fault, folder)
        end = "finished"
    except BaseException as error:
        end = f"{type(error).__name__}: {error}"
    note = {"end": end, "time": time.time(), "opened": opened()}
    (folder / f"part.{own_rank()}").write_text(json.dumps(note))
    (folder / f"part.{own_rank()}").rename(folder / f"end.{own_rank()}")
    return end == "finished"


def heed_no_launcher(fault: Fault) -> None:
    """One ends all ranks as soon as one is gone; here each is to end by itself.

    All threads are deaf to it, for Lightning sets a handler of its own.
    """
    if "launcher" not in fault["kind"] and fault["kind"] != "SIGTERM":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def await_the_others(fault: Fault, folder: Path) -> None:
    """So that no launcher ends a rank before it has noted its own end."""
    deadline = time.monotonic() + 20.0
    missing = fault["kind"] in ("kill", "crash", "vanish", "stop")
    while time.monotonic() < deadline:
        if len(list(folder.glob("end.*"))) >= fault["ranks"] - missing:
            break
        time.sleep(0.05)


def end_a_stopped_launcher(fault: Fault, folder: Path) -> None:
    """Under plain python it is rank 0; stopped, it cannot end, and nobody is there to end it."""
    if fault["kind"] == "stop" and fault["launcher"] == "python" and fault["victim"] == 0:
        os.kill(int((folder / "pid.0").read_text()), signal.SIGKILL)


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / f"pid.{own_rank()}").write_text(str(os.getpid()))
    faults = json.loads((folder / "faults.json").read_text())
    heed_no_launcher(faults[0])
    well = True
    for number, fault in enumerate(faults):
        well = live_through(fault, folder / str(number))
        await_the_others(fault, folder / str(number))
        end_a_stopped_launcher(fault, folder)
    sys.exit(not well)


if __name__ == "__main__":
    main()
