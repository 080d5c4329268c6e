"""Find state that a pass has changed, although all shards of a step must begin with the same state."""

from __future__ import annotations

from operator import attrgetter
from typing import NoReturn

from torch import nn

from dualtrain.backends import Backend
from dualtrain.trainer.description import describe
from dualtrain.trainer.rank_state import with_extra_state

_VERSION = attrgetter("_version")  # counts a tensor's in-place changes; private in torch 2.5 to 2.15


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
        self._began: list[object] = []

    def keep(self) -> None:
        """Record the present state as the state at the start of a step."""
        self._began = self._read()

    def _read(self) -> list[object]:
        """Return values that change with the state: first those of ``_causes``, then those of the loss's buffers."""
        extra = [describe(module.get_extra_state()) for module in self._modules.values()]
        buffers = [] if self._loss is None else [(id(buffer), buffer._version) for buffer in self._loss.buffers()]
        return [*map(_VERSION, self._params), *extra, *buffers]

    def difference(self) -> str | None:
        """Describe, for an error message, the first difference from the start of the step; ``None`` if there is none."""
        now = self._read()
        if now == self._began:
            return None
        known = zip(self._causes, now, self._began, strict=False)
        return next((cause for cause, one, other in known if one != other), None) or (
            "the loss changes its buffers in forward, and each rank has different samples: with virtual_ranks, "
            "move these buffers into the model"
        )

    def refuse(self, backend: Backend) -> NoReturn:
        """Raise ValueError with the first rank's :meth:`difference`. Collective."""
        found = backend.allgather_object(self.difference(), name="changed state")
        raise ValueError(next(filter(None, found), "the state of the model has changed in a pass"))
