"""Find out whether ranks have the same parameters in different orders.

In that case, gradients of different parameters would be averaged. Without names, the ranks know parameters only by their
numbers in the optimizer. If a program passes a set of parameters, the numbers mean different parameters in each process. If
these parameters have the same shape, only this check finds the mistake.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dualtrain.backends import Backend
from dualtrain.backends.agreement import Call, agree
from dualtrain.backends.wire import as_real
from dualtrain.differences import fingerprint
from dualtrain.errors import BackendError

_ELEMENTS = 3  # how many elements of each dimension are compared


def refuse_other_order(backend: Backend, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise BackendError, on every rank, if two ranks have equal parameters in different orders. Collective; blocks.

    Only the first elements of each parameter are compared. Ranks with different weights are not refused: the program may
    make them equal later.
    """
    mine = [_fingerprint(p) for _, p in named]
    orders = agree(backend, Call("order of parameters"), fingerprint(repr(mine)))
    if len(set(orders)) == 1:
        return
    contents = agree(backend, Call("set of parameters"), fingerprint(repr(sorted(mine))))
    ranks = range(backend.size)
    pairs = [(a, b) for a in ranks for b in ranks[:a] if contents[a] == contents[b] and orders[a] != orders[b]]
    if not pairs:
        return
    other, first = pairs[0]
    lists = backend.allgather_object(mine, name="order of parameters")
    number = next(i for i, (a, b) in enumerate(zip(lists[first], lists[other], strict=True)) if a != b)
    one, two = backend.members[first], backend.members[other]
    raise BackendError(
        f"ranks {one} and {two} have the same parameters in different orders ({named[number][0]!r} is the first one "
        "that differs), so that gradients of different parameters would be averaged: give the optimizer its parameters in "
        "the same order on every rank, as a list and not as a set"
    )


@torch.no_grad()
def _fingerprint(p: torch.Tensor) -> int:
    """Return a hash of the shape, the dtype and the first elements of ``p``."""
    try:
        part = as_real(p.detach()[(slice(_ELEMENTS),) * p.dim()].cpu())
        elements = part.to(torch.float64).flatten().tolist()
    except Exception:  # a subclass of Tensor that has no elements to read
        elements = []
    return fingerprint(f"{tuple(p.shape)} {p.dtype} {elements}")
