"""Arithmetic that does not depend on ``torch.set_flush_denormal``.

That function makes the processor replace subnormal numbers by zero in the calling thread. Some results are computed on
every rank from the same values. If only some ranks had called the function, the results would differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_SUBNORMAL = 5e-324  # equal to zero in a thread that replaces subnormal numbers by zero


def keep_subnormals(function: Callable[P, T]) -> Callable[P, T]:
    """Make ``function`` compute with subnormal numbers, whatever the calling thread has set."""

    @wraps(function)
    def keeping(*args: P.args, **kwargs: P.kwargs) -> T:
        if _SUBNORMAL:
            return function(*args, **kwargs)
        threads = torch.get_num_threads()
        torch.set_flush_denormal(False)
        torch.set_num_threads(1)  # torch's worker threads have the setting of the thread that started them
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)
            torch.set_flush_denormal(True)

    return keeping
