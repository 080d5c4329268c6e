"""One operation, all of its forms: blocking or not, in place or not, one tensor or several, and with gradients.

An operation is written once, as an :class:`Operation`; :func:`forms` makes the functions that users call from it. A
form differs from another only in how tensors go in and come out.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dualtrain.hvd.compression import Compression
from dualtrain.hvd.engine import Pending
from dualtrain.hvd.process_sets import global_process_set

Options = dict[str, Any]
_REQUIRED = inspect.Parameter.empty
#: The defaults of every option that any operation has.
_DEFAULTS: Options = {
    "average": None,
    "name": None,
    "compression": Compression.none,
    "op": None,
    "prescale_factor": 1.0,
    "postscale_factor": 1.0,
    "process_set": global_process_set,
    "root_rank": _REQUIRED,
    "splits": None,
}


@dataclass(frozen=True)
class Operation:
    """What is particular to one operation.

    Attributes:
        name: allreduce, …
        does: for the docstrings.
        options: the parameters after the tensor, in Horovod's order.
        blocking_options: those of the blocking form that is not in place, which may be compressed.
        start: checks the options and asks for the call: (kind, tensors, outputs, options).
        gradient: Horovod's factor: (gradients of the results, the call, its options) → gradients of the inputs.
        defaults: where they differ from the others'.
        returns: what the user gets for the list of results.
    """

    name: str
    does: str
    options: tuple[str, ...]
    blocking_options: tuple[str, ...]
    start: Callable[[str, list[torch.Tensor], list[torch.Tensor] | None, Options], Pending]
    gradient: Callable[[Sequence[torch.Tensor], Pending, Options], Sequence[torch.Tensor | None]]
    defaults: tuple[tuple[str, Any], ...] = ()
    returns: Callable[[list[torch.Tensor], Options], Any] = lambda results, _: results[0]


_numbers = itertools.count()
_handles: dict[int, tuple[Pending, Callable[[Any], Any]]] = {}


def new_handle(pending: Pending, finish: Callable[[Any], Any]) -> int:
    """A number for a call under way, whose result ``finish`` turns into what the user gets."""
    number = next(_numbers)
    _handles[number] = pending, finish
    return number


def poll(handle: int) -> bool:
    """Whether the call has ended: ``synchronize`` would not block. Does not block itself.

    Raises:
        ValueError: there is no such handle, or it was synchronized.
    """
    if handle not in _handles:
        raise ValueError(f"handle {handle} does not exist, or was synchronized before")
    return _handles[handle][0].ended.is_set()


def synchronize(handle: int) -> Any:
    """Blocks until the call has ended; its result, usable on the current stream. ``None`` for an unknown handle.

    Raises:
        HorovodInternalError: the call failed.
    """
    if handle not in _handles:
        return None
    pending, finish = _handles.pop(handle)
    return finish(pending.wait())


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: Operation, kind: str, options: Options, *tensors: torch.Tensor) -> Any:
        ctx.operation, ctx.options = operation, options
        ctx.pending = operation.start(kind, list(tensors), None, options)
        results = ctx.pending.wait()
        ctx.pending.tensors = []
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, None, *ctx.operation.gradient(grads, ctx.pending, ctx.options)


def forms(operation: Operation, *, grouped: bool = False, in_place: bool = False) -> tuple[Callable[..., Any], ...]:
    """The functions ``x`` and ``x_async``, and with ``in_place`` also ``x_`` and ``x_async_``, of an operation."""
    kind = f"grouped_{operation.name}" if grouped else operation.name
    made = [_blocking(operation, kind, grouped), _asynchronous(operation, kind, grouped, False)]
    if in_place:
        later = _asynchronous(operation, kind, grouped, True)
        made += [_described(_waited(later), f"{kind}_", operation, operation.options, grouped), later]
    return tuple(made)


def _blocking(operation: Operation, kind: str, grouped: bool) -> Callable[..., Any]:
    def form(*args: Any, **kwargs: Any) -> Any:
        tensors, options = _read(described.__name__, signature, args, kwargs, grouped)
        compression = options.pop("compression", Compression.none)
        packed = [compression.compress(tensor) for tensor in tensors]
        inputs = [tensor for tensor, _ in packed]
        results = list(_Differentiable.apply(operation, kind, options, *inputs))  # type: ignore[no-untyped-call]
        if compression is not Compression.none:
            results = [compression.decompress(r, ctx) for r, (_, ctx) in zip(results, packed, strict=True)]
        return results if grouped else operation.returns(results, options)

    described = _described(form, kind, operation, operation.blocking_options, grouped)
    signature = inspect.signature(described)
    return described


def _asynchronous(operation: Operation, kind: str, grouped: bool, in_place: bool) -> Callable[..., Any]:
    def form(*args: Any, **kwargs: Any) -> int:
        tensors, options = _read(described.__name__, signature, args, kwargs, grouped)
        pending = operation.start(kind, tensors, tensors if in_place else None, options)
        return new_handle(pending, tuple if grouped else lambda results: operation.returns(results, {"splits": ()}))

    described = _described(form, f"{kind}_async{'_' * in_place}", operation, operation.options, grouped)
    signature = inspect.signature(described)
    return described


def _waited(later: Callable[..., int]) -> Callable[..., Any]:
    def form(*args: Any, **kwargs: Any) -> Any:
        return synchronize(later(*args, **kwargs))

    return form


def _read(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Options, grouped: bool
) -> tuple[list[torch.Tensor], Options]:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None
    bound.apply_defaults()
    options = dict(bound.arguments)
    tensors = list(options.pop("tensors")) if grouped else [options.pop("tensor")]
    if not tensors:
        raise ValueError("an empty list of tensors: pass one at least")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"a torch.Tensor is needed, not {tensor!r}: wrap it in torch.tensor(…)")
    return tensors, options


def _described(
    form: Callable[..., Any], name: str, operation: Operation, options: tuple[str, ...], grouped: bool
) -> Callable[..., Any]:
    """``form`` with a name, a signature and a docstring of its own."""
    defaults = {**_DEFAULTS, **dict(operation.defaults)}
    first = "tensors" if grouped else "tensor"
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(first, kinds)]
    # What is required comes before what is not; Horovod's order keeps to that.
    parameters += [inspect.Parameter(option, kinds, default=defaults[option]) for option in options]
    form.__name__ = form.__qualname__ = name
    form.__module__ = "dualtrain.hvd.mpi_ops"
    form.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    what = "a list of tensors, one call for all" if grouped else "one tensor"
    asynchronous, in_place = "_async" in name, name.endswith("_")
    form.__doc__ = (
        f"{operation.does}\n\n"
        f"Takes {what}; the result is {'in place' if in_place else 'new'}. "
        + (
            "Does not block: returns a handle for ``poll`` and ``synchronize``."
            if asynchronous
            else "Blocks until the result is there, and returns it."
        )
        + ("" if asynchronous or in_place else " Autograd goes through it.")
        + "\n\nRaises:\n    ValueError: an argument is wrong; nothing was sent.\n"
        "    HorovodInternalError: the ranks do not match, one was lost, or Horovod was shut down.\n"
    )
    return form
