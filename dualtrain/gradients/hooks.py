"""Hooks on parameters and modules, to call a reducer when a gradient is ready, or a parameter or its module is replaced.

A hook holds a weak reference to its reducer, so that the reducer is freed with its optimizer or trainer. If no reducer of a
parameter is left, the parameter's hook raises an error: otherwise each rank would silently continue with its own gradients.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from dualtrain.backends.compilation import not_compiled
from dualtrain.gradients.parameters import check_supported
from dualtrain.gradients.slots import Slot

Named = Iterable[tuple[str, nn.Parameter]]
_observing = False
_ATTRIBUTES = attrgetter("__dict__")


class Reducer(Protocol):
    """The part of a reducer that its hooks use."""

    hooks: ParameterHooks

    def gradient_accumulated(self, slot: Slot) -> None:
        """Handle a gradient that autograd has accumulated, before hooks that the program registered earlier see it.

        Not called for a parameter without such hooks.
        """

    def gradient_ready(self, slot: Slot) -> None:
        """Handle a gradient that autograd has accumulated. Called for each gradient in every backward pass."""

    def parameter_replaced(self, attribute: ModuleAttribute, name: str) -> None:
        """Handle the replacement, in ``attribute``, of parameter ``name`` or of a module that has it."""


@dataclass(frozen=True)
class ModuleAttribute:
    """Attribute ``key`` of the module ``owner``, where a parameter or a module was replaced."""

    owner: weakref.ref[nn.Module]
    key: str

    @property
    def is_empty(self) -> bool:
        """Return whether the attribute was a module and is ``None`` now. A new module may be assigned to it later."""
        owner = self.owner()
        # ``_modules`` is private in torch 2.5 to 2.15, as ``_parameters`` is (see ``_on_parameter``).
        return owner is not None and self.key in owner._modules and owner._modules[self.key] is None

    def unaveraged(self, known: Container[int]) -> tuple[str, bool] | None:
        """Return what the attribute holds now ("parameter" or "module"), and whether it is in use.

        Return ``None`` if the module ``owner`` was freed, or if each trained parameter in the attribute has a reducer or is
        in ``known``, the ids of the caller's parameters. (Some of the caller's parameters may have no hook yet.)
        A parameter always counts as in use. A module counts as in use if one of its parameters without a reducer has a
        gradient. A copy of a model that only computes targets has no gradients, so it does not count as in use.
        """
        owner = self.owner()
        if owner is None:
            return None
        # ``_parameters`` and ``_modules`` are private in torch 2.5 to 2.15 (see ``_on_parameter``).
        p, module = owner._parameters.get(self.key), owner._modules.get(self.key)
        found = [p] if p is not None else [] if module is None else module.parameters()
        new = [p for p in found if p.requires_grad and id(p) not in known and not reducers_of(p)]
        if not new:
            return None
        return ("parameter", True) if p is not None else ("module", any(p.grad is not None for p in new))


class ParameterHooks:
    """The trained parameters of one reducer, with a hook on each.

    Args:
        keep_nodes: keep the autograd nodes that accumulate gradients, so that hooks that the program registers on them
            later are known too. (Without this, a node exists only as long as something else refers to it.)

    Attributes:
        slots: one for each trained parameter, in the order in which they were added.
        lock: held while a hook runs; ``None`` if all parameters are on one device, since autograd then uses one thread.
        known: ids of all parameters that were added, including frozen ones.
        frozen: the parameters without a slot, because they were frozen when they were added.
    """

    def __init__(self, *, keep_nodes: bool = False) -> None:
        self.slots: list[Slot] = []
        self.lock: threading.RLock | None = None
        self.known: set[int] = set()
        self.frozen: list[tuple[str, nn.Parameter]] = []
        self._handles: list[RemovableHandle] = []
        self._keep_nodes = keep_nodes
        self._nodes: list[Node] = []
        self._params: list[nn.Parameter] = []
        #: The parameters' attribute dictionaries. ``torch.utils.swap_tensors`` replaces the dictionary of a parameter.
        self._attributes: list[dict[str, Any]] = []

    def add(self, reducer: Reducer, named_parameters: Named) -> int:
        """Add parameters whose gradients ``reducer`` averages; return how many are trained. Frozen ones get no hook.

        Parameters that were added before are ignored, and not counted.

        Raises:
            ValueError: the gradient of a parameter cannot be averaged. No parameter is added then.
        """
        pairs, before = list(named_parameters), len(self.slots)
        for name, p in pairs:
            if p.requires_grad:
                check_supported(name, p)
        self.known.update(id(p) for _, p in pairs)
        added = {id(p) for p in (*self._params, *(p for _, p in self.frozen))}
        for name, p in pairs:
            if id(p) in added:
                continue  # a parameter group was removed from the optimizer and added again, or has ``p`` twice
            added.add(id(p))
            remove_freed(p)
            if not p.requires_grad:
                self.frozen.append((name, p))
                continue
            with torch.inference_mode(False):  # in inference mode, parameters have no node
                node = get_gradient_edge(p).node
            if self._keep_nodes:
                self._nodes.append(node)
            self.slots.append(Slot(name, p, node_hooks=_node_hooks(node)))
            hook = _make_hook(reducer, len(self.slots) - 1, name)
            if any(not hasattr(other, "reducer") for other in (p._post_accumulate_grad_hooks or {}).values()):
                self._handles.append(_register_first(p, _make_first_hook(reducer, len(self.slots) - 1)))
            self._handles.append(p.register_post_accumulate_grad_hook(hook))
            self._params.append(p)
            self._attributes.append(vars(p))
        self.check_devices()
        return len(self.slots) - before

    def take_unfrozen(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that were frozen when they were added and are not frozen now; each is returned once."""
        unfrozen = [pair for pair in self.frozen if pair[1].requires_grad]
        if unfrozen:
            self.frozen = [pair for pair in self.frozen if not pair[1].requires_grad]
        return unfrozen

    def check_devices(self) -> None:
        """Use a lock if the parameters are on several devices now: autograd has a thread for each device."""
        if self.lock is None and len({slot.param.device for slot in self.slots}) > 1:
            self.lock = threading.RLock()

    def lost(self) -> Slot | None:
        """Return the first slot whose parameter has a gradient, and hooks that autograd no longer calls; else ``None``.

        After ``torch.utils.swap_tensors``, autograd calls a parameter's hooks for the other tensor of the swap. Modules use
        ``swap_tensors`` in ``to()`` and ``load_state_dict()`` if
        ``torch.__future__.set_swap_module_params_on_conversion(True)`` was called.
        """
        if not self._swapped():
            return None
        pairs = zip(self.slots, self._attributes, strict=True)
        return next((slot for slot, was in pairs if vars(slot.param) is not was and slot.param.grad is not None), None)

    def restore(self) -> None:
        """Make autograd call the hooks of swapped parameters again, from the next backward on."""
        if not self._swapped():
            return
        self._attributes = [vars(p) for p in self._params]
        for p in self._params:
            # Private in torch 2.5 to 2.15. The list of hooks stays with the parameter; an assignment passes it to autograd.
            p._post_accumulate_grad_hooks = p._post_accumulate_grad_hooks

    def _swapped(self) -> bool:
        """Return whether ``torch.utils.swap_tensors`` has changed a parameter."""
        # map() loops in C: this method is called in every step.
        return not all(map(is_, map(_ATTRIBUTES, self._params), self._attributes))

    def remove(self) -> None:
        """Remove the hooks. May be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()


def _make_hook(reducer: Reducer, number: int, name: str) -> Callable[[torch.Tensor], None]:
    """Return a hook for slot ``number``. It raises RuntimeError in backward if no reducer of the parameter is left."""
    ref = weakref.ref(reducer)

    @not_compiled
    def hook(p: torch.Tensor) -> None:
        living = ref()
        if living is not None:
            hooks = living.hooks
            slot = hooks.slots[number]
            if slot.param is not p:
                return  # autograd calls the hook for a swapped tensor (``lost`` detects this)
            if hooks.lock is None:
                living.gradient_ready(slot)
            else:
                with hooks.lock:
                    living.gradient_ready(slot)
        elif not any(other() is not None for other, _ in _watchers(p)):
            raise RuntimeError(
                f"the gradient of {name!r} is no longer averaged: its DistributedOptimizer, GradientReducer or Trainer "
                "was garbage-collected. Keep it as long as the model trains, or call its close() first"
            )

    hook.reducer = ref  # type: ignore[attr-defined]
    hook.parameter_name = name  # type: ignore[attr-defined]
    _observe_replacements()
    return hook


def _make_first_hook(reducer: Reducer, number: int) -> Callable[[torch.Tensor], None]:
    """Return a hook for slot ``number`` that runs before the program's hooks, which may step the optimizer."""
    ref = weakref.ref(reducer)

    @not_compiled
    def hook(p: torch.Tensor) -> None:
        living = ref()
        if living is not None and living.hooks.slots[number].param is p:
            living.gradient_accumulated(living.hooks.slots[number])

    hook.reducer = ref  # type: ignore[attr-defined]
    return hook


