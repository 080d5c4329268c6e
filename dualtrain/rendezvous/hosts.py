"""Which ranks share a host, from what the hosts say of themselves: launchers disagree on it, or do not say."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import socket
import struct
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dualtrain.launchers import World


def identity() -> int:
    """A number below 2**63 for this host, until it is started anew; containers count as hosts by their names."""
    text = f"{socket.gethostname()} {_boot()}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(uuid.getnode())


def loopback() -> str:
    """The name of the loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


#: What people choose the interface with that the ranks talk through.
WISHES = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915


def address(towards: str = "") -> str:
    """Where other hosts reach this one: the chosen interface's address, or that of the way to the host ``towards``.

    Without either, the one that this host's name stands for. On many systems that is a loopback address; then it is
    that of the way to the world, or of any interface. Sends nothing.
    """
    wishes = (os.environ.get(name, "").partition(",")[0].lstrip("=") for name in WISHES)
    found = [ipv4(name) for name in wishes if name]
    found += [_route(towards)] if towards else []
    found += [_resolved(socket.gethostname()), _route("192.0.2.1")]  # RFC 5737: of no real host
    found += [ipv4(name) for _, name in socket.if_nameindex()]
    return next((each for each in found if each and not is_loopback(each)), "127.0.0.1")


def listening_address(world: World) -> str:
    """Where this host's ranks listen: the loopback interface, or where the other hosts of ``world`` reach it.

    Its rendezvous may be another host's: torchrun gives ranks to its hosts without regard to who serves it.
    """
    if world.single_host:
        return "127.0.0.1"
    return address(world.rendezvous[0] if world.rendezvous else "")


def listening_interface(world: World) -> str | None:
    """The name of the interface that has :func:`listening_address`, if one has it."""
    return loopback() if world.single_host else interface(listening_address(world))


def interface(own: str) -> str | None:
    """The name of the network interface that has this address."""
    return next((name for _, name in socket.if_nameindex() if ipv4(name) == own), None)


def ipv4(interface: str) -> str | None:
    """The IPv4 address of a network interface, if it is there and has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def is_loopback(host: str) -> bool:
    """Whether a host's name or address leads back to the host that asks."""
    return ipaddress.ip_address(_resolved(host)).is_loopback


def _resolved(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return "127.0.0.1"


def _route(towards: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((towards, 9))
        except OSError:
            return "127.0.0.1"
        return str(asking.getsockname()[0])


@contextmanager
def variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Has ``values`` in the environment for a while: a library that reads them once need not leave them to others.

    ``None`` unsets a variable.
    """
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
