"""One rank that lives through a list of faults, and notes how each of its trainings ends.

    python -m benchmarks.chaos_worker FOLDER

FOLDER/faults.json lists them. Each has a folder of its own, with a file per rank: how it ended,
after how many seconds, and what it had open then.
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

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_dsgd
from lightning_dsgd.control.trace import FILE_NAME

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


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _crash() -> None:
    ctypes.string_at(0)


def _vanish() -> None:
    os._exit(0)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def _terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def _pause() -> None:
    """Stopped for two seconds, by a child that does not share our fate."""
    me = os.getpid()
    if os.fork() == 0:
        os.kill(me, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(me, signal.SIGCONT)
        os._exit(0)


def _raiser(kind: type[BaseException], *arguments: Any) -> Callable[[], None]:
    """A new one each time: an error keeps the frames that it has passed, and what they hold."""

    def act() -> None:
        raise kind(*arguments)

    return act


ACTS: dict[str, Callable[[], None]] = {
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
}
"""What can come over a rank in the middle of a step; the rest is arranged before it trains."""


class Net(pl.LightningModule):
    """Comes to harm where and when its fault says.

    Once, but for NaNs that are to end it: one that is cancelled does no harm.
    """

    def __init__(self, fault: Fault, folder: Path) -> None:
        super().__init__()
        self.net = torch.nn.Linear(16, 4)
        self.fault, self.folder, self.done = fault, folder, False

    def harm(self, place: str) -> float:
        fault = self.fault
        if fault["place"] != place or self.global_rank != fault["victim"]:
            return 1.0
        if self.global_step < fault["step"] or self.done:
            return 1.0
        if fault["kind"] in ACTS or fault["kind"] == "NaN, dropped":
            self.done = True
        if fault["kind"] in ACTS or fault["kind"].startswith("NaN"):
            (self.folder / "fault").write_text(str(time.time()))
        ACTS.get(fault["kind"], lambda: None)()
        return float("nan") if fault["kind"].startswith("NaN") else 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.01)
        return self.net(batch[0]).square().mean() * self.harm("training_step")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.harm("validation_step")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.harm("on_before_optimizer_step")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Heedless(pl.Callback):
    """A launcher ends all ranks as soon as one is gone; here each is to end by itself."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if "launcher" not in pl_module.fault["kind"] and pl_module.fault["kind"] != "SIGTERM":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        (pl_module.folder / f"training.{trainer.global_rank}").touch()


def strategy_for(fault: Fault, folder: Path) -> Any:
    """As the fault says; one rank may see it differently."""
    arguments = {"timeout": fault["timeout"], **fault["arguments"]}
    if fault["kind"] == "full disk":
        arguments["trace"] = str(folder / "trace")
        (folder / "trace").mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (folder / "trace" / FILE_NAME).symlink_to("/dev/full")
    name = fault["strategy"]
    if own_rank() == fault["victim"] and fault["kind"] == "other arguments":
        arguments["nonfinite"] = "ignore"
    if own_rank() == fault["victim"] and fault["kind"] == "other strategy":
        name, arguments = "KSyncStrategy", {"timeout": fault["timeout"], "k": 1}
    if fault["kind"] == "NaN, dropped":
        arguments["nonfinite"] = "drop"
    return getattr(lightning_dsgd, name)(**arguments)


def train(fault: Fault, folder: Path) -> None:
    """One training, to whatever end."""
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(24 * fault["ranks"], 16))
    data = DataLoader(rows, batch_size=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=fault["ranks"],
        strategy=strategy_for(fault, folder),
        callbacks=[Heedless()],
        max_epochs=fault["epochs"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(fault, folder), data, data)


def opened() -> tuple[int, int]:
    """Threads and descriptors of this process, garbage aside."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def live_through(fault: Fault, folder: Path) -> bool:
    """One fault, and is all well after it? The note is complete as soon as it has its name."""
    folder.mkdir(exist_ok=True)
    if fault["kind"] == "late start" and own_rank() == fault["victim"]:
        time.sleep(6.0)
    try:
        train(fault, folder)
        end = "finished"
    except BaseException as error:
        end = f"{type(error).__name__}: {error}"
    note = {"end": end, "time": time.time(), "opened": opened()}
    (folder / f"part.{own_rank()}").write_text(json.dumps(note))
    (folder / f"part.{own_rank()}").rename(folder / f"end.{own_rank()}")
    return end == "finished"


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
    well = True
    for number, fault in enumerate(faults):
        well = live_through(fault, folder / str(number))
        await_the_others(fault, folder / str(number))
        end_a_stopped_launcher(fault, folder)
    sys.exit(not well)


if __name__ == "__main__":
    main()
