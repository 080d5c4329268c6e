"""Check that all ranks make the same collective call, before any of its data is used.

If calls do not match, Horovod reports an error; Gloo may hang, abort the process or return a wrong sum (1065353217 for
int32 1 on one rank and float32 1.0 on another). So every checked call first exchanges two integers: a fingerprint of the
call, and an extent, which may differ between ranks (for an allgather, the number of rows). If the fingerprints are equal,
every rank gets the extents of all ranks. Otherwise the ranks exchange descriptions of their calls, and all of them raise
the same error. The backend stays usable. A rank whose arguments are wrong sends a refusal in place of its call, so the
other ranks raise too. Long data is sent after this comparison. Short data may be sent in the same messages as the
fingerprints, and is used only if the fingerprints are equal.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NoReturn

import torch

from dualtrain.backends.base import Primitives, Short
from dualtrain.differences import fingerprint
from dualtrain.errors import BackendError, UserError, one_line

_DESCRIPTION_BYTES = 512
#: Added to a call's fingerprint once for each sum of gradients that this rank has started in the call's process group.
#: The number is odd, so different counts of sums give different fingerprints.
_PER_SUM = 0x9E3779B97F4A7C15
_OF_SECOND_THREAD = 0xD1B54A32D192ED03  # added to the fingerprint if a second thread of the rank makes the call
_PLAIN = (ValueError, TypeError, UserError)  # their messages say enough without the name of the type
_IN_SECOND_THREAD = " in a second thread, which needs a channel()"

#: Function that gathers the same number of integers from every rank, in rank order, such as ``Primitives.exchange``.
Exchange = Callable[[Sequence[int]], list[list[int]]]


@dataclass(frozen=True)
class Call:
    """Properties of a collective call that must be the same on every rank.

    ``None`` in ``shape`` is a first dimension that may differ between ranks.
    """

    kind: str
    name: str | None = None
    dtype: torch.dtype | None = None
    shape: tuple[int | None, ...] | None = None
    root: int | None = None
    device: str = "cpu"  # the type of the tensor's device: communication libraries hang if only some ranks send from a GPU
    problem: str = ""  # why this rank cannot make the call; empty if it can

    @classmethod
    def on(
        cls, kind: str, tensor: torch.Tensor, name: str | None, *, rows_may_differ: bool = False, root: int | None = None
    ) -> Call:
        """Return the call ``kind`` on ``tensor``; with ``rows_may_differ``, the ranks may differ in the first dimension."""
        device = "cpu" if tensor.is_cpu else tensor.device.type
        shape = (None, *tensor.shape[1:]) if rows_may_differ else tensor.shape
        return cls._of(kind, name, tensor.dtype, shape, root, device)

    @classmethod
    @lru_cache(maxsize=1024)  # a program repeats the same few calls
    def _of(
        cls,
        kind: str,
        name: str | None,
        dtype: torch.dtype,
        shape: tuple[int | None, ...],
        root: int | None,
        device: str,
    ) -> Call:
        return cls(kind, name, dtype, tuple(shape), root, device)

    def describe(self, members: Sequence[int]) -> str:
        """Return text for messages: ``sum of 'loss' (float32, 3×4)``; a device is shown unless it is the CPU.

        ``members`` are the ranks' numbers in the job.
        """
        text = self.kind if self.name is None else f"{self.kind} of {self.name!r}"
        if self.root is not None:
            text += f" from rank {members[self.root]}"
        details = [str(self.dtype).removeprefix("torch.")] if self.dtype is not None else []
        if self.shape is not None:
            details.append("×".join("any" if n is None else str(n) for n in self.shape) or "scalar")
        if self.device != "cpu":
            details.append(self.device)
        text = f"{text} ({', '.join(details)})" if details else text
        return f"{text}, refused since {self.problem}" if self.problem else text

    @lru_cache(maxsize=1024)  # noqa: B019 - keyed by the call's values, and a program repeats the same few calls
    def fingerprint(self) -> int:
        """Return a hash of the call, below 2**63."""
        return fingerprint(repr(self))


def agree(backend: Primitives, call: Call, extent: int = 0, data: Short | None = None) -> list[int]:
    """Check that all ranks make the same ``call``, and gather their ``extent`` in rank order. Collective; blocks.

    The backend may send short ``data`` together with the fingerprints, and then set ``data.result``: either on every rank,
    or on none.

    This function also sends this rank's ``backend.flag``, and stores in ``backend.any_flag`` whether it is set on any rank.

    Raises:
        BackendError: on every rank, if the calls differ (the message names each rank's call); or a rank failed, or the
            comparison timed out. In the last two cases, later calls fail too.
    """
    sums = backend.sums_among_calls(call.device)
    mine = (call.fingerprint() + sums * _PER_SUM + backend.in_second_thread * _OF_SECOND_THREAD) & (1 << 63) - 1
    numbers = [~mine if backend.flag else mine, extent]
    backend.compared = True
    try:
        gathered = backend.whole_call(partial(backend.exchange_call, numbers, data))
    except BackendError as error:
        backend.abandon(error)
        raise
    fingerprints, extents = zip(*gathered, strict=True)
    backend.any_flag = min(fingerprints) < 0  # a rank whose flag is set has sent the complement, which is negative
    if backend.any_flag:
        fingerprints = tuple(max(each, ~each) for each in fingerprints)
    if len(set(fingerprints)) == 1:
        return list(extents)
    text = call.describe(backend.members) + (f" after {sums} sum{'s' * (sums > 1)} of gradients" if sums else "")
    if backend.in_second_thread:
        text += _IN_SECOND_THREAD
    raise BackendError(f"the ranks do not agree on a collective call: {_differences(backend, text)}")


def refuse(backend: Primitives, call: Call, problem: Exception) -> NoReturn:
    """Raise ``problem``, an error in this rank's own arguments. Collective: the other ranks raise too, and do not hang.

    Raises:
        Exception: ``problem``, on every rank, if all of them make this call and have this problem.
        BackendError: on every rank, if their calls or problems differ; otherwise as :func:`agree`.
    """
    text = re.sub(r" at 0x[0-9a-f]+", "", one_line(problem))  # the address of an object differs between ranks
    if type(problem) not in _PLAIN or not text:
        text = f"{type(problem).__name__}: {text}" if text else type(problem).__name__
    # Inside of a torch.func transform, torch refuses to write into the comparison's buffers. Private in torch 2.5 to 2.15.
    with torch._C._DisableFuncTorch():
        agree(backend, replace(call, problem=text))
    raise problem


def _differences(backend: Primitives, mine: str) -> str:
    """Return each rank's call: ``ranks 0, 2: sum of 'x' (float32, 3); rank 1: sum of 'x' (float32, 4)``. Collective."""
    ranks_of: dict[str, list[str]] = {}
    descriptions = exchange_text(backend.compare_numbers, mine, _DESCRIPTION_BYTES)
    if all(each.endswith(_IN_SECOND_THREAD) for each in descriptions):  # then the calls differ in something else
        descriptions = [each.removesuffix(_IN_SECOND_THREAD) for each in descriptions]
    for rank, description in zip(backend.members, descriptions, strict=True):
        ranks_of.setdefault(description, []).append(str(rank))
    return "; ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {what}" for what, ranks in ranks_of.items())


def exchange_text(exchange: Exchange, text: str, nbytes: int) -> list[str]:
    """Gather every rank's text in rank order, cut to ``nbytes`` (a multiple of 8) bytes of UTF-8. Collective; blocks."""
    data = text.encode(errors="replace")[:nbytes].ljust(nbytes)
    return [array("q", numbers).tobytes().decode(errors="replace").strip() for numbers in exchange(array("q", data))]
