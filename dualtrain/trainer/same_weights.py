"""Check that training keeps the weights equal on all ranks.

Averaging the gradients is enough to keep them equal. But the user's code may change weights on each rank in its own way: a
forward pass that writes into parameters, a hook, an optimizer that draws random numbers, a learning rate that only some
ranks set.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from dualtrain.backends import Backend
from dualtrain.backends.comparison import compare
from dualtrain.backends.wire import as_bytes
from dualtrain.differences import in_words
from dualtrain.errors import RanksDifferError
from dualtrain.gradients.parameters import number_parameters
from dualtrain.trainer.description import Text, describe
from dualtrain.trainer.machine import PROCESSOR, processor

log = logging.getLogger("dualtrain")

_THREADS = "torch.get_num_threads()"


def compare_weights(
    backend: Backend, model: nn.Module, groups: Sequence[dict[str, Any]], values: Mapping[str, Any]
) -> None:
    """Compare ``values``, and the parameters and learning rates in ``groups``, between the ranks. Collective; blocks.

    Unequal parameters cause a warning, and no error, if the ranks have different processors or numbers of threads, since
    their results then differ in the last digits; and on GPUs, on which some operations add in a random order.

    Raises:
        RanksDifferError: on every rank; names what differs.
    """
    own: dict[str, Any] = {}
    sums: dict[str, int] = {}

    def read() -> dict[str, Any]:
        own.update(values, lr=Text(describe([group.get("lr") for group in groups])))
        sums.update(_checksums(model, groups))
        return {**own, **sums, _THREADS: torch.get_num_threads(), **processor(backend)}

    found = compare(backend, "weights", read)
    given = [one for one in found if one.name in own]
    unlike = [one for one in found if one.name in (_THREADS, *PROCESSOR)]
    different = [one for one in found if one not in (*given, *unlike)]
    if given:
        raise RanksDifferError(f"the ranks do not take the same step: {in_words(given)}; give every rank the same")
    on_gpu = any(p.is_cuda for group in groups for p in group["params"])
    if different and not unlike and not on_gpu:
        raise RanksDifferError(
            f"the ranks do not have the same weights after a step: {in_words(different)}; change weights, gradients and "
            "options of the optimizer on every rank in the same way, and not in a forward pass, where the ranks have "
            "different samples (as nn.Embedding(max_norm=…) does); leave weights that may differ out of the optimizer"
        )
    if different and backend.rank == 0:
        reason = f"because {in_words(unlike)}" if unlike else f"after a step: {in_words(different)}"
        _warn_once(f"the weights of the ranks differ, at least in the last digits, {reason}")


@cache
def _warn_once(text: str) -> None:
    log.warning(text)


@torch.no_grad()
def _checksums(model: nn.Module, groups: Sequence[dict[str, Any]]) -> dict[str, int]:
    names = {id(p): repr(name) for name, p in model.named_parameters()}
    sums: dict[torch.device, dict[str, torch.Tensor]] = {}
    for numbers, p in number_parameters(groups):
        sums.setdefault(p.device, {})[f"the checksum of {names.get(id(p), numbers)}"] = _checksum(p)
    # One copy for each device, because the CPU waits for every copy.
    lists = [(some, torch.stack([*some.values()]).tolist()) for some in sums.values()]
    return {name: value for some, values in lists for name, value in zip(some, values, strict=True)}


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of ``tensor`` as 64-bit integers, a tensor without dimensions."""
    data = as_bytes(tensor)
    whole = data[: data.numel() // 8 * 8]
    whole = whole.clone() if whole.storage_offset() % 8 else whole
    return whole.view(torch.int64).sum() + data[len(whole) :].sum()
