"""The network interfaces of this host, and which one the backends use."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from dualtrain.backends.hosts import loopback

_SIOCGIFADDR = 0x8915
WISHES = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME")


def interfaces() -> dict[str, list[str]]:
    """The addresses of each interface of this host; an interface may have none."""
    found = {name: _ipv4(name) for _, name in socket.if_nameindex()}
    for name, address in _ipv6():
        found.setdefault(name, []).append(address)
    return found


def _ipv4(name: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _ipv6() -> list[tuple[str, str]]:
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:
        return []
    return [(row[5], str(ipaddress.IPv6Address(bytes.fromhex(row[0])))) for row in rows]


def used(found: Mapping[str, list[str]], wishes: Mapping[str, str], single_host: bool) -> str:
    """The interface that the ranks talk through, and why, in words."""
    if wishes:
        return ", ".join(f"{name}={value}" for name, value in wishes.items())
    if single_host:
        return f"{loopback()} (all ranks are on this host)"
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return f"unknown: the host's name {socket.gethostname()!r} has no address"
    names = [name for name, addresses in found.items() if address in addresses]
    return f"{', '.join(names) or 'none of these'} (the host's name stands for {address})"
