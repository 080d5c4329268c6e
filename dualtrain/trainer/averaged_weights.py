"""Moving average of a model's weights: its buffers and extra state, and its use in evaluations."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from dualtrain.errors import UserError
from dualtrain.gradients.shard_sums import copy_all
from dualtrain.trainer.rank_state import with_extra_state


def check_parameters(average: nn.Module, model: nn.Module) -> None:
    """Raise UserError if ``average``, an older copy of ``model``, has parameters of other names or shapes."""
    own, wanted = ([(name, p.shape) for name, p in each.named_parameters()] for each in (average, model))
    if own != wanted:
        name = next((name for name, shape in wanted if (name, shape) not in own), own[-1][0])
        raise UserError(
            f"the model's parameters have changed since the trainer was made ({name!r}), and ema averages the old ones: "
            "make a new trainer of the changed model"
        )


def match_buffers(average: nn.Module, model: nn.Module) -> None:
    """Give ``average``, an older copy of ``model``, buffers of the same names and shapes in the same order.

    Forward passes may have made, replaced or removed buffers of only one of them. Copies no values into the buffers that
    ``average`` keeps.
    """
    for copied, module in zip(average.modules(), model.modules(), strict=True):
        # ``_buffers`` and ``_non_persistent_buffers_set`` are private, and the same in torch 2.5 to 2.15. There is no
        # public way to read the names of buffers that are None.
        own, wanted = dict(copied._buffers.items()), dict(module._buffers.items())
        if _shapes(own) == _shapes(wanted):
            continue
        for name in own:
            delattr(copied, name)
        for name, buffer in wanted.items():
            kept = own.get(name)
            if kept is None or buffer is None or kept.shape != buffer.shape:
                kept = None if buffer is None else buffer.detach().clone()
            copied.register_buffer(name, kept, persistent=name not in module._non_persistent_buffers_set)


def _shapes(buffers: Mapping[str, torch.Tensor | None]) -> list[tuple[str, torch.Size]]:
    return [(name, buffer.shape) for name, buffer in buffers.items() if buffer is not None]


def copy_extra_state(average: nn.Module, model: nn.Module) -> None:
    """Copy the modules' extra state from ``model`` to ``average``."""
    found = with_extra_state(model)
    modules = dict(average.named_modules()) if found else {}  # TorchScript modules do not support get_submodule()
    for name, module in found.items():
        modules[name].set_extra_state(copy.deepcopy(module.get_extra_state()))


def wraps(forward: object, model: nn.Module) -> bool:
    """Return whether ``forward`` is ``model``, the compiled model, or an ``nn.DataParallel`` of it."""
    # ``_orig_mod`` is private, and the same in torch 2.5 to 2.15.
    inner = forward.module if isinstance(forward, nn.DataParallel) else getattr(forward, "_orig_mod", None)
    return forward is model or inner is model


@contextmanager
def parameters_of(model: nn.Module, average: nn.Module) -> Iterator[None]:
    """Copy the parameters of ``average`` into ``model`` for the block; restore the model's own values after it."""
    params = [p.detach() for p in model.parameters()]
    own = [p.clone() for p in params]
    copy_all(params, [p.detach() for p in average.parameters()])
    try:
        yield
    finally:
        copy_all(params, own)
