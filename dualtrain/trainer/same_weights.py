"""Check that training keeps the weights equal on all ranks.

Averaged gradients alone keep them equal. But code of the user's may change weights on each rank in its own way: a forward
pass that writes into parameters, a hook, an optimizer that draws random numbers, a learning rate that only some ranks set.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dualtrain.backends import Backend
from dualtrain.backends.comparison import compare
from dualtrain.backends.wire import as_bytes
from dualtrain.differences import in_words
from dualtrain.errors import RanksDifferError
from dualtrain.gradients.slots import Slot
from dualtrain.trainer.machine import PROCESSOR, processor

log = logging.getLogger("dualtrain")

_THREADS = "torch.get_num_threads()"


def compare_weights(backend: Backend, slots: Sequence[Slot], values: Mapping[str, Any]) -> None:
    """Compare checksums of the trained parameters, and ``values``, between the ranks. Collective; blocks.

    Unequal parameters cause a warning, and no error, if the ranks have different processors or numbers of threads, since
    their results then differ in the last digits.

    Raises:
        RanksDifferError: on every rank; names what differs.
    """
    sums: dict[str, int] = {}

    def read() -> dict[str, Any]:
        sums.update(_checksums(slots))
        return {**values, **sums, _THREADS: torch.get_num_threads(), **processor(backend)}

    found = compare(backend, "weights", read)
    given = [one for one in found if one.name in values]
    different = [one for one in found if one.name in sums]
    unlike = [one for one in found if one.name in (_THREADS, *PROCESSOR)]
    if given:
        raise RanksDifferError(
            f"the ranks do not take the same step: {in_words(given)}; give every rank the same arguments"
        )
    if different and not unlike:
        raise RanksDifferError(
            f"the ranks do not have the same weights after a step: {in_words(different)}; change weights, gradients and "
            "options of the optimizer on every rank in the same way, and not in a forward pass, where the ranks have "
            "different samples (as nn.Embedding(max_norm=…) does)"
        )
    if different and backend.rank == 0:
        log.warning(f"the weights of the ranks differ, at least in the last digits, because {in_words(unlike)}")


@torch.no_grad()
def _checksums(slots: Sequence[Slot]) -> dict[str, int]:
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for slot in slots:
        sums.setdefault(slot.param.device, []).append(_checksum(slot.param))
    # One copy for each device, because the CPU waits for every copy.
    found = {device: iter(torch.stack(some).tolist()) for device, some in sums.items()}
    return {f"the checksum of {slot.name!r}": next(found[slot.param.device]) for slot in slots}


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum the bits of ``tensor`` as 64-bit integers, (); a sum of narrower integers takes ten times as long."""
    data = as_bytes(tensor)
    whole = data[: data.numel() // 8 * 8]
    whole = whole.clone() if whole.storage_offset() % 8 else whole
    return whole.view(torch.int64).sum() + data[len(whole) :].sum()
