"""Shorter waits for the reason of a failure, where it is known or none will be reported."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock


def short_waits(backend: Any, limit: float = math.inf) -> AbstractContextManager[Any]:
    """End the wait of a failed call of ``backend`` at any report, also of a rank that left, and after ``limit`` seconds."""
    watch = backend.watch
    if watch is None:
        return nullcontext()

    def wait_for_report(seconds: float) -> None:
        deadline = time.monotonic() + min(seconds, limit)
        while watch.failure is None and time.monotonic() < deadline:
            time.sleep(0.005)

    return mock.patch.object(watch, "wait_for_report", wait_for_report)
