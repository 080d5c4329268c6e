"""Find state that a pass has changed, although all shards of a step must begin with the same state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, eq
from typing import Any, NoReturn

import torch
from torch import nn

from dualtrain.backends import Backend
from dualtrain.backends.wire import same_bits
from dualtrain.errors import UserError
from dualtrain.trainer.description import describe
from dualtrain.trainer.rank_state import with_extra_state
from dualtrain.trainer.same_weights import checksums

_VERSION = attrgetter("_version")  # counts a tensor's in-place changes; private in torch 2.5 to 2.15


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the values of ``tensor`` can be read as bytes."""
    usual = type(tensor) in (torch.Tensor, nn.Parameter)
    return usual and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _copied(state: Any) -> Any:
    """Copy an extra state for :func:`_equals`. Items that are neither plain tensors nor containers become descriptions."""
    if isinstance(state, torch.Tensor) and _is_plain(state):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: _copied(item) for key, item in state.items()}
    return list(map(_copied, state)) if isinstance(state, list | tuple) else describe(state)


def _equals(state: Any, copied: Any) -> bool:
    """Return whether ``state`` has the values of ``copied``, an earlier result of :func:`_copied`."""
    if isinstance(copied, torch.Tensor):
        return isinstance(state, torch.Tensor) and state.device == copied.device and same_bits(state, copied)
    if isinstance(copied, dict):
        return (
            isinstance(state, Mapping)
            and state.keys() == copied.keys()
            and all(_equals(item, copied[key]) for key, item in state.items())
        )
    if isinstance(copied, list):
        return isinstance(state, list | tuple) and len(state) == len(copied) and all(map(_equals, state, copied))
    return copied is not None and describe(state) == copied


class FixedState:
    """The parameters and extra state (``get_extra_state``) of ``model``, and the buffers of ``loss``."""

    def __init__(self, model: nn.Module, loss: nn.Module | None) -> None:
        named = dict(model.named_parameters())
        self._params, self._modules, self._loss = list(named.values()), with_extra_state(model), loss
        self._causes = [
            f"parameter {name!r} changes in forward: change it after the step instead, or train without virtual ranks"
            for name in named
        ] + [
            f"the extra state of {repr(name) if name else 'the model'} changes in forward, and has no mean over virtual "
            "ranks: use buffers for it, or train without virtual ranks"
            for name in self._modules
        ]
        self._steps = 0
        self._versions: list[object] = []
        self._extra: list[object] = [None] * len(self._modules)
        self._buffers: list[object] = []

    def keep(self) -> None:
        """Record the present state as the state at the start of a step."""
        self._steps += 1
        self._versions, extra, self._buffers = self._read()
        # Copy only what has changed since the last step.
        pairs = zip(extra, self._extra, strict=True)
        self._extra = [kept if _equals(now, kept) else _copied(now) for now, kept in pairs]

    def _read(self) -> tuple[list[object], list[object], list[object]]:
        """Return the parameters' versions, the extra states, and the ids and versions of the loss's buffers."""
        extra = [module.get_extra_state() for module in self._modules.values()]
        buffers = [] if self._loss is None else list(self._loss.buffers())
        return self._versions_of(self._params), extra, [*map(id, buffers), *self._versions_of(buffers)]

    def _versions_of(self, tensors: Sequence[torch.Tensor]) -> list[object]:
        versions: list[object] = list(map(_VERSION, tensors))
        if self._steps.bit_count() > 1:
            return versions
        # In steps 1, 2, 4, 8, …, also find changes that torch does not count, such as those through ``.data``.
        sums = checksums({number: tensor for number, tensor in enumerate(tensors) if _is_plain(tensor)})
        return [(version, sums.get(number)) for number, version in enumerate(versions)]

    def difference(self) -> str | None:
        """Return a message about one of the changes since the start of the step; ``None`` if nothing has changed."""
        versions, extra, buffers = self._read()
        if versions == self._versions and buffers == self._buffers and all(map(_equals, extra, self._extra)):
            return None
        same = [*map(eq, versions, self._versions), *map(_equals, extra, self._extra)]
        if not all(same):
            return self._causes[same.index(False)]
        return (
            "the loss changes its buffers in forward, and each rank has different samples: with virtual_ranks, "
            "move these buffers into the model"
        )

    def refuse(self, backend: Backend) -> NoReturn:
        """Raise UserError with the :meth:`difference` of the lowest rank that has one, else a general text. Collective."""
        found = backend.allgather_object(self.difference(), name="changed state")
        raise UserError(next(filter(None, found), "the state of the model has changed in a pass"), shared=True)
