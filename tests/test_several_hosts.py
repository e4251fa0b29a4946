"""Two hosts with two ranks each: the launchers' own way, between network namespaces."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_dsgd as dsgd
from benchmarks.network import address, available, network
from lightning_dsgd.backends import on_horovod, on_torch
from lightning_dsgd.backends.hosts import (
    LOOPBACK,
    Place,
    control_address,
    reachable_address,
    this_place,
)
from lightning_dsgd.control.alarm import Alarm
from tests.launching import BIN, ROOT, environment, results

HOSTS, LOCAL = 2, 2

SSH = """\
#!/bin/sh
# in the place of ssh, called by horovodrun with a host among options, and a command
while true; do
    case $1 in
        -o|-p|-i) shift 2 ;;
        10.77.0.*) host=$1; shift ;;
        *) exec ip netns exec "dsgd-$((${host##*.} - 1))" sh -c "$*" ;;
    esac
done
"""


def torchrun(names: list[str], out: Path) -> list[list[str]]:
    """One command per host."""
    meeting = [f"--nnodes={HOSTS}", f"--master-addr={address(0)}", "--master-port=29471"]
    program = ["-m", "tests.ranks.run", str(out), "hosts.trains"]
    line = [str(BIN / "torchrun"), f"--nproc-per-node={LOCAL}", *meeting]
    return [
        ["ip", "netns", "exec", name, *line, f"--node-rank={host}", *program]
        for host, name in enumerate(names)
    ]


def horovodrun(names: list[str], out: Path) -> list[list[str]]:
    """One command on the first host, which reaches the second by `ssh`."""
    hosts = ",".join(f"{address(host)}:{LOCAL}" for host in range(HOSTS))
    line = [str(BIN / "horovodrun"), "-np", str(HOSTS * LOCAL), "-H", hosts]
    program = [str(BIN / "python"), "-m", "tests.ranks.run", str(out), "hosts.trains"]
    return [["ip", "netns", "exec", names[0], *line, *program]]


def run(lines: list[list[str]], out: Path) -> None:
    shim = out / "ssh"
    shim.write_text(SSH)
    shim.chmod(0o755)
    env = environment()
    env["PATH"] = f"{out}{os.pathsep}{env['PATH']}"
    log = (out / "output.txt").open("w")
    options: dict[str, Any] = {"cwd": ROOT, "env": env, "stdout": log, "stderr": log}
    processes = [subprocess.Popen(line, start_new_session=True, **options) for line in lines]
    try:
        codes = [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
        log.close()
    assert not any(codes), (out / "output.txt").read_text()[-6000:]


@pytest.mark.parametrize("launcher", [torchrun, horovodrun])
def test_every_exchange_works_between_hosts_that_share_a_name(
    launcher: Any, tmp_path: Path
) -> None:
    if not available():
        pytest.skip("needs root, iproute2 and network namespaces")
    with network(HOSTS, named=launcher is horovodrun) as names:
        run(launcher(names, tmp_path), tmp_path)
    ranks = results(tmp_path / "hosts", "trains")
    for name in ("ad_psgd", "backup_workers", "dc_s3gd"):
        assert len({rank[name] for rank in ranks}) == 1
    assert [rank["place"].address for rank in ranks] == [
        address(host) for host in range(HOSTS) for _ in range(LOCAL)
    ]
    assert len({rank["place"].network for rank in ranks}) == HOSTS
    assert ranks[0]["endpoint"].startswith(f"tcp://{address(0)}:")


PAIR = """\
import os, sys, torch
from lightning_dsgd.backends import connect
from lightning_dsgd.control.alarm import Alarm

rank, device = int(sys.argv[1]), torch.device("cpu")
meeting = {"address": sys.argv[2], "port": 29472, "timeout": 20.0}
for interfaces in ("eth0", "eth0, eth0"):
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces
    backend = connect("torch", rank=rank, world_size=2, device=device, alarm=Alarm(), **meeting)
    total = torch.tensor([rank + 1.0])
    backend.channel("main").sum_(total)
    assert total == 3, total
"""


def test_the_user_chooses_the_interfaces(tmp_path: Path) -> None:
    """The hosts' common name leads each of them to itself, or nowhere."""
    if not available():
        pytest.skip("needs root, iproute2 and network namespaces")
    with network(HOSTS) as names:
        program = [str(BIN / "python"), "-c", PAIR]
        starts = [["ip", "netns", "exec", name, *program] for name in names]
        run([[*start, str(rank), address(0)] for rank, start in enumerate(starts)], tmp_path)


@pytest.mark.parametrize("value", ["nowhere0", "lo,nowhere0"])
def test_an_interface_that_is_not_there_is_named(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    expected = f"GLOO_SOCKET_IFNAME={value}: this host has no interface 'nowhere0'"
    with pytest.raises(dsgd.ConfigurationError, match=expected):
        on_torch.TorchBackend(0, 2, LOOPBACK, 1, torch.device("cpu"), Alarm(), 1.0)


def test_no_interface_is_chosen_by_an_empty_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    assert on_torch._chosen_devices() == []


def test_one_host_needs_no_network() -> None:
    here = this_place("no-such-host.invalid")
    assert here.address == ""
    assert reachable_address(here, [here, here]) == LOOPBACK


def test_without_a_way_no_address_is_made_up() -> None:
    here, there = Place("here", LOOPBACK), Place("there", "")
    assert reachable_address(here, [here, there]) == ""
    assert reachable_address(here, [here, Place("there", LOOPBACK)]) == ""


def test_the_user_chooses_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Place("here", LOOPBACK)
    monkeypatch.setenv("LIGHTNING_DSGD_ADDRESS", "localhost")
    assert control_address(here, [here]) == LOOPBACK
    monkeypatch.setenv("LIGHTNING_DSGD_ADDRESS", "no-such-host.invalid")
    assert control_address(here, [here]) == ""


def test_horovod_needs_a_name_that_leads_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    on_horovod._check_name()
    monkeypatch.setenv("HOROVOD_CROSS_SIZE", "2")
    with pytest.raises(dsgd.BackendError, match=r"'localhost' leads this host to 127\.0\.0\.1"):
        on_horovod._check_name()
