"""What users import: complete, documented, registered."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import lightning_dsgd
from lightning_dsgd.registry import algorithms, load
from lightning_dsgd.trainer.worlds import installed_copies


def test_all_names_resolve_and_nothing_else_is_public() -> None:
    for name in lightning_dsgd.__all__:
        assert getattr(lightning_dsgd, name) is not None
    assert dir(lightning_dsgd) == sorted(lightning_dsgd.__all__)
    with pytest.raises(AttributeError):
        _ = lightning_dsgd.nothing


@pytest.mark.parametrize("name", algorithms())
def test_each_algorithm_is_registered_and_described(name: str) -> None:
    cls = load(name)
    assert cls.strategy_name == name and cls.paper and cls.summary
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters)
    for parameter in parameters:
        assert f"{parameter.name}:" in (cls.__doc__ or ""), f"{name}: {parameter.name} undocumented"
    assert getattr(lightning_dsgd, cls.__name__) is cls
    for copy in installed_copies():
        registry = importlib.import_module(f"{copy}.strategies").StrategyRegistry
        assert name in registry
        assert f"lightning_dsgd.{cls.__name__.lower()}" in registry


def test_one_copy_of_lightning_is_enough_in_any_order() -> None:
    """Each in an interpreter of its own where the other cannot be imported, both at once."""
    running = []
    for order in ("lightning_dsgd, pytorch_lightning", "lightning, lightning_dsgd"):
        copy, other = "lightning", "pytorch_lightning"
        if other in order:
            copy, other = other, copy
        code = (
            f"import sys; sys.modules[{other!r}] = None; import {order};"
            f" s = {copy}.Trainer(strategy='k_async', devices=2, accelerator='cpu',"
            " logger=False, enable_checkpointing=False, barebones=False).strategy;"
            " print(type(s).__name__)"
        )
        line = [sys.executable, "-c", code]
        running.append(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [words.split()[-1:] for words in said] == [["KAsyncStrategy"]] * 2


def test_the_command_line_starts_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['lightning-dsgd']; import lightning_dsgd.cli;"
        " print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
