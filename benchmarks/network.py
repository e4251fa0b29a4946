"""Several hosts on one machine: network namespaces on a bridge. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

BRIDGE = "dsgd-bridge"


def available() -> bool:
    """May this process make network namespaces and bridges?"""
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    codes = [
        _sh("ip netns add dsgd-try", check=False),
        _sh("ip link add dsgd-try type bridge", check=False),
    ]
    _sh("ip netns del dsgd-try", check=False)
    _sh("ip link del dsgd-try", check=False)
    return not any(codes)


def address(host: int) -> str:
    """Of the host with that number."""
    return f"10.77.0.{host + 1}"


def _sh(line: str, check: bool = True) -> int:
    return subprocess.run(line.split(), check=check, capture_output=not check).returncode


@contextlib.contextmanager
def network(hosts: int, rate: str | None = None, *, named: bool = False) -> Iterator[list[str]]:
    """The names of namespaces, each with a link to the others that sends at most at `rate`.

    They share their host's name; if `named`, it leads each of them to its own address.
    """
    names = [f"dsgd-{host}" for host in range(hosts)]
    _remove(names)  # what an earlier run may have left
    try:
        _sh(f"ip link add {BRIDGE} type bridge")
        _sh(f"ip link set {BRIDGE} up")
        for host, name in enumerate(names):
            inside = f"ip netns exec {name}"
            _sh(f"ip netns add {name}")
            if named:
                _files(name).mkdir(parents=True)
                known = f"127.0.0.1 localhost\n{address(host)} {socket.gethostname()}\n"
                (_files(name) / "hosts").write_text(known)
            _sh(f"ip link add dsgd-veth{host} type veth peer name eth0 netns {name}")
            _sh(f"ip link set dsgd-veth{host} master {BRIDGE} up")
            _sh(f"{inside} ip address add {address(host)}/24 dev eth0")
            _sh(f"{inside} ip link set lo up")
            _sh(f"{inside} ip link set eth0 up")
            if rate:
                _sh(f"{inside} tc qdisc add dev eth0 root tbf rate {rate} burst 32kb latency 400ms")
        yield names
    finally:
        _remove(names)


def _files(name: str) -> Path:
    """Where `ip netns exec` finds what it puts over the namespace's /etc."""
    return Path("/etc/netns", name)


def _remove(names: list[str]) -> None:
    for name in names:
        _sh(f"ip netns del {name}", check=False)
        shutil.rmtree(_files(name), ignore_errors=True)
    _sh(f"ip link del {BRIDGE}", check=False)
