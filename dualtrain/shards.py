"""Refuse differentiable collectives with virtual ranks, unless there are as many ranks as virtual ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dualtrain.errors import UserError


class _Thread(threading.local):
    reason: str | None = None  # of the innermost block of :func:`without_collectives`


_thread = _Thread()


@contextmanager
def without_collectives(reason: str) -> Iterator[None]:
    """Make :func:`check_collective` raise UserError(``reason``) in the block, in this thread."""
    before, _thread.reason = _thread.reason, reason  # blocks can be nested: a step may evaluate another trainer
    try:
        yield
    finally:
        _thread.reason = before


def check_collective() -> None:
    """Raise UserError in a block of :func:`without_collectives`."""
    if _thread.reason is not None:
        raise UserError(_thread.reason)
