"""Check that training keeps the weights equal on all ranks.

Averaged gradients keep the weights equal. But the user's code may change weights differently on each rank: in a forward
pass that writes into parameters, in a hook, by an optimizer that draws random numbers, or by a learning rate that only some
ranks set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from dualtrain.backends import Backend
from dualtrain.backends.comparison import compare
from dualtrain.backends.wire import as_bytes
from dualtrain.differences import Difference, in_words
from dualtrain.errors import RanksDifferError
from dualtrain.gradients.drift import distance
from dualtrain.gradients.parameters import number_parameters
from dualtrain.trainer.description import Text, describe
from dualtrain.trainer.machine import PROCESSOR, processor, warn_once

T = TypeVar("T")

_THREADS = "torch.get_num_threads()"


def compare_weights(
    backend: Backend,
    model: nn.Module,
    groups: Sequence[dict[str, Any]],
    values: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor],
    check: Callable[[], None] | None = None,
) -> list[str]:
    """Compare ``values``, ``buffers``, and the parameters and learning rates in ``groups``. Collective; blocks.

    ``check``, if given, is called first. If it raises an error, every rank raises an error, see below.

    Rounding differs between ranks that have different processors or numbers of threads, and on GPUs, on which some
    operations add in a random order. In these cases, parameters that agree in half of their digits cause only a warning.

    Returns:
        The names of ``buffers`` that differ.

    Raises:
        RanksDifferError: on every rank; names what differs, or the ranks on which ``check`` has raised an error.
        UserError: on every rank, if ``check`` has raised the same error on all of them.
    """
    own: dict[str, Any] = {}
    parameters: dict[str, nn.Parameter] = {}
    named_buffers = {f"buffer {name!r}": name for name in buffers}

    def read() -> dict[str, Any]:
        if check is not None:
            check()
        own.update(values, lr=Text(describe([group.get("lr") for group in groups])))
        parameters.update(_named(model, groups))
        sums = checksums({**parameters, **{text: buffers[name] for text, name in named_buffers.items()}})
        return {**own, **sums, _THREADS: torch.get_num_threads(), **processor(backend)}

    found = compare(backend, "weights", read)
    unequal = [one for one in found if one.name in own]
    if unequal:
        raise RanksDifferError(
            f"the ranks have different values for the same step: {in_words(unequal)}; use the same values on every rank"
        )
    _refuse_weights(backend, found, parameters)
    return [named_buffers[one.name] for one in found if one.name in named_buffers]


def _refuse_weights(backend: Backend, found: Sequence[Difference], parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise RanksDifferError if ``found`` has differences of ``parameters`` that are too large for rounding. Collective."""
    different = [one for one in found if one.name in parameters]
    if not different:
        return
    text = in_words(different)
    causes_of_rounding = [one for one in found if one.name in (_THREADS, *PROCESSOR)]
    if causes_of_rounding or any(p.is_cuda for p in parameters.values()):
        far = _far_apart(backend, {one.name: parameters[one.name] for one in different})
        if far is None:
            if backend.rank == 0:
                # Leave out the checksums: they differ after each step, so each warning would have a new text.
                reason = in_words(causes_of_rounding) if causes_of_rounding else "GPUs may add numbers in any order"
                warn_once(f"the weights of the ranks differ slightly, because {reason}")
            return
        text += f"; {far}; rounding would cause a smaller difference"
    raise RanksDifferError(
        f"the ranks do not have the same weights after a step: {text}; change weights, gradients and options of the "
        "optimizer in the same way on every rank; do not change weights in a forward pass (as nn.Embedding(max_norm=…) "
        "does), because the ranks have different samples; leave weights that may differ out of the optimizer"
    )


def _named(model: nn.Module, groups: Sequence[dict[str, Any]]) -> dict[str, nn.Parameter]:
    """Return the parameters in ``groups`` by the names of their checksums."""
    names = {id(p): repr(name) for name, p in model.named_parameters()}
    return {f"the checksum of {names.get(id(p), numbers)}": p for numbers, p in number_parameters(groups)}


@torch.no_grad()
def _far_apart(backend: Backend, parameters: Mapping[str, nn.Parameter]) -> str | None:
    """Describe a parameter that agrees with rank 0's in less than half of its digits; ``None`` if all agree. Collective."""
    mine: list[str] = []
    for name, p in parameters.items():
        first = backend.broadcast(p.detach(), name=f"weights for {name}")
        difference, norm, far = distance(p, first)
        if far:
            parameter = name.removeprefix("the checksum of ")
            mine.append(
                f"{parameter} on rank {backend.job_rank} differs from rank {backend.members[0]}'s by {difference:.2g} "
                f"(norm on rank {backend.members[0]}: {norm:.2g})"
            )
    return next((found[0] for found in backend.allgather_object(mine, name="distant weights") if found), None)


@torch.no_grad()
def checksums(tensors: Mapping[T, torch.Tensor]) -> dict[T, int]:
    """Return a checksum of all bits of each tensor."""
    sums: dict[torch.device, dict[T, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        sums.setdefault(tensor.device, {})[name] = _checksum(tensor)
    # One copy for each device, because the CPU waits for every copy.
    lists = [(some, torch.stack([*some.values()]).tolist()) for some in sums.values()]
    return {name: value for some, values in lists for name, value in zip(some, values, strict=True)}


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bytes of ``tensor``, read as 64-bit integers, as a tensor without dimensions.

    The last bytes, fewer than eight, are added one by one.
    """
    data = as_bytes(tensor)
    whole = data[: data.numel() // 8 * 8]
    whole = whole.clone() if whole.storage_offset() % 8 else whole
    return whole.view(torch.int64).sum() + data[len(whole) :].sum()
