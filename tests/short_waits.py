"""Shorter waits for a failed rank's report, for tests in which the report has already arrived or never arrives."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock


def short_waits(backend: Any, limit: float = math.inf) -> AbstractContextManager[Any]:
    """Let failed calls of ``backend`` wait only until any report has arrived, and at most ``limit`` seconds.

    The report of a rank that leaves normally counts too.
    """
    watch = backend.watch
    if watch is None:
        return nullcontext()

    def wait_for_report(seconds: float) -> None:
        deadline = time.monotonic() + min(seconds, limit)
        while watch.failure is None and time.monotonic() < deadline:
            time.sleep(0.005)

    return mock.patch.object(watch, "wait_for_report", wait_for_report)
