"""Python objects as bytes, and back, without running anything that the bytes say.

The encoding is torch's own file format, read in its weights-only mode: None, bool, numbers, str, bytes, list, tuple,
set, dict and tensors. Anything else is refused where it is sent, before it travels.
"""

from __future__ import annotations

import io
from typing import Any

import torch


def encode(obj: Any) -> torch.Tensor:
    """``obj`` as a CPU uint8 tensor (n,).

    Raises:
        TypeError: it holds something other than plain values and tensors.
    """
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
        data = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
        decode(data)
    except Exception as error:  # pickle and the weights-only reader raise many types
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise TypeError(
            f"an object of type {type(obj).__name__} cannot be sent to other ranks ({reason}): "
            "send numbers, text, bytes, tensors, and lists, tuples, sets or dicts of them"
        ) from error
    return data


def decode(data: torch.Tensor) -> Any:
    """The object that :func:`encode` made ``data`` from; its tensors lie on the CPU."""
    return torch.load(io.BytesIO(bytes(data.cpu().numpy())), map_location="cpu", weights_only=True)
