"""Two forms of each operation: a blocking, differentiable call, and an asynchronous call that returns a handle.

Both forms accept groups of tensors. The asynchronous form can also work in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dualtrain.backends.wire import shares_elements
from dualtrain.hvd.compression import AnyCompressor, Compression, check_compression
from dualtrain.hvd.pending import Pending
from dualtrain.hvd.process_sets import ProcessSet

Options = dict[str, Any]


def call_options(name: str | None, process_set: ProcessSet, **options: Any) -> Options:
    """Return the options of a call: the name, the process set, and the ``options`` of its kind."""
    return {**options, "name": name, "process_set": process_set}


def reduction_options(
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    *,
    average: bool | None = None,
) -> Options:
    """Return the options of a call that reduces. ``average`` is the deprecated form of ``op``."""
    scales = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return call_options(name, process_set, op=op, average=average, **scales)


@dataclass(frozen=True)
class Operation:
    """A kind of collective operation, such as allreduce.

    Attributes:
        name: the operation's name, such as ``allreduce``.
        start: function (kind, tensors, outputs, options) that checks the options and requests the call.
        gradient: function (gradients of the results, the call, its options) that returns the gradients of the inputs, as
            Horovod defines them.
    """

    name: str
    start: Callable[[str, list[torch.Tensor], list[torch.Tensor] | None, Options], Pending]
    gradient: Callable[[Sequence[torch.Tensor], Pending, Options], Sequence[torch.Tensor | None]]

    def kind(self, grouped: bool) -> str:
        """Return the operation's name, or that of its ``grouped`` form, for messages between the ranks."""
        return f"grouped_{self.name}" if grouped else self.name


_numbers = itertools.count()
_handles: dict[int, tuple[Pending, Callable[[Any], Any]]] = {}


def new_handle(pending: Pending, finish: Callable[[Any], Any]) -> int:
    """Return a handle for a pending call; ``synchronize`` returns ``finish(result)``."""
    number = next(_numbers)
    _handles[number] = pending, finish
    return number


def poll(handle: int) -> bool:
    """Return whether the call has ended, so that ``synchronize`` would not block.

    Raises:
        ValueError: the handle does not exist, or was synchronized before.
    """
    if handle not in _handles:
        raise ValueError(f"handle {handle} does not exist, or was synchronized before")
    return _handles[handle][0].ended.is_set()


def synchronize(handle: int) -> Any:
    """Block until the call has ended, and return its result.

    Return ``None`` for a handle that does not exist, or was synchronized before. The result can be used on the current
    CUDA stream.

    Raises:
        HorovodInternalError: the call failed.
    """
    if handle not in _handles:
        return None
    pending, finish = _handles[handle]
    pending.wait_for_end()
    _handles.pop(handle, None)  # only now: if Ctrl-C interrupts the wait, the handle stays valid
    return finish(pending.wait())


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: Operation, kind: str, options: Options, *tensors: torch.Tensor) -> Any:
        ctx.operation, ctx.options = operation, options
        ctx.pending = operation.start(kind, list(tensors), None, options)
        results = ctx.pending.wait()
        ctx.pending.tensors = []
        ctx.mark_non_differentiable(*(r for r in results if not (r.is_floating_point() or r.is_complex())))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, None, *ctx.operation.gradient(grads, ctx.pending, ctx.options)


def differentiable(
    operation: Operation,
    tensors: Iterable[torch.Tensor],
    options: Options,
    *,
    grouped: bool = False,
    compression: AnyCompressor = Compression.none,
) -> list[torch.Tensor]:
    """Make a differentiable call; return the results as new tensors. Collective; blocks."""
    check_compression(compression)
    packed = [compression.compress(tensor) for tensor in _checked(tensors)]
    inputs = [tensor for tensor, _ in packed]
    kind = operation.kind(grouped)
    results = list(_Differentiable.apply(operation, kind, options, *inputs))
    if compression is not Compression.none:
        results = [compression.decompress(r, ctx) for r, (_, ctx) in zip(results, packed, strict=True)]
    return results


def first(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the only result of a call on one tensor; used as ``finish`` of handles."""
    return results[0]


def start(
    operation: Operation,
    tensors: Iterable[torch.Tensor],
    options: Options,
    *,
    grouped: bool = False,
    in_place: bool = False,
    finish: Callable[[list[torch.Tensor]], Any] = tuple,
) -> int:
    """Start a call that is not differentiable; return a handle for ``poll`` and ``synchronize``. Does not block.

    ``synchronize`` returns ``finish(results)``.
    """
    inputs = _checked(tensors, in_place=in_place)
    return new_handle(operation.start(operation.kind(grouped), inputs, inputs if in_place else None, options), finish)


def _checked(tensors: Iterable[torch.Tensor], *, in_place: bool = False) -> list[torch.Tensor]:
    """Return ``tensors`` as a list. Raises ValueError if there are none, or one of them cannot be sent or overwritten."""
    listed = list(tensors)
    if not listed:
        raise ValueError("an empty list of tensors: pass at least one")
    for tensor in listed:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"a torch.Tensor is needed, not {tensor!r}: wrap it in torch.tensor(…)")
        unusual = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else ""
        if unusual or tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
            kind = unusual or (tensor.device.type if tensor.layout is torch.strided else str(tensor.layout))
            raise ValueError(f"a {kind} tensor cannot be sent: convert it to a dense tensor of numbers on the CPU or a GPU")
        if in_place and shares_elements(tensor):
            raise ValueError(
                "several elements of the tensor share memory, so that it cannot be changed in place: clone() it"
            )
    return listed
