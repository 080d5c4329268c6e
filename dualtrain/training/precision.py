"""Mixed precision: torch's autocast around the forward pass, and its GradScaler for fp16.

Gradients are summed over the ranks before they are looked at, so that every rank finds the same overflow, skips the
same step and has the same scale: the decision needs no message of its own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """How a model computes on a device.

    Args:
        amp: ``"off"``, ``"bf16"`` or ``"fp16"``.
        device: where.

    Raises:
        ValueError: another ``amp``.
    """

    def __init__(self, amp: str, device: torch.device) -> None:
        if amp != "off" and amp not in DTYPES:
            raise ValueError(f"amp={amp!r} is not known: choose off, bf16 or fp16")
        self._kind = device.type
        self._dtype = DTYPES.get(amp)
        self.scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16")
        # Has its scale made: a rank without samples in the first step would have none.
        self.scaler.scale(torch.zeros(1, device=device))

    def autocast(self) -> AbstractContextManager[Any]:
        """For the forward pass and the loss."""
        if self._dtype is None and not torch.is_autocast_enabled(self._kind):
            return nullcontext()  # to enter autocast that is off takes longer than many an operation
        return torch.autocast(self._kind, self._dtype, enabled=self._dtype is not None)
