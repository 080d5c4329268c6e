"""Refuse differentiable collectives in a shard (virtual ranks), if their result would depend on the number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dualtrain.errors import UserError

_thread = threading.local()  # its attribute ``reason`` is a text in a block of :func:`without_collectives`


@contextmanager
def without_collectives(reason: str) -> Iterator[None]:
    """Make :func:`check_collective` raise UserError(``reason``) in the block, in this thread."""
    before, _thread.reason = getattr(_thread, "reason", None), reason  # a step of one trainer may evaluate another
    try:
        yield
    finally:
        _thread.reason = before


def check_collective() -> None:
    """Raise UserError in a block of :func:`without_collectives`."""
    reason = getattr(_thread, "reason", None)
    if reason is not None:
        raise UserError(reason)
