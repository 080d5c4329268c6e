"""A flag on a GPU that the CPU reads one step later."""

from __future__ import annotations

import math

import torch


class LateFlag:
    """A flag on a GPU, copied to the CPU, which reads the copy one step later, so that it does not wait for the GPU."""

    def __init__(self, flag: torch.Tensor) -> None:
        self._value = torch.empty(1, dtype=flag.dtype, device="cpu", pin_memory=True)
        self._copied = torch.cuda.Event()

    def copy(self, flag: torch.Tensor) -> None:
        """Start to copy ``flag`` to the CPU. Overwrites the previous flag: call :meth:`raised` before, to read it."""
        self._value.copy_(flag, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(flag.device))

    def raised(self) -> bool:
        """Return whether the flag that was copied last is set, that is, NaN. Blocks until that copy has ended."""
        self._copied.synchronize()
        return math.isnan(self._value.item())
