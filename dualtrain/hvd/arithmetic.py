"""Arithmetic before and after a reduction over ranks: operations, scale factors, identity elements; and Adasum."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import torch

from dualtrain.backends import ReduceOp
from dualtrain.backends.subnormals import keep_subnormals
from dualtrain.backends.wire import average_

# Horovod's integer values of the operations.
Average, Sum, Adasum, Min, Max, Product = range(6)

NAMES = {Average: "Average", Sum: "Sum", Adasum: "Adasum", Min: "Min", Max: "Max", Product: "Product"}
#: The backends' operation for each of Horovod's operations; backends have no Adasum.
BACKEND_OPS = {
    Average: ReduceOp.AVERAGE,
    Sum: ReduceOp.SUM,
    Min: ReduceOp.MIN,
    Max: ReduceOp.MAX,
    Product: ReduceOp.PRODUCT,
}

_EXACT_IN_DOUBLE = 1 << 53
_INT64 = 1 << 63
_SMALLEST_SQUARED_NORM = sys.float_info.min**0.5  # vectors with a smaller squared norm count as zero
_LARGEST_DENOMINATOR = 1 << 20
_SUMMED_BY_ONE_THREAD = (1 << 15) - 1  # torch splits a longer sum into one part per thread


def check_op(op: object) -> None:
    """Raise ValueError if ``op`` is not one of the operations."""
    if op not in NAMES:
        raise ValueError(f"op={op!r} is not a reduction: pass hvd.Average, Sum, Adasum, Min, Max or Product")


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return ``factor`` times ``tensor``, in the same dtype: ``tensor`` itself if the factor is 1, else a new tensor.

    8-bit and 16-bit floats are multiplied in 32 bits and rounded once. Products of integers and a whole-number factor are
    exact. For any other factor, integers are converted to 64-bit floats (int64 values of magnitude 2**53 or more to
    fractions), and the product is truncated toward zero. A product that does not fit into the dtype, or is not a number, is
    undefined, and raises no error. A bool is true if its product is not 0.
    """
    if factor == 1:
        return tensor
    if tensor.is_complex() or tensor.is_floating_point():
        wide = tensor.float() if tensor.dtype.itemsize < 4 else tensor
        return (wide * factor).to(tensor.dtype)
    if tensor.dtype == torch.bool:
        return (tensor * factor) != 0
    return _scaled_integers(tensor, factor)


def _scaled_integers(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor.is_integer() and abs(factor) < _INT64:
        return tensor * int(factor)
    result = (tensor.double() * factor).trunc().to(tensor.dtype)
    if tensor.dtype == torch.int64 and math.isfinite(factor):
        # A double represents integers exactly only up to magnitude 2**53: multiply larger ones one by one, as fractions.
        exact = _fraction(factor)
        for index in ((tensor >= _EXACT_IN_DOUBLE) | (tensor <= -_EXACT_IN_DOUBLE)).nonzero():
            product = int(int(tensor[tuple(index)]) * exact)
            if -_INT64 <= product < _INT64:  # otherwise torch would raise an error, after which no rank could make calls
                result[tuple(index)] = product
    return result


def _fraction(factor: float) -> Fraction:
    """Return the simple fraction whose nearest float is ``factor``, such as 1/3.

    If there is none, return the exact value of ``factor``.
    """
    simple = Fraction(factor).limit_denominator(_LARGEST_DENOMINATOR)
    return simple if float(simple) == factor else Fraction(factor)


@keep_subnormals
def finished(total: torch.Tensor, op: int, divisor: int, factor: float) -> torch.Tensor:
    """Return the result of a reduction: ``total`` times ``factor``, for an average also divided by ``divisor``.

    ``total`` is the sum (or minimum, …) over ranks, in the dtype that was sent. This function may overwrite or return it.
    """
    if op != Average:
        return scaled(total, factor)
    if factor == 1:
        return average_(total, divisor)
    if math.isfinite(factor) and not (total.is_floating_point() or total.is_complex()):
        numerator, denominator = _fraction(factor).as_integer_ratio()
        largest = max(int(total.max()), -int(total.min())) if total.numel() else 0
        if denominator * divisor < _INT64 and largest * abs(numerator) < _INT64:  # exact in int64
            return torch.div(total.long() * numerator, denominator * divisor, rounding_mode="trunc").to(total.dtype)
    return scaled(total, factor / divisor)


def identity_element(dtype: torch.dtype, shape: list[int], device: torch.device, op: int) -> torch.Tensor:
    """Return the contribution of a rank that has called ``join``: a tensor filled with ``op``'s identity element."""
    # torch.full supports no float8 dtypes in torch 2.5.
    return torch.tensor(_identity(dtype, op), dtype=dtype, device=device).expand(shape).clone()


def _identity(dtype: torch.dtype, op: int) -> float | int | bool:
    if op == Product:
        return 1
    if op not in (Min, Max):
        return 0
    if dtype == torch.bool:
        return op == Min
    # Some float8 dtypes have no infinity: torch converts it to their largest value, or to NaN.
    if dtype.is_floating_point and torch.tensor(math.inf, device="cpu").to(dtype).item() == math.inf:
        return math.inf if op == Min else -math.inf
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return limits.max if op == Min else limits.min


@keep_subnormals
def adasum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the adaptive sum of one tensor per rank, for any number of ranks. Neighbours are combined in a binary tree.

    Equal gradients are averaged, and orthogonal gradients are summed. For any other gradients a and b, half of b's
    projection onto a is subtracted from a, and half of a's projection onto b from b, before they are summed. Complex
    numbers count as pairs of real numbers.

    Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021, and Horovod's
    ``ops/adasum/adasum.h`` for the order of additions and for vectors of norm zero.
    """
    if tensors[0].is_complex():
        return torch.view_as_complex(adasum([torch.view_as_real(tensor) for tensor in tensors]))
    values = [tensor.to(torch.float64) for tensor in tensors]
    while len(values) > 1:
        pairs = [_adasum_of_two(*values[i : i + 2]) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(pairs) * 2 :]  # an unpaired last tensor stays unchanged
    return values[0].to(tensors[0].dtype)


def _adasum_of_two(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot, squared_norm_a, squared_norm_b = _sum_of(a * b), _sum_of(a * a), _sum_of(b * b)
    scale_a = 1 - dot / squared_norm_a / 2 if squared_norm_a >= _SMALLEST_SQUARED_NORM else 1.0
    scale_b = 1 - dot / squared_norm_b / 2 if squared_norm_b >= _SMALLEST_SQUARED_NORM else 1.0
    return scale_a * a + scale_b * b


def _sum_of(values: torch.Tensor) -> float:
    """Return the sum of ``values``. Its bits do not depend on the number of torch's threads on this rank."""
    parts = values.reshape(-1).split(_SUMMED_BY_ONE_THREAD) if values.is_cpu else (values,)
    return float(torch.stack([part.sum() for part in parts]).sum())
