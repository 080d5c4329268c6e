"""Mixed precision: torch's autocast around the forward pass, and its GradScaler for fp16.

The scaler gets gradients that are already averaged over the ranks. Every rank therefore finds the same overflow, skips
the same step and keeps the same scale, without further communication.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from dualtrain.errors import DivergedError

_NOTHING = nullcontext()
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_range(groups: Iterable[dict[str, Any]]) -> None:
    """Raise DivergedError if a dense gradient in ``groups`` is not finite. All were sent in fp16 and averaged."""
    grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    # A sum in float32 of numbers that were sent in fp16 is finite if all of them are. It is computed in one pass.
    finite: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        if not grad.is_sparse:
            total = grad.sum(dtype=torch.promote_types(grad.dtype, torch.float32))
            finite.setdefault(grad.device, []).append(total.isfinite())
    # One copy for each device, because the CPU waits for every copy.
    if not all(bool(torch.stack(each).all()) for each in finite.values()):
        raise DivergedError(
            'gradients that were sent in fp16 (compress="bf16" has a larger range) became infinite or not a number '
            "on all ranks"
        )


class Precision:
    """Autocast and the gradient scaler of one trainer.

    Args:
        amp: ``"off"``, ``"bf16"`` or ``"fp16"``.
        device: the model's device.

    Raises:
        ValueError: ``amp`` is none of these values.
    """

    def __init__(self, amp: str, device: torch.device) -> None:
        if amp not in ("off", *DTYPES):
            raise ValueError(f"amp={amp!r} is not known: choose off, bf16 or fp16")
        self._device_type = device.type
        self._dtype = DTYPES.get(amp)
        self.scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16")
        # Create the scale tensor now, because unscale_() needs it: a rank without samples in the first step does not call
        # scale() in that step.
        self.scaler.scale(torch.zeros(1, device=device))

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the context for the forward pass and the loss, and the one for the backward pass, which uses no autocast.

        The caller's own autocast has no effect in either of them.
        """
        device_type = self._device_type
        # Entering a disabled autocast can take longer than a small tensor operation, so enter none if possible.
        without: AbstractContextManager[Any] = _NOTHING
        if torch.is_autocast_enabled(device_type):
            without = torch.autocast(device_type, enabled=False)
        return without if self._dtype is None else _casting(device_type, self._dtype), without


@contextmanager
def _casting(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """Use autocast. Afterwards, clear its cache of cast weights, because the next step changes the weights.

    torch clears the cache only at the end of the outermost autocast, which may be the caller's own.
    """
    try:
        with torch.autocast(device_type, dtype):
            yield
    finally:
        torch.clear_autocast_cache()


_FILTERS_LOCK = threading.Lock()  # all threads share the filters of warnings, and ``catch_warnings`` replaces them


@contextmanager
def ignore_order_warning() -> Iterator[None]:
    """Ignore the warning of ``schedule.step()`` about a wrong order of calls. A skipped first step causes this warning."""
    with _FILTERS_LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        yield
