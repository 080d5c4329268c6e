"""Training state of a torch program: models, optimizers, schedulers, samplers, plain objects and random number generators.

Each kind of object has a handler that saves, restores and broadcasts it.
"""

from __future__ import annotations

import copy
import random
import sys
from typing import Any, Protocol, runtime_checkable

import torch

from dualtrain.hvd.elastic.common import ObjectState
from dualtrain.hvd.elastic.sampler import ElasticSampler
from dualtrain.hvd.functions import (
    allgather_object,  # noqa: F401 - for handlers that users add
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from dualtrain.hvd.mpi_ops import rank
from dualtrain.state import load_optimizer_state


class StateHandler:
    """Base class of handlers, which save, restore and sync one object of a :class:`TorchState`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy of the object's state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the object's last saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy the state of the root's object to every rank's object. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the object to a new world, which this process has just joined."""

    def set_value(self, value: Any) -> None:
        """Handle ``value`` instead of the previous object, and save it."""
        self.value = value
        self.save()


@runtime_checkable
class Stateful(Protocol):
    """Object with a ``state_dict``, such as a learning-rate scheduler or a gradient scaler."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state that ``state_dict`` returned."""


class StateDictHandler(StateHandler):
    """Saves the ``state_dict()`` of an object, and broadcasts it."""

    def __init__(self, value: Stateful) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Keep a deep copy of the ``state_dict()``."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load a copy of the saved state, because optimizers and schedulers modify the state that they load."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Load the root's ``state_dict()``."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelStateHandler(StateDictHandler):
    """Parameters and persistent buffers."""

    _saved_model_state = property(lambda self: self._saved)  # Horovod's tests read the state by this name

    def restore(self) -> None:
        """Load the saved state; its tensors are not copied here, because ``load_state_dict`` of modules copies them."""
        tensors = {id(value): value for value in self._saved.values() if isinstance(value, torch.Tensor)}
        self.value.load_state_dict(copy.deepcopy(self._saved, tensors))

    def sync(self) -> None:
        """Overwrite this rank's tensors with the root's."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateDictHandler):
    """State and options of an optimizer."""

    _saved_optimizer_state = property(lambda self: self._saved)

    def restore(self) -> None:
        """Load a copy of the saved state, and keep its dtypes.

        Discard all gradients: otherwise, a program that sets gradients to zero after each step would add the next step's
        gradients to those of the step that failed.
        """
        load_optimizer_state(self.value, copy.deepcopy(self._saved))
        for p in (p for group in self.value.param_groups for p in group["params"]):
            p.grad = None

    def sync(self) -> None:
        """Load the root's state and options."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateDictHandler):
    """Progress of an :class:`ElasticSampler` within the epoch."""

    _saved_sampler_state = property(lambda self: self._saved)

    def reset(self) -> None:
        """Split the rest of the epoch among the current ranks.

        ``sync`` would do this too, but it is skipped if hosts were only removed.
        """
        self.value.reset()


Registry = list[tuple[type, type[StateHandler]]]

_handler_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (Stateful, StateDictHandler),
]


def get_handler_registry() -> Registry:
    """Return (type, handler class) pairs. An object gets the handler class of the first pair whose type matches."""
    return _handler_registry


def set_handler_registry(registry: Registry) -> None:
    """Use ``registry`` for every object that gets a handler from now on, also in an existing :class:`TorchState`."""
    global _handler_registry
    _handler_registry = registry


def _get_handler(value: Any) -> StateHandler | None:
    for kind, handler in _handler_registry:
        if isinstance(value, kind):
            return handler(value)
    return None


class TorchState(ObjectState):
    """State of a training program.

    Example: after ``state = TorchState(model, optimizer, epoch=0)``, the epoch is ``state.epoch``.

    ``restore`` also restores this rank's random number generators (Python's, NumPy's if it is imported, torch's for the
    CPU and, if CUDA is initialized, for the current GPU), and discards the gradients of the optimizers' parameters.
    ``sync`` does neither, except that an ``hvd.DistributedOptimizer`` discards the step that backward has begun.

    Args:
        model: a module, if any.
        optimizer: an optimizer, if any.
        kwargs: more modules, optimizers, samplers, schedulers (anything with ``state_dict`` and ``load_state_dict``),
            and plain objects; the same names on every rank.
    """

    _handlers: dict[str, StateHandler]

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        self._handlers = {}
        objects = {}
        for name, value in {**kwargs, "model": model, "optimizer": optimizer}.items():
            handler = _get_handler(value)
            if handler is None:
                objects[name] = value
            else:
                super().__setattr__(name, value)
                self._handlers[name] = handler
        self._saved_random = _random_state()
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **objects)

    def save(self) -> None:
        """Keep a copy of everything, in memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()
        self._saved_random = _random_state()

    def restore(self) -> None:
        """Restore the last saved copy of everything."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()
        _set_random_state(self._saved_random)

    def sync(self) -> None:
        """Send every rank the root's state, and save it. Collective."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Adapt all objects to the new world."""
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_handlers", {}):
            self._handlers[name].set_value(value)
        elif name in vars(self).get("_saved_state", {}) and (handler := _get_handler(value)):
            # Without a handler, restore() would replace a model by a copy, whose parameters the optimizer does not update.
            self._handlers[name] = handler
            del self._saved_state[name]
        super().__setattr__(name, value)


def _random_state() -> dict[str, Any]:
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
