"""Which ranks share a host, from what the hosts say of themselves: launchers disagree on it, or do not say."""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


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
