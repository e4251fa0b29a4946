"""Which ranks share a host, and by which address the other hosts reach this one.

Host names do not tell: containers made from one image share a name, and a name need not resolve on
another host. What is known to work is the way to the launcher's meeting point, so the address by
which a host goes there is the one by which it can be found.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

LOOPBACK = "127.0.0.1"
ADDRESS = "LIGHTNING_DSGD_ADDRESS"
"""The variable by which a user chooses the address of rank 0's control plane."""


class Place(NamedTuple):
    """What other ranks must know of the host that a rank runs on."""

    network: str
    """The same for ranks that share a loopback interface, and for no others."""
    address: str
    """By which it goes to the meeting point; empty if there is no way."""


def this_place(meeting_point: str) -> Place:
    """This process's host, in a job whose ranks meet at that address."""
    return Place(_network(), source_address(meeting_point))


def _network() -> str:
    """The running kernel and the network namespace, where Linux tells them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def source_address(destination: str) -> str:
    """The IPv4 address with which this host would appear there; empty if there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((destination, 9))  # sends nothing: asks the system for the interface
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def reachable_address(own: Place, places: Sequence[Place]) -> str:
    """The address at which the others' hosts reach this one, never all of them; empty if unknown.

    A host may see itself as loopback at the meeting point, when that is itself: so the way to
    another host decides.
    """
    others = [place for place in places if place.network != own.network]
    if not others:
        return LOOPBACK
    ways = (source_address(place.address) for place in others if leaves_host(place.address))
    return next(filter(leaves_host, ways), "")


def control_address(own: Place, places: Sequence[Place]) -> str:
    """Where rank 0 listens: what the user says, else what the others reach; empty if unknown."""
    chosen = os.environ.get(ADDRESS)
    return address_of(chosen) if chosen else reachable_address(own, places)


def address_of(name: str) -> str:
    """The IPv4 address that a name leads to on this host; empty if none."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def leaves_host(address: str) -> bool:
    """Is this an address that another host may reach?"""
    return bool(address) and not ipaddress.ip_address(address).is_loopback
