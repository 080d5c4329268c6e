"""Moving average of a model's weights: its buffers and extra state, and its use in evaluations."""

from __future__ import annotations

import copy
from collections.abc import Iterator
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
    """Give ``average``, an older copy of ``model``, the buffers that ``model`` has now: names, order, shapes and dtypes.

    Forward passes may register, replace or remove buffers, of either model. ``AveragedModel.update_parameters`` pairs the
    buffers of the two models by position.
    """
    if _buffers(average) == _buffers(model):
        return
    modules = dict(average.named_modules())
    copies: dict[int, torch.Tensor] = {}  # id of a model's buffer → its copy; modules that share a buffer share the copy
    for path, module in model.named_modules():
        copied = modules.get(path)
        # ``_buffers`` is private, and the same in torch 2.5 to 2.15: named_buffers() leaves out buffers that are None.
        if copied is None or not (module._buffers or copied._buffers):
            continue
        old = dict(copied._buffers.items())
        new = {name: _copy_of(buffer, old.get(name), copies) for name, buffer in module._buffers.items()}
        if list(new) != list(old):
            # Private in torch 2.5 to 2.15: the names of the buffers that state_dict() leaves out. If the state_dict() of
            # ``average`` contained such a buffer, a new trainer could not load it: before the first forward pass, the new
            # trainer's average lacks the buffer.
            left_out = module._non_persistent_buffers_set
            for name in old:
                delattr(copied, name)
            for name, buffer in new.items():
                copied.register_buffer(name, buffer, persistent=name not in left_out)
            continue
        for name, buffer in new.items():
            if buffer is not old[name]:
                setattr(copied, name, buffer)


def _buffers(model: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, buffer.shape, buffer.dtype) for name, buffer in model.named_buffers()]


def _copy_of(buffer: torch.Tensor | None, old: torch.Tensor | None, copies: dict[int, torch.Tensor]) -> torch.Tensor | None:
    """Return the copy of ``buffer`` in ``copies``; ``None`` if ``buffer`` is ``None``.

    If ``copies`` has no copy of ``buffer``, add one: ``old`` if it has the same shape and dtype and is not in ``copies``
    yet, else a new copy.
    """
    if buffer is None:
        return None
    if id(buffer) not in copies:
        same = old is not None and (old.shape, old.dtype) == (buffer.shape, buffer.dtype)
        usable = same and all(old is not used for used in copies.values())
        copies[id(buffer)] = old if old is not None and usable else buffer.detach().clone()
    return copies[id(buffer)]


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
