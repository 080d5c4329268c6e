"""Convert a checkpoint's tree to JSON that refers to tensors by name, and back.

A safetensors file holds contiguous tensors, so the JSON holds the strides of other tensors. The bits of an optimizer's
steps may depend on them, in matrix products for example. Values that a checkpoint cannot hold are refused.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy
import safetensors.torch
import torch

from dualtrain.gradients.layout import dense_strides, with_strides

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def check(tree: dict[str, Any]) -> None:
    """Raise TypeError if a checkpoint cannot hold a value in ``tree``. Copies no tensors."""
    flatten(tree, None)


class NoTensors(dict[str, Any]):
    """A mapping that has ``None`` for every name. With it, :func:`rebuild` needs no tensors."""

    def __missing__(self, name: str) -> None:
        return None


def flatten(value: Any, tensors: dict[str, torch.Tensor] | None, place: str = "") -> Any:
    """Convert ``value`` for JSON: each container to its kind and its items, each tensor to its name in ``tensors``.

    CPU copies of all tensors are added to ``tensors``. If ``tensors`` is ``None``, tensors are only checked.

    Raises:
        TypeError: a checkpoint cannot hold a value of this kind; the message names its ``place``.
    """
    if isinstance(value, torch.Tensor):
        kind = _unusual(value)
        if kind:
            raise TypeError(f"a checkpoint holds plain values and dense tensors, and {place or 'the whole'} is a {kind}")
        if tensors is None:
            return ["tensor", ""]
        name = f"t{len(tensors)}"
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return ["tensor", name] if value.is_contiguous() else ["strided", [name, [*dense_strides(value)]]]
    if isinstance(value, Counter):  # the milestones of MultiStepLR
        return ["counter", [[flatten(key, tensors, place), count] for key, count in value.items()]]
    if isinstance(value, dict) and any(isinstance(key, tuple) for key in value):
        return [
            "items",
            [[flatten(key, tensors, place), flatten(item, tensors, f"{place}[{key!r}]")] for key, item in value.items()],
        ]
    if isinstance(value, dict):
        return [
            "dict",
            [
                [_plain(key, f"a key of {place or 'the whole'}"), flatten(item, tensors, f"{place}[{key!r}]")]
                for key, item in value.items()
            ],
        ]
    if isinstance(value, list | tuple):
        items = enumerate(value)
        kind = "list" if isinstance(value, list) else "tuple"  # a torch.Size and a named tuple become tuples
        return [kind, [flatten(item, tensors, f"{place}[{number}]") for number, item in items]]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value)]
    if isinstance(value, numpy.generic):
        value = value.item()
    return ["value", _plain(value, place or "the whole")]


def _unusual(tensor: torch.Tensor) -> str:
    """Return the kind of a tensor that a safetensors file cannot hold; "" for usual tensors."""
    if tensor.is_nested or tensor.layout != torch.strided:
        return "nested tensor" if tensor.is_nested else "sparse tensor"
    if tensor.is_quantized or tensor.is_meta:
        return "quantized tensor" if tensor.is_quantized else "meta tensor"
    return "" if _has_format(tensor.dtype) else f"tensor of {tensor.dtype}"


@cache
def _has_format(dtype: torch.dtype) -> bool:
    try:
        safetensors.torch.save({"empty": torch.empty(0, dtype=dtype)})
    except Exception:  # the type of the exception depends on the version of safetensors
        return False
    return True


def _plain(value: Any, place: str) -> bool | int | float | str | None:
    """Return a plain value unchanged. Raises TypeError for other values."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint holds plain values and tensors, and {place} is a {type(value).__name__}")


def rebuild(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Invert :func:`flatten`. Raises ValueError, KeyError, TypeError or RuntimeError for values of other forms."""
    kind, content = value
    if kind == "tensor":
        return tensors[content]
    if kind == "strided":
        name, strides = content
        saved: torch.Tensor | None = tensors[name]  # ``None`` from :class:`NoTensors`
        return None if saved is None else with_strides(saved, strides)
    if kind == "counter":
        return Counter({rebuild(key, tensors): count for key, count in content})
    if kind == "items":
        return {rebuild(key, tensors): rebuild(item, tensors) for key, item in content}
    if kind == "dict":
        return {key: rebuild(item, tensors) for key, item in content}
    if kind == "value":
        return content
    if kind == "dtype":
        return _DTYPES[content]
    # Versions up to 0.2.0 wrote the name of a tuple's class as its kind: "Size", for example.
    items = [rebuild(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)
