"""Compression of tensors that are sent: none, or 16-bit floats."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Interface of compressors. Users may pass a class of their own in place of a member of :class:`Compression`."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and the ``ctx`` for ``decompress``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the received tensor in the dtype and shape of the tensor that ``compress`` got."""
        raise NotImplementedError


AnyCompressor = Compressor | type[Compressor]


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor


class _Narrow(Compressor):
    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return floating-point tensors in 16 bits, and other tensors unchanged."""
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its original dtype."""
        return tensor.to(ctx)


class FP16Compressor(_Narrow):
    """Sends floating-point tensors as float16: 11 bits of precision, values up to 65504."""

    dtype = torch.float16


class BF16Compressor(_Narrow):
    """Sends floating-point tensors as bfloat16: 8 bits of precision, float32's range. Not in Horovod."""

    dtype = torch.bfloat16


class Compression:
    """Compressors for the argument ``compression``, which also accepts the user's own :class:`Compressor`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def check_compression(compression: Any) -> None:
    """Raise ValueError if ``compression`` is not a compressor."""
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ValueError(
            f"compression={compression!r} is not a compressor: pass hvd.Compression.none or hvd.Compression.fp16"
        )