def _register_first(p: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Register a hook on ``p`` that runs before those that ``p`` has."""
    handle: RemovableHandle = p.register_post_accumulate_grad_hook(hook)
    # torch (2.5 to 2.15) has no public way to order the hooks of a parameter. It ignores ``OrderedDict.move_to_end``.
    hooks = p._post_accumulate_grad_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)
    return handle


def _node_hooks(node: Node) -> Mapping[int, Any]:
    """Return the hooks of an autograd node; later changes are seen in the result."""
    handle = node.register_hook(lambda *_: None)
    # Private in torch 2.5 to 2.15: there is no public way to list the hooks of a node.
    hooks: Mapping[int, Any] | None = handle.hooks_dict_ref()
    handle.remove()
    return {} if hooks is None else hooks


def has_later_hook(reducer: Reducer, slot: Slot) -> bool:
    """Return whether a hook of the user, which may change the gradient, runs after the parameter's hook of ``reducer``."""
    if slot.node_hooks:
        return True  # torch calls the hooks of the node after those of the parameter
    # torch (2.5 to 2.15) has no public way to list the hooks of a parameter.
    for hook in reversed(slot.param._post_accumulate_grad_hooks.values()):
        if not hasattr(hook, "reducer"):
            return True
        if hook.reducer() is reducer:
            break
    return False


def reducers_of(p: torch.Tensor) -> list[Reducer]:
    """Return the reducers that have a hook on ``p``."""
    return [reducer for ref, _ in _watchers(p) if (reducer := ref()) is not None]


def _watchers(p: torch.Tensor | None) -> Iterable[tuple[weakref.ref[Reducer], str]]:
    """Return (weak reference to the reducer, parameter's name) for each hook of a reducer on ``p``."""
    # torch (2.5 to 2.15) has no public way to list the hooks of a parameter.
    hooks = getattr(p, "_post_accumulate_grad_hooks", None) or {}
    return [(hook.reducer, hook.parameter_name) for hook in hooks.values() if hasattr(hook, "parameter_name")]


def remove_freed(p: torch.Tensor) -> None:
    """Remove hooks of garbage-collected reducers from ``p``, a new reducer's parameter.

    Otherwise these hooks would raise an error after the new reducer is closed.
    """
    # torch (2.5 to 2.15) has no public way to list the hooks of a parameter.
    hooks = p._post_accumulate_grad_hooks or {}
    for key in [key for key, hook in hooks.items() if hasattr(hook, "reducer") and hook.reducer() is None]:
        del hooks[key]


def _observe_replacements() -> None:
    """Make modules report the replacement of a parameter that has a hook, or of its module. Later calls do nothing."""
    global _observing
    if not _observing:
        _observing = True
        register_module_parameter_registration_hook(_on_parameter)
        register_module_module_registration_hook(_on_module)


def _on_parameter(owner: nn.Module, key: str, new: Any) -> None:
    # ``_parameters`` is private in torch 2.5 to 2.15. getattr() may return an attribute of the class instead.
    old = owner._parameters.get(key)
    if old is not None and new is not None and new is not old:
        _report_replacement(owner, key, [old])


def _on_module(owner: nn.Module, key: str, new: Any) -> None:
    # ``_modules`` is private in torch 2.5 to 2.15, as ``_parameters`` is. In a ScriptModule, it has no method ``get``.
    # To compile a backward, torch.compile makes a module and assigns its attribute ``_orig_mod`` (private in torch 2.5 to
    # 2.15). It then traces this function, and fails at the first use of ``owner``, which has no ``_orig_mod`` yet.
    if (key == "_orig_mod" and torch.compiler.is_dynamo_compiling()) or key not in owner._modules:
        return
    old = owner._modules[key]
    if old is not None and new is not old:  # report None too: a new module may replace it later
        _report_replacement(owner, key, nn.Module.parameters(old))


def _report_replacement(owner: nn.Module, key: str, replaced: Iterable[torch.Tensor]) -> None:
    names: dict[Reducer, str] = {}  # one report for each reducer, with its first replaced parameter
    for ref, name in (watcher for p in replaced for watcher in _watchers(p)):
        reducer = ref()
        if reducer is not None:
            names.setdefault(reducer, name)
    for reducer, name in names.items():
        reducer.parameter_replaced(ModuleAttribute(weakref.ref(owner), key), name)
