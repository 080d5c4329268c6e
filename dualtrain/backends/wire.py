"""Conversion of tensors to the few dtypes that every backend's library reduces.

Broadcast, gather and all-to-all send bytes: lossless for every dtype, bool and bfloat16 included. Only compressed gradients
are reduced in a backend's ``narrow`` dtypes. All other reductions use one of four wire dtypes (``REDUCIBLE``), wide enough
that sums keep their precision:

| tensor | wire dtype | reason |
|---|---|---|
| float32, float64, int32, int64 | itself | torch.distributed and Horovod reduce them natively |
| float16, bfloat16, float8 | float32 | Horovod has no bfloat16; float16 sums overflow; the result is rounded only once |
| int8, uint8, int16, uint16, uint32 | int32 or int64 | Gloo has no int16; the sum cannot overflow before the average |
| bool | int32 | SUM and MAX are "any", PRODUCT and MIN are "all" |
| complex | that of its real and imaginary parts | SUM and AVERAGE only: see below |

Complex numbers have no order, and the product of their parts is not their product. uint64 and float4 tensors cannot be
reduced. All backends use the same table, so that they round at the same places.
"""

from __future__ import annotations

from functools import cache

import torch

from dualtrain.backends.base import REDUCIBLE, ReduceOp
from dualtrain.backends.dtensor import is_dtensor
from dualtrain.backends.subnormals import keep_subnormals

_WIDER = {
    torch.bool: torch.int32,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
_PAIR = getattr(torch, "float4_e2m1fn_x2", None)  # two float4 numbers per element; not in torch 2.5
_LOGICAL = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}


def checked_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` if its elements can be sent.

    Raises:
        TypeError: ``tensor`` is not a torch.Tensor.
        ValueError: ``tensor`` is sparse, nested, quantized or a DTensor, or is inside of a torch.func transform.
    """
    if type(tensor) is not torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a tensor is needed, not a {type(tensor).__name__}: convert it with torch.as_tensor()")
        if is_dtensor(tensor):  # its own memory is empty
            raise ValueError("a DTensor cannot be sent: pass its to_local() or full_tensor()")
    if tensor.is_nested:
        raise ValueError("a nested tensor cannot be sent: convert it with torch.nested.to_padded_tensor()")
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise ValueError(f"a tensor with the layout {layout} cannot be sent: convert it with to_dense()")
    if tensor.is_quantized:  # its memory lacks the scale, which may differ between ranks
        raise ValueError("a quantized tensor cannot be sent: convert it with dequantize()")
    try:
        tensor.data_ptr()
    except RuntimeError:  # a transform's tensors wrap others and have no memory; no public attribute marks them
        raise ValueError(
            "a tensor inside of a torch.func transform (grad, vmap, jacrev, or is_grads_batched=True) cannot be sent: call "
            "the collective outside of the transform, or get the derivative with backward()"
        ) from None
    return tensor


def checked_writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` if its elements can be sent, and overwritten with a result.

    Raises:
        TypeError, ValueError: as :func:`checked_dense`.
        ValueError: elements of ``tensor`` share memory.
    """
    if not checked_dense(tensor).is_contiguous() and shares_elements(tensor):
        raise ValueError("elements of the tensor share memory, as after expand(), and cannot be written: pass a clone()")
    return tensor


def shares_elements(tensor: torch.Tensor) -> bool:
    """Return whether torch refuses to write into ``tensor``, since several of its elements share one memory location."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.layout is torch.strided and tensor.numel() > 1 and any(n > 1 and stride == 0 for n, stride in steps)


@cache
def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the wire dtype of tensors of ``dtype`` (not complex).

    Raises:
        ValueError: no wire dtype holds sums of this dtype.
    """
    if dtype in REDUCIBLE:
        return dtype
    if dtype.is_floating_point and dtype is not _PAIR:
        return torch.float32
    if dtype not in _WIDER:
        raise ValueError(f"{dtype} tensors cannot be reduced: convert them to int64 or float32 first")
    return _WIDER[dtype]


@cache
def wire_op(dtype: torch.dtype, op: ReduceOp) -> ReduceOp:
    """Return the operation with which the primitives of a backend (``base.py``) compute ``op`` on tensors of ``dtype``.

    AVERAGE gives SUM, which :func:`average_` then divides.

    Raises:
        ValueError: the operation has no meaning for the dtype, or no wire dtype holds sums of this dtype.
    """
    wire_dtype(dtype.to_real())
    if dtype == torch.bool and op is ReduceOp.AVERAGE:
        raise ValueError("bool tensors have no average: convert to a floating-point dtype first")
    if dtype.is_complex and op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ValueError(f"complex tensors have no {op.value} over ranks: reduce the real and imaginary parts")
    if op is ReduceOp.AVERAGE:
        return ReduceOp.SUM
    return _LOGICAL.get(op, op) if dtype == torch.bool else op


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor's real and imaginary parts (a view, or a copy if it is conjugated); others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def pack(tensor: torch.Tensor) -> torch.Tensor:
    """Convert ``tensor`` to a contiguous tensor of its wire dtype; return ``tensor`` itself if it needs no conversion."""
    if tensor.dtype in REDUCIBLE and tensor.is_contiguous() and not tensor.is_neg():
        return tensor  # the most frequent case; the calls below take longer than a reduction of a few values
    tensor = as_real(tensor)
    if tensor.is_neg():  # a view whose memory has the opposite sign, such as z.conj().imag
        tensor = tensor.resolve_neg()
    return tensor.to(wire_dtype(tensor.dtype)).contiguous()


def unpack(wire: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Convert ``wire`` to the dtype and shape of ``like``; return ``wire`` itself if it has these."""
    if wire.dtype is like.dtype and wire.shape == like.shape:
        return wire
    if like.is_complex():
        return torch.view_as_complex(unpack(wire, as_real(like)))
    return wire.to(like.dtype).view(like.shape)


@keep_subnormals
def average_(total: torch.Tensor, size: int) -> torch.Tensor:
    """Divide a sum over ``size`` ranks, in place, the same way on every backend.

    Floating-point and complex sums are multiplied by 1/size in their own precision. Integers use integer division,
    truncated toward zero. (Horovod truncates the product of the sum and 1/size in floating point, so its result is off by
    one for some sizes.)
    """
    if total.is_floating_point() or total.is_complex():
        return total.mul_(_reciprocal(size, total.dtype.to_real()))
    return total.copy_(torch.div(total, size, rounding_mode="trunc"))


@cache
@torch.inference_mode(False)  # a cached inference tensor would raise an error in callers that need autograd
def _reciprocal(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return 1/size as a tensor: multiplying a short tensor by a Python number takes three times as long."""
    return torch.tensor(1.0 / size, dtype=dtype, device="cpu")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements of ``tensor`` as a flat uint8 tensor.

    It is a view if ``tensor`` is contiguous and not a conjugate or negative view; otherwise it is a copy.
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() <= 1:
        # A tensor of one element, or of none, is contiguous with any stride, but a view of it as bytes needs stride 1.
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors on one device have the same dtype, shape and bits. A NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = as_bytes(one), as_bytes(other)
    # torch compares 64-bit integers several times as fast as bytes.
    if not (first.numel() % 8 or first.storage_offset() % 8 or second.storage_offset() % 8):
        first, second = first.view(torch.int64), second.view(torch.int64)
    return torch.equal(first, second)


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a view of ``data`` (contiguous uint8) as a tensor of this dtype and shape."""
    return data.view(dtype).view(shape)
