"""The built wheel, with the oldest Lightning that we promise and a plugin from outside."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.launching import ROOT, launch, results
from tests.ranks.packages import RESUMED

PIP = [sys.executable, "-m", "pip", "-q"]


def oldest(name: str) -> str:
    """The lowest version that we allow, in full."""
    needs = map(Requirement, importlib.metadata.requires("lightning-dsgd") or [])
    (found,) = (need for need in needs if need.name == name)
    (version,) = (part.version for part in found.specifier if part.operator == ">=")
    return ".".join([*version.split("."), "0", "0"][:3])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with these three packages, and what of this tree the ranks' programs need."""
    built, site = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("site")
    for source in (ROOT, ROOT / "tests" / "outside"):
        skipped = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "tests", "benchmarks")
        copy = shutil.copytree(source, built / source.name, ignore=skipped)
        wheel = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(built), str(copy)]
        subprocess.run(wheel, check=True, timeout=180)
    wheels = [str(file) for file in built.glob("*.whl")]
    lightning = f"pytorch-lightning=={oldest('pytorch-lightning')}"
    install = [*PIP, "install", "--no-deps", "--target", str(site), *wheels, lightning]
    subprocess.run(install, check=True, timeout=180)
    (site / "tests").symlink_to(ROOT / "tests")
    return site


def test_every_family_and_a_strategy_from_outside_train(site: Path, tmp_path: Path) -> None:
    done = launch(
        "torchrun",
        ["packages.installed"],
        tmp_path,
        ranks=2,
        cwd=site,
        PYTHONPATH=str(site),
        DSGD_TEST_COPY="pytorch_lightning alone",
    )
    assert done.returncode == 0, done.stdout[-6000:]
    ranks = results(tmp_path, "packages.installed", ranks=2)
    assert ranks[0]["ends"] == ranks[1]["ends"]
    for found in ranks:
        assert found["lightning"].startswith(oldest("pytorch-lightning"))
        assert all(Path(file).is_relative_to(site) for file in found["files"]), found["files"]
        assert len(found["ends"]) == 7
        assert all(epochs == 2 for epochs, _ in found["ends"].values())
        assert found["resumed"] == dict.fromkeys(RESUMED, (3, True))


def test_its_command_and_its_types_are_there(site: Path) -> None:
    program = "from lightning_dsgd.cli import main; raise SystemExit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "algorithms"],
        cwd=site,
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("backup_workers", "ad_psgd", "windowed"))
    typed = [
        site / package / "py.typed" for package in ("lightning_dsgd", "lightning_dsgd_plugins")
    ]
    assert all(file.exists() for file in typed)
