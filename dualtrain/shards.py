"""Refuse differentiable collectives in a shard (virtual ranks), if their result would depend on the number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dualtrain.errors import UserError

_thread = threading.local()  # has the attribute ``reason`` in a block of :func:`without_collectives`


@contextmanager
def without_collectives(reason: str) -> Iterator[None]:
    """Make :func:`check_collective` raise UserError(``reason``) in the block, in this thread."""
    _thread.reason = reason
    try:
        yield
    finally:
        del _thread.reason


def check_collective() -> None:
    """Raise UserError in a block of :func:`without_collectives`."""
    if hasattr(_thread, "reason"):
        raise UserError(_thread.reason)
