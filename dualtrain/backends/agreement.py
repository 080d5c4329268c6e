"""Before data travels, the ranks compare what they are about to do.

The libraries disagree on what happens when ranks do not match: Horovod reports it; Gloo may hang, abort the process
or return a wrong sum (int32 against float32 gives 1065353217). So every checked call first exchanges one row of two
integers, a fingerprint of the call and the caller's extent (its number of rows, where ranks may differ). Equal
fingerprints: the extents come back. Otherwise nothing is sent, the ranks exchange what each of them wanted, and all
of them raise the same error; the backend stays usable.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn

import torch

from dualtrain.errors import BackendError

if TYPE_CHECKING:
    from dualtrain.backends.collectives import Backend

_DESCRIPTION_BYTES = 512


@dataclass(frozen=True)
class Call:
    """What must be the same on every rank for one collective call.

    ``shape`` leaves out the first dimension where the ranks may differ in it, and starts with ``None`` then.
    """

    kind: str
    name: str | None = None
    dtype: torch.dtype | None = None
    shape: tuple[int | None, ...] | None = None
    root: int | None = None

    @classmethod
    def on(cls, kind: str, tensor: torch.Tensor, name: str | None, *, free: bool = False, root: int | None = None) -> Call:
        """The call of ``kind`` on ``tensor``; ``free`` where the ranks may differ in the first dimension."""
        shape = (None, *tensor.shape[1:]) if free else tuple(tensor.shape)
        return cls(kind, name, tensor.dtype, shape, root)

    def describe(self) -> str:
        """For people: ``sum of 'loss' (float32, 3×4)``."""
        text = self.kind if self.name is None else f"{self.kind} of {self.name!r}"
        if self.root is not None:
            text += f" from rank {self.root}"
        details = [str(self.dtype).removeprefix("torch.")] if self.dtype is not None else []
        if self.shape is not None:
            details.append("×".join("any" if n is None else str(n) for n in self.shape) or "scalar")
        return f"{text} ({', '.join(details)})" if details else text

    @lru_cache(maxsize=1024)  # noqa: B019 - of calls, which are values: a program repeats the same few
    def fingerprint(self) -> int:
        """A number below 2**63 that differs where the calls do."""
        return _fingerprint(repr(self))


def _fingerprint(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def agree(backend: Backend, call: Call, extent: int = 0) -> list[int]:
    """Every rank's ``extent``, in rank order, once all ranks were seen to make the same ``call``. Blocks.

    Raises:
        BackendError: on every rank, naming what each of them wanted, if the calls differ.
    """
    fingerprints, extents = zip(*backend.exchange_short([call.fingerprint(), extent]), strict=True)
    if len(set(fingerprints)) == 1:
        return list(extents)
    raise BackendError(f"the ranks do not agree on a collective call: {_differences(backend, call)}")


def refuse(backend: Backend, call: Call, problem: ValueError) -> NoReturn:
    """Raises ``problem``, which this rank has with its own arguments, without leaving the others to wait for it.

    Raises:
        ValueError: every rank has the same problem.
        BackendError: the others called something else; they raise it too.
    """
    agree(backend, replace(call, kind=f"{call.kind}, refused since {problem},"))
    raise problem


def _differences(backend: Backend, call: Call) -> str:
    """``ranks 0, 2: sum of 'x' (float32, 3); rank 1: sum of 'x' (float32, 4)``."""
    said = exchange_text(backend, call.describe(), _DESCRIPTION_BYTES)
    wanted: dict[str, list[str]] = {}
    for rank, description in enumerate(said):
        wanted.setdefault(description, []).append(str(rank))
    return "; ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {what}" for what, ranks in wanted.items())


def exchange_text(backend: Backend, text: str, nbytes: int) -> list[str]:
    """Every rank's text, cut at ``nbytes`` (a multiple of 8) of UTF-8, in rank order. Collective; blocks."""
    data = text.encode(errors="replace")[:nbytes].ljust(nbytes)
    rows = backend.exchange_short(array("q", data))
    return [array("q", row).tobytes().decode(errors="replace").strip() for row in rows]


def agree_on_list(backend: Backend, what: str, mine: list[str]) -> None:
    """Makes sure that every rank has the same list of descriptions. Blocks.

    Raises:
        BackendError: on every rank, naming the first entry in which rank 0 and another rank differ.
    """
    backend.settle()
    rows = backend.exchange_short([_fingerprint(f"{what} {mine}")])
    if all(row == rows[0] for row in rows):
        return
    lists = backend.allgather_object(mine, name=what)
    other = next(rank for rank, theirs in enumerate(lists) if theirs != lists[0])
    place = next((i for i, (a, b) in enumerate(zip(lists[0], lists[other], strict=False)) if a != b), None)
    if place is None:
        difference = f"rank 0 has {len(lists[0])}, rank {other} has {len(lists[other])}"
    else:
        difference = f"number {place} is {lists[0][place]} on rank 0 and {lists[other][place]} on rank {other}"
    raise BackendError(
        f"the ranks do not have the same {what}: {difference}; build the same model and optimizer on every rank"
    )
