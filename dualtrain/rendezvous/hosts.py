"""Host identity, addresses and interfaces.

Ranks exchange the identities of their hosts to find out which ranks share a host: not all launchers report this correctly.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from dualtrain.differences import fingerprint
from dualtrain.errors import UserError
from dualtrain.launchers import World


def identity() -> int:
    """Return a number below 2**63 that identifies this host until it reboots.

    Containers on one host get different numbers if their host names differ.
    """
    return fingerprint(f"{socket.gethostname()} {_boot()}")


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(uuid.getnode())


def loopback() -> str:
    """Return the name of the loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


#: Variables with which users choose the interface that the ranks communicate on.
OVERRIDES = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915


def address(destination: str = "") -> str:
    """Return the IPv4 address at which other hosts reach this host. Sends nothing but DNS queries.

    Uses the first of these that is not a loopback address: the address of the interface that the user chose,
    the address on the route to ``destination`` (a host), the address that this host's name resolves to, the address on the
    default route, and the address of any interface. Without such an address, returns 127.0.0.1.
    """
    overrides = (os.environ.get(name, "").partition(",")[0].lstrip("=") for name in OVERRIDES)
    found = [ipv4(name) for name in overrides if name]
    found += [_route(destination)] if destination else []
    found += [_resolved(socket.gethostname()), _route("192.0.2.1")]  # RFC 5737: no host has this address
    found += [ipv4(name) for _, name in socket.if_nameindex()]
    return next((each for each in found if each and not is_loopback(each)), "127.0.0.1")


def listening_address(world: World) -> str:
    """Return the address on which this host's ranks listen: 127.0.0.1 if the job has one host, otherwise :func:`address`.

    The address of the rendezvous may be another host's, even for rank 0 under torchrun, so it only selects the interface.
    """
    if world.single_host:
        return "127.0.0.1"
    return address(world.rendezvous[0] if world.rendezvous else "")


def listening_interface(world: World) -> str | None:
    """Return the name of the interface that has :func:`listening_address`, or ``None``."""
    return loopback() if world.single_host else interface(listening_address(world))


def gloo_interface(world: World) -> str | None:
    """Return Gloo's interface: loopback if all ranks are on one host, else the interface that reaches the other hosts.

    Return ``None`` if GLOO_SOCKET_IFNAME is set, which Gloo reads itself, or if no interface is found. By default, Gloo
    would use the interface that the host's name resolves to. This may be loopback, through which other hosts cannot be
    reached.

    Raises:
        UserError: GLOO_SOCKET_IFNAME names an interface that this host does not have.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if not chosen:
        return listening_interface(world)
    known = [name for _, name in socket.if_nameindex()]
    if not all(name.partition(":")[0] in known for name in chosen.split(",") if name):  # "eth0:1" is an alias of eth0
        raise UserError(
            f"GLOO_SOCKET_IFNAME={chosen!r} is not an interface of {socket.gethostname()}: choose one of "
            f"{', '.join(known)}, or unset the variable"
        )
    return None


def interface(ip: str) -> str | None:
    """Return the name of the network interface that has this IPv4 address, or ``None``."""
    return next((name for _, name in socket.if_nameindex() if ipv4(name) == ip), None)


def ipv4(interface: str) -> str | None:
    """Return the IPv4 address of a network interface, or ``None`` without such an interface or address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address resolves to a loopback address on this host, or does not resolve."""
    for resolve in (socket.gethostbyname, _ipv6):
        with suppress(OSError):
            return ipaddress.ip_address(resolve(host)).is_loopback
    return True


def _ipv6(host: str) -> str:
    return str(socket.getaddrinfo(host, None, socket.AF_INET6)[0][4][0])


def _resolved(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return "127.0.0.1"


def _route(destination: str) -> str:
    """Return this host's address on the route to a host, or 127.0.0.1. ``connect`` of a UDP socket sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        try:
            unsent.connect((destination, 9))
        except OSError:
            return "127.0.0.1"
        return str(unsent.getsockname()[0])


#: The environment belongs to the whole process: two threads must not set and restore the same variable at once.
_environment_lock = threading.RLock()


@contextmanager
def variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables inside the block, for a library that reads them, and restore them after the block.

    ``None`` unsets a variable. Only one thread at a time can be inside such a block; other threads wait.
    """
    with _environment_lock:
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
