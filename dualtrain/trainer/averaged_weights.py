"""Moving average of a model's weights: its buffers and extra state, and its use in evaluations."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from dualtrain.gradients.shard_sums import copy_all
from dualtrain.trainer.rank_state import with_extra_state


def add_buffers(average: nn.Module, model: nn.Module) -> None:
    """Copy to ``average``, an older copy of ``model``, the buffers that are missing or ``None`` there."""
    for copied, module in zip(average.modules(), model.modules(), strict=True):
        for name, buffer in module.named_buffers(recurse=False):
            if not hasattr(copied, name):
                copied.register_buffer(name, buffer.detach().clone())
            elif getattr(copied, name) is None:
                setattr(copied, name, buffer.detach().clone())


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
