"""A forked child, such as a DataLoader's worker, must not destroy what it has no threads for."""

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


def test_a_childs_garbage_collector_leaves_groups_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.split() == ["child", "0", "parent", "True"], done.stderr
