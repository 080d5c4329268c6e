"""The function of ``horovod.runner.util.threads`` that programs and Horovod's own tests use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Run ``target(*args)`` in a new thread, and return the thread.

    Args:
        target: the function.
        args: its arguments.
        name: the thread's name.
        daemon: whether the process may exit before the thread ends.
        silent: whether to ignore exceptions in the thread instead of printing them.

    Raises:
        ValueError: ``args`` is not a tuple.
    """
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}, for a single argument use (arg,)")

    def silently(*args: Any) -> None:
        with suppress(Exception):
            target(*args)

    thread = threading.Thread(target=silently if silent else target, args=args, name=name, daemon=daemon)
    thread.start()
    return thread
