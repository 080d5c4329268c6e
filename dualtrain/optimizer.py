"""``DistributedOptimizer``: wrapper of any torch optimizer. It averages the gradients over the ranks before each step.

``gradients/`` averages the gradients; the wrapped optimizer does everything else. The wrapper uses the wrapped optimizer's
own parameter groups and state, so that schedulers, GradScaler and checkpoints see one optimizer.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from dualtrain.backends import Backend
from dualtrain.backends.collectives import check_backend
from dualtrain.backends.compilation import not_compiled
from dualtrain.backends.sum_order import SumOrder
from dualtrain.backends.sum_order import sum_order as sum_order_of
from dualtrain.errors import BackendError
from dualtrain.gradients import AVERAGE, GradientReducer, Transfer, Unused
from dualtrain.gradients.deprecated import renamed_option, warn_renamed
from dualtrain.gradients.parameters import name_parameters
from dualtrain.gradients.sparse import has_values
from dualtrain.wrapped_steps import check_own_steps, combined_loss


class DistributedOptimizer(torch.optim.Optimizer):
    """Wrapper of ``optimizer``; gradients are averaged over ``backend`` during backward.

    After ``loss.backward()`` every rank's ``param.grad`` is the average: clip, unscale or log it as in one process.
    If each rank's loss is a mean over its samples, and all ranks have the same number of samples, the average is the
    gradient of the mean over all samples.

    Attributes and methods that the wrapper does not have itself, such as ``param_groups`` and ``state``, are those of the
    wrapped optimizer. Assignments to them change the wrapped optimizer. Hooks of ``state_dict()`` and
    ``load_state_dict()`` are registered with the wrapped optimizer, and get it as their argument. Pickling or
    deep-copying gives the wrapped optimizer alone.

    A step that the wrapped optimizer takes itself, for example in a method of its class that calls ``self.step()``,
    raises RuntimeError if gradients are not averaged: after ``no_sync`` or between ``backward_passes_per_step`` passes. The
    ranks compare whether the number of all steps is odd or even: after an extra step on one rank, the next backward raises
    BackendError.

    Hooks may change ``param.grad`` before backward ends, and the changed gradients are averaged. A change of a gradient
    that was sent already raises BackendError. Changes after backward are local, and ``step()`` uses them, so make the same
    changes on every rank. Or run backward in :meth:`no_sync`: then :meth:`synchronize` or ``step()`` averages the changed
    gradients. If backward averaged zeros for a parameter, because no rank had a gradient, and the program then assigns a
    gradient, ``step()`` raises BackendError: most likely, each rank has assigned its own.

    If a rank runs no backward in a step, it gets the averages only in ``step()``. If another rank has clipped, unscaled or
    otherwise changed its averages by then, ``step()`` raises BackendError on the rank that changed them: call
    :meth:`synchronize` on every rank before you change gradients. ``step()`` raises no error, and the ranks' weights
    differ, in the following cases:

    - The gradients are on a GPU, and there is no ``extra``.
    - Several wrapped optimizers have the changed parameters.
    - GradScaler's ``step`` averages the gradients, after every rank has called ``unscale_``.

    Hooks of parameters may change them in the same way on all ranks (clamp them, for example). If a hook that runs after
    its gradient is accumulated updates a parameter on the CPU with this rank's own gradient, so that values that were
    equal on all ranks differ, one of the first backward passes raises BackendError.

    After each step whose number is a power of two, the ranks compare some elements of the parameters on the CPU. If a
    parameter differs by more than rounding explains, and still differs in the next exchange of gradients, this exchange
    raises BackendError: the ranks began with different weights, have different learning rates, or changed averaged
    gradients differently, for example.

    Parameters may be frozen and unfrozen on all ranks. Unfreeze them before :meth:`zero_grad`. Otherwise, a backward that
    reaches only newly unfrozen parameters does not average their gradients; ``step()`` averages them.

    Args:
        optimizer: any torch optimizer; its state is kept.
        named_parameters: ``model.named_parameters()``, for readable errors; without it, errors show numbers. It must
            contain all of the optimizer's parameters; other parameters are ignored.
        backend: the ranks to average over.
        unused: see :class:`~dualtrain.gradients.GradientReducer`.
        backward_passes_per_step: number of backward passes whose gradients are summed before they are exchanged;
            ``no_sync`` is the manual alternative. A call of :meth:`zero_grad` between these passes does not reset their
            count. After such a call, the last of these passes exchanges gradients, and so does every later pass until the
            next ``step`` or ``zero_grad``.
        extra: number of scalars of the caller that are summed over the ranks together with the gradients (see
            :attr:`extra`).
        transfer: see :class:`~dualtrain.gradients.GradientReducer`.
        sum_order: the order in which gradients are added. ``"backend"``: the order that the backend and its transport use
            (with two ranks, every backend and transport gives the same bits). ``"canonical"``: a fixed tree over the
            ranks, the same on every backend and transport. A ``SumOrder``: a fixed tree over shards of the global
            batch; a rank may compute several of them.
        carry: the former name of ``extra``; deprecated.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, ``named_parameters`` does not consist of pairs (it is a module or a
            dict, for example), ``backend`` is not what ``connect()`` returns, or ``transfer`` is not a ``Transfer``.
        ValueError: ``named_parameters`` lacks a parameter of the optimizer or has a name twice, the gradient of a parameter
            cannot be averaged, or an option is out of its bounds.
    """

    _changing = False  # whether ``step`` has begun to change the parameters, and has not ended
    _interrupted = False  # whether an interrupt such as Ctrl-C has stopped ``step`` while it changed the parameters

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        *,
        backend: Backend,
        unused: Unused = "zero",
        backward_passes_per_step: int = 1,
        extra: int = 0,
        transfer: Transfer = AVERAGE,
        sum_order: Literal["backend", "canonical"] | SumOrder = "backend",
        carry: int | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: it would make new parameter groups. Only step hooks are kept here, not in the
        # wrapped optimizer. The names of their dictionaries are private in torch 2.5 to 2.15.
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        check_backend(backend)
        self.backend, self._alone = backend, backend.size == 1
        named = name_parameters(optimizer, named_parameters)
        passes, extra = backward_passes_per_step, renamed_option("carry", carry, "extra", extra)
        self._order = order = _order(sum_order, backend)
        self._takes_set_to_none = takes_set_to_none(optimizer)
        self.reducer = GradientReducer(
            named, backend, unused=unused, passes=passes, extra=extra, transfer=transfer, order=order
        )
        self.reducer.follow(optimizer)
        check_own_steps(optimizer, self)
        self._wrapped = optimizer  # set last, because __setattr__ then passes new attributes on to it

    # Attributes that the wrapper does not have itself are the wrapped optimizer's: for example param_groups, state, and the
    # methods train() and eval() of schedule-free optimizers. GradScaler sets and deletes found_inf for a fused step.

    def __getattr__(self, name: str) -> Any:
        # During construction and unpickling there is no wrapped optimizer yet.
        if name == "_wrapped" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._has(name):
            super().__setattr__(name, value)
        else:
            setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        if self._has(name):
            super().__delattr__(name)
        else:
            delattr(self._wrapped, name)

    def _has(self, name: str) -> bool:
        """Return whether an attribute is the wrapper's own. During construction, all attributes are."""
        own = vars(self)
        return name in own or "_wrapped" not in own or hasattr(type(self), name)

    @property
    def optimizer(self) -> Any:
        """The wrapped optimizer, or its own attribute ``optimizer`` if it has one, as Lookahead does."""
        return getattr(self._wrapped, "optimizer", self._wrapped)

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        setattr(self._wrapped, "optimizer", value)  # noqa: B010 (mypy: torch's optimizers have no such attribute)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the wrapped optimizer's state and groups. Some programs call this method in place of load_state_dict."""
        self._wrapped.__setstate__(state)

    # Private in torch 2.5 to 2.15: GradScaler reads this property; there is no public one.
    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return whether the wrapped optimizer's step uses ``grad_scale`` and ``found_inf``. GradScaler reads this.

        Reading this property is collective: the gradients are averaged, if backward has not done so (:meth:`synchronize`).
        GradScaler reads the property just before it checks for an overflow; in averaged gradients, all ranks find the same
        overflow.
        """
        self.synchronize()
        return self._unscales_itself()

    def _unscales_itself(self) -> bool:
        """Return whether the wrapped optimizer's step unscales gradients, and skips itself after an overflow."""
        if not getattr(self._wrapped, "_step_supports_amp_scaling", False):
            return False
        # A step that takes the scaler as an argument uses an older interface. For such a step, GradScaler must unscale.
        return "grad_scaler" not in inspect.signature(self._wrapped.step).parameters

    @property
    def extra(self) -> torch.Tensor:
        """Extra scalars, float64 on the CPU: this rank's values before backward, their sums over the ranks after it."""
        return self.reducer.extra

    @property
    def cargo(self) -> torch.Tensor:
        """The former name of :attr:`extra`; deprecated."""
        warn_renamed("cargo", "extra")
        return self.reducer.extra

    def close(self) -> None:
        """Stop averaging: from then on, backward gives this rank's own gradients, and ``step()`` refuses them.

        Call it on every rank. A second call does nothing.
        """
        self.reducer.close()

    @not_compiled
    def synchronize(self) -> None:
        """Make every gradient the average over ranks, if backward has not done so. Collective; blocks; idempotent.

        Raises:
            BackendError: see :meth:`GradientReducer.reduce <dualtrain.gradients.GradientReducer.reduce>`.
            RuntimeError: the gradients are not averaged, and :meth:`close` was called.
        """
        self.reducer.reduce()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients inside the block; the next backward pass after it, or ``step()``, sends the sum."""
        with self.reducer.no_sync():
            yield

    @not_compiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the wrapped optimizer's step, on averaged gradients. Collective.

        A ``closure`` may be called several times (LBFGS). Its loss, a tensor of one element or a number, is averaged over
        ranks, so that every rank makes the same decisions.

        Raises:
            RuntimeError: as :meth:`synchronize`.
            BackendError: as :meth:`synchronize`; or an earlier backward pass failed after it had sent gradients, and
                :meth:`zero_grad` was called before their exchange had ended; or this rank has changed averages that another
                rank computes only in ``step()`` and uses unchanged; or the closure returned a loss on some ranks
                only; or an interrupt such as Ctrl-C has stopped an earlier step, which may have changed some parameters.
        """
        with self._refusing_after_interrupt():
            return self._step_with_hooks(closure)

    @contextmanager
    def _refusing_after_interrupt(self) -> Iterator[None]:
        """Run a step in this context.

        With several ranks, refuse the step if an interrupt has stopped an earlier step that changed parameters.
        """
        # ``_changing`` is still true if an interrupt has stopped this method before it recorded how an earlier step ended.
        if (self._interrupted or self._changing) and not self._alone:
            raise BackendError(
                "an earlier step of the optimizer was interrupted on this rank, whose parameters may differ: restart the "
                "ranks, or load the same model and optimizer state on all ranks"
            )
        try:
            yield
        except BaseException as error:
            self._interrupted = self._changing and not isinstance(error, Exception)
            self._changing = False
            raise
        self._changing = False

    @property
    def may_step(self) -> bool:
        """Return whether the wrapped optimizer may step now: this wrapper has called its step, or there is one rank."""
        return self._changing or self._alone

    def step_alone(self) -> None:
        """Run the wrapped optimizer's step with this rank's own gradients."""
        self._changing = True
        try:
            self._wrapped.step()
        finally:
            self._changing = False

    def _step_with_hooks(self, closure: Callable[[], Any] | None) -> Any:
        """Take a step with this wrapper's own step hooks; torch's global step hooks run in the wrapped optimizer's step."""
        args: tuple[Any, ...] = (self,) if closure is None else (self, closure)
        options: dict[str, Any] = {}
        for before in self._optimizer_step_pre_hooks.values():
            args, options = before(self, args, options) or (args, options)
        result = DistributedOptimizer._step(*args, **options)
        for after in self._optimizer_step_post_hooks.values():
            after(self, args, options)
        return result

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            return self._step_with_closure(closure)
        with self.reducer.in_step():
            self.synchronize()
        self._changing = True
        result = self._wrapped.step()
        self.reducer.renew(stepped=True)
        return result

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def averaged() -> Any:
            self.reducer.refuse_dropped()
            self.reducer.renew()
            with torch.enable_grad():
                loss = closure()
            with self.reducer.in_step():
                self.synchronize()
            return combined_loss(loss, self.average_over_ranks)

        self._changing = True
        result = self._wrapped.step(averaged)
        self.reducer.renew(stepped=True)
        return result

    def has_local_gradients(self) -> bool:
        """Return whether gradients that backward has computed on this rank are not averaged; False after close()."""
        reducer = self.reducer
        return not reducer.closed and reducer.has_local and any(has_values(slot.param.grad) for slot in reducer.slots)

    def count_own_step(self) -> None:
        """Count a step that the wrapped optimizer has taken itself: the ranks compare how many steps they have taken."""
        self.reducer.count_step()

    def average_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the average of ``values`` over the ranks. Collective; blocks.

        Unless ``sum_order`` is ``"backend"``, the values are added in a fixed tree over the ranks.
        """
        if self._order is None:
            return self.backend.allreduce(values, name="loss")
        return sum_order_of(self.backend.size, self.backend.size).total(
            self.backend.allgather(values[None], name="loss")
        ) * (1.0 / self.backend.size)

    @not_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients as the wrapped optimizer does; averages that no step has used are lost."""
        self.reducer.renew()
        self._zero_gradients(set_to_none)

    def _zero_gradients(self, set_to_none: bool) -> None:
        if self._takes_set_to_none:
            self._wrapped.zero_grad(set_to_none=set_to_none)
        else:
            self._wrapped.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; average its gradients from the next backward on. Call it on every rank.

        Raises:
            ValueError: the gradient of a parameter cannot be averaged. The group is not added then.
        """
        self._wrapped.add_param_group(param_group)
        number = len(self.param_groups) - 1
        added = self.param_groups[-1]["params"]
        try:
            self.reducer.add((f"group {number} parameter {i}", p) for i, p in enumerate(added))
        except ValueError:
            del self.param_groups[-1]  # every later backward would refuse parameters that are not averaged
            raise

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Return the wrapped optimizer's state. Optimizers of its class can load it, wrapped or not, on any backend."""
        return self._wrapped.state_dict(*args, **options)

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **options: Any) -> None:
        """Load the wrapped optimizer's state. Steps are allowed again after an interrupted :meth:`step`."""
        self._wrapped.load_state_dict(state_dict, *args, **options)
        self._interrupted = self._changing = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Only the wrapped optimizer can be pickled: the backend and the hooks belong to this process.
        return _itself, (self._wrapped,)

    def __repr__(self) -> str:
        return f"DistributedOptimizer over {self.backend!r} of {self._wrapped!r}"


def takes_set_to_none(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the method ``zero_grad`` of ``optimizer`` has the option ``set_to_none``."""
    options = inspect.signature(optimizer.zero_grad).parameters.values()
    return any(one.name == "set_to_none" or one.kind is one.VAR_KEYWORD for one in options)


def _itself(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


def _order(requested: str | SumOrder, backend: Backend) -> SumOrder | None:
    if isinstance(requested, SumOrder):
        return requested
    if requested not in ("backend", "canonical"):
        raise ValueError(f'sum_order={requested!r} is not known: choose "backend" or "canonical"')
    return sum_order_of(backend.size, backend.size) if requested == "canonical" else None
