"""Less patience with failures whose reason is known, or of which none will be told."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock


def impatient(backend: Any, limit: float = math.inf) -> AbstractContextManager[Any]:
    """A failed call of ``backend`` waits for a loud loss of a rank; here only for any, and at most ``limit`` seconds."""
    watch = backend.watch
    if watch is None:
        return nullcontext()

    def wait_for_report(seconds: float) -> None:
        deadline = time.monotonic() + min(seconds, limit)
        while watch.failure is None and time.monotonic() < deadline:
            time.sleep(0.005)

    return mock.patch.object(watch, "wait_for_report", wait_for_report)
