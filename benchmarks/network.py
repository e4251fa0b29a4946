"""Several hosts on one machine: network namespaces on a bridge. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

BRIDGE = "dsgd-bridge"


def available() -> bool:
    """May this process make network namespaces?"""
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "dsgd-try"], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", "dsgd-try"], capture_output=True)
    return made


def address(host: int) -> str:
    """Of the host with that number."""
    return f"10.77.0.{host + 1}"


def _sh(line: str, check: bool = True) -> None:
    subprocess.run(line.split(), check=check, capture_output=not check)


@contextlib.contextmanager
def network(hosts: int, rate: str | None = None) -> Iterator[list[str]]:
    """The names of namespaces, each with a link to the others that sends at most at `rate`."""
    names = [f"dsgd-{host}" for host in range(hosts)]
    try:
        _sh(f"ip link add {BRIDGE} type bridge")
        _sh(f"ip link set {BRIDGE} up")
        for host, name in enumerate(names):
            inside = f"ip netns exec {name}"
            _sh(f"ip netns add {name}")
            _sh(f"ip link add dsgd-veth{host} type veth peer name eth0 netns {name}")
            _sh(f"ip link set dsgd-veth{host} master {BRIDGE} up")
            _sh(f"{inside} ip address add {address(host)}/24 dev eth0")
            _sh(f"{inside} ip link set lo up")
            _sh(f"{inside} ip link set eth0 up")
            if rate:
                _sh(f"{inside} tc qdisc add dev eth0 root tbf rate {rate} burst 32kb latency 400ms")
        yield names
    finally:
        for name in names:
            _sh(f"ip netns del {name}", check=False)
        _sh(f"ip link del {BRIDGE}", check=False)
