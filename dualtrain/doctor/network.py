"""Network interfaces of this host, and the interface that the backends use."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from pathlib import Path

from dualtrain.launchers import World
from dualtrain.rendezvous.hosts import ipv4, listening_address, loopback


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each interface of this host; an interface may have none."""
    found = {name: [address] if (address := ipv4(name)) else [] for _, name in socket.if_nameindex()}
    for name, address in _ipv6():
        found.setdefault(name, []).append(address)
    return found


def _ipv6() -> list[tuple[str, str]]:
    """Return the interface and the text of each IPv6 address of this host."""
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:
        return []
    return [(row[5], str(ipaddress.IPv6Address(bytes.fromhex(row[0])))) for row in rows]


def used_interface(addresses_of: Mapping[str, list[str]], overrides: Mapping[str, str], world: World) -> str:
    """Return, as text, the interface that the ranks of ``world`` use on this host, and the reason.

    ``addresses_of`` is the result of :func:`interfaces`. ``overrides`` are the environment variables that are set
    and select an interface; if there are any, the text consists of them.
    """
    if overrides:
        return ", ".join(f"{name}={value}" for name, value in overrides.items())
    if world.single_host:
        return f"{loopback()} (all ranks are on this host)"
    address = listening_address(world)
    names = [name for name, addresses in addresses_of.items() if address in addresses]
    return f"{', '.join(names) or 'none of these'} (other hosts reach this host at {address})"
