"""``hvd.DistributedOptimizer``: wrapper of any optimizer. It combines gradients at the points where Horovod does.

Each optimizer sends its gradients in buckets, on a channel of its own, without a request to rank 0 for each step. Rank 0
opens the channel, requests zeros from ranks that have called ``join``, and informs the ranks of discarded steps and long
waits. With options that buckets do not support, an optimizer uses a grouped allreduce instead (``call_reducer.py``;
``_AdasumOptimizer`` below).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dualtrain.gradients import Transfer
from dualtrain.gradients.parameters import first_names
from dualtrain.hvd import basics, compat
from dualtrain.hvd.arithmetic import Adasum, Average, Sum, check_op
from dualtrain.hvd.base_reducer import HorovodReducer
from dualtrain.hvd.call_reducer import CallReducer
from dualtrain.hvd.channel_reducer import ChannelReducer
from dualtrain.hvd.compression import AnyCompressor, Compression, check_compression
from dualtrain.hvd.exceptions import HorovodInternalError
from dualtrain.hvd.mpi_ops import allreduce, grouped_allreduce, rocm_built, size
from dualtrain.hvd.optimizer_options import WIRE_DTYPES, FixedOption, Named, base_name, name_parameters, transfer_of
from dualtrain.hvd.process_sets import ProcessSet, check_is_set, global_process_set
from dualtrain.hvd.wrapped_values import values_of
from dualtrain.optimizer import DistributedOptimizer as NativeOptimizer
from dualtrain.optimizer import takes_set_to_none
from dualtrain.wrapped_steps import check_own_steps, combined_loss


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: AnyCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> _Optimizer:
    """Return a wrapper of ``optimizer`` that combines gradients over ranks.

    The wrapper has the parameter groups and the state of ``optimizer``. Its class is a subclass of the optimizer's class.

    With any ``op`` except Adasum, backward sends gradients while it runs, and never waits for another rank. Then
    ``synchronize()`` or ``step()`` waits, and ``param.grad`` has the combined gradients. As with Horovod, a script that
    clips or unscales gradients must call ``synchronize()`` first, and must call ``step()`` inside ``skip_synchronize()``.

    Args:
        optimizer: any torch optimizer; its state is kept, except with DUALTRAIN_HVD_COMPAT=1.
        named_parameters: ``model.named_parameters()``; with ``None``, names are generated.
        compression: ``Compression.none``, ``fp16``, ``bf16``, or the user's own compressor.
        backward_passes_per_step: number of backward passes whose gradients are summed before they are exchanged.
        op: Average, Sum, Min, Max, Product or Adasum. With Adasum, each rank steps alone, then the ranks combine the
            changes of the parameters.
        gradient_predivide_factor: a factor f: gradients are multiplied by 1/f, and their sum by f/size. Only for Average.
        num_groups: the deprecated form of ``groups``.
        groups: lists of parameters, or the number of groups into which all unfrozen parameters are split. Gradients of
            one group that have the same dtype and device are sent together.
        sparse_as_dense: whether sparse gradients are sent as dense gradients.
        process_set: the ranks that combine gradients; other ranks step alone.

    Raises:
        ValueError: an option is wrong, a parameter has no name, two parameters have the same name, a parameter's gradient
            cannot be averaged, or the process set was made from a communicator and was never in use. (A set made from ranks
            may be added after wrapping, before the first backward pass.)
        TypeError: ``optimizer`` is a wrapper already.
        HorovodInternalError: ``init`` was not called.
    """
    if isinstance(optimizer, NativeOptimizer):
        raise TypeError("the optimizer is a DistributedOptimizer already, whose gradients are combined: wrap it only once")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if gradient_predivide_factor != 1.0 and rocm_built():
        raise ValueError("gradient_predivide_factor not supported yet with ROCm")
    if num_groups != 0:
        warnings.warn("num_groups is deprecated: pass groups instead", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    check_op(Average if op is None else op)
    check_compression(compression)
    check_is_set(process_set)
    if compat.enabled():
        optimizer = compat.without_state(optimizer)
    named = name_parameters(optimizer, named_parameters)
    if process_set.ranks is None:
        process_set.usable_id()  # raises ValueError: the ranks of a communicator are unknown until the set is in use
    base = _AdasumOptimizer if op == Adasum and _has_several_ranks(process_set) else _Optimizer
    # Make a subclass of the optimizer's class, as Horovod does: the wrapper of an SGD is an instance of torch.optim.SGD.
    # Lightning and other libraries recognize a wrapped optimizer by the word "horovod" in str() of its class.
    names = {"__module__": __name__, "__qualname__": f"horovod.{type(optimizer).__name__}", **values_of(optimizer, base)}
    cls = type(type(optimizer).__name__, (base, type(optimizer)), names)
    wrapper: _Optimizer = object.__new__(cls)
    transfer = transfer_of(optimizer, op, gradient_predivide_factor, compression, groups, sparse_as_dense, process_set)
    wrapper.wrap(
        optimizer, named, compression, backward_passes_per_step, op, transfer, gradient_predivide_factor, process_set
    )
    return wrapper


def _has_several_ranks(process_set: ProcessSet) -> bool:
    """Return whether the set has several ranks. The set need not be in use."""
    return len(process_set.ranks or []) > 1


class _Optimizer(NativeOptimizer):
    """Wrapper that ``DistributedOptimizer`` returns. It combines gradients at the points where Horovod does."""

    op = FixedOption()
    process_set = FixedOption()
    gradient_predivide_factor = FixedOption()
    sparse_as_dense = FixedOption()
    _compression = FixedOption()  # private in Horovod too; programs read the state of their own compressor

    def wrap(
        self,
        optimizer: torch.optim.Optimizer,
        named: Named,
        compression: AnyCompressor,
        passes: int,
        op: int,
        transfer: Transfer,
        predivide: float,
        process_set: ProcessSet,
    ) -> None:
        """Initialize. ``__init__`` is not called: it is inherited from ``NativeOptimizer``, and needs a backend."""
        self._takes_set_to_none = takes_set_to_none(optimizer)
        self._parameter_names = {p: name for name, p in sorted(named, key=lambda pair: pair[0])}
        self._passes = passes
        self.op, self.process_set, self._compression = op, process_set, compression
        # Not 1 / transfer.before, which may differ in the last bit.
        self.gradient_predivide_factor, self.sparse_as_dense = predivide, transfer.sparse_as_dense
        self._synchronized, self._should_synchronize = False, True
        self._fills_unused = True
        self.reducer: HorovodReducer | None = None  # type: ignore[assignment]
        # As on Horovod, the only rank of a process set has hooks too: every parameter gets a gradient. The only rank of the
        # world has hooks only if HOROVOD_ELASTIC is 1.
        is_distributed = size() > 1 or os.environ.get("HOROVOD_ELASTIC") == "1"
        self._alone = not (is_distributed and process_set.included())
        if not self._alone:
            named = first_names(named, optimizer)
            HorovodReducer.close_replaced(named, process_set)
            self.reducer = self._make_reducer(named, compression, transfer)
        if self.reducer is not None:
            self.reducer.follow(optimizer)
        check_own_steps(optimizer, self)
        self._wrapped = optimizer  # assigned last: from now on, __setattr__ sets new attributes on the wrapped optimizer

    def close(self) -> None:
        """Remove the hooks: later backward passes send no gradients. Callers must not call ``step`` afterwards."""
        if self.reducer is not None:
            self.reducer.close()

    def _make_reducer(self, named: Named, compression: AnyCompressor, transfer: Transfer) -> HorovodReducer:
        options = base_name(named, self.process_set), self.process_set, self._passes
        half = WIRE_DTYPES.get(compression) == torch.float16 or any(p.dtype == torch.float16 for _, p in named)
        rounds_sums = half and compat.enabled()
        if rounds_sums:
            compat.note(compat.HALF)  # a grouped allreduce rounds the sums to 16 bits, as on Horovod; buckets do not
        if rounds_sums or self.op not in (Average, Sum) or compression not in WIRE_DTYPES:
            predivide = 1.0 if transfer.before == 1 else self.gradient_predivide_factor
            return CallReducer(named, *options, self.op, compression, predivide=predivide)
        return ChannelReducer(named, *options, transfer)

    def __repr__(self) -> str:
        return repr(self._wrapped)

    # Private in torch 2.5 to 2.15: GradScaler reads this property; there is no public one.
    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return whether the optimizer's step unscales gradients. GradScaler reads this before it looks for an overflow.

        Raises:
            AssertionError: the gradients are not combined yet, so that only the ranks with an overflow would skip the step.
        """
        if self.reducer is not None and self.reducer.dirty:
            raise AssertionError(
                "scaler.step() was called after loss.backward() but before optimizer.synchronize(): each rank would check "
                "its own gradients for overflow; call optimizer.synchronize() first, and scaler.step() inside "
                "`with optimizer.skip_synchronize():`"
            )
        return self._unscales_itself()

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes whose gradients are summed before they are exchanged."""
        return self._passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum the gradients of ``passes`` backward passes before they are exchanged.

        If gradients of this step may have been sent already, the change applies from the next step on.
        """
        self._passes = passes
        if self.reducer is not None:
            self.reducer.set_passes(passes)

    def synchronize(self) -> None:
        """Combine every gradient over the ranks. Collective; blocks.

        A second call combines ``param.grad`` again, as on Horovod, because another rank may have run backward in between.

        Raises:
            HorovodInternalError: as :meth:`HorovodReducer.reduce`; or ``_requires_update`` was emptied, and a parameter has
                no gradient on this rank, but a nonzero one on other ranks.
            ValueError: as :meth:`HorovodReducer.reduce`.
            RuntimeError: the optimizer was closed, or replaced by a later optimizer of some of its parameters.
        """
        if self.reducer is not None:
            self.reducer.renew()
            self._combine(self.reducer)
            self.reducer.reset_passes()
        self._synchronized = True

    # Private in Horovod too. Programs empty this set to exclude unused parameters from weight decay (horovod#1099).
    @property
    def _requires_update(self) -> frozenset[torch.nn.Parameter]:
        """The parameters that get a gradient of zeros if no rank has a gradient. Programs may assign an empty set."""
        return frozenset(self._trained() if self._fills_unused else ())

    @_requires_update.setter
    def _requires_update(self, params: Iterable[torch.nn.Parameter]) -> None:
        if set(params):
            raise AttributeError("_requires_update of a wrapped optimizer can only be emptied: assign set()")
        self._fills_unused = False

    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def _combine(self, reducer: HorovodReducer) -> None:
        """Combine the gradients. If ``_requires_update`` was emptied, parameters that no rank uses have no gradient.

        Raises:
            HorovodInternalError: it was emptied, and a parameter has no gradient on this rank, but a nonzero one on other
                ranks. The world was ended.
        """
        unused = [] if self._fills_unused else [p for p in self._trained() if p.grad is None]
        reducer.reduce()
        for p in unused:
            if p.grad is not None and p.grad.any():
                why = (
                    f"parameter {self._parameter_names.get(p)!r} has a gradient on some ranks only, and _requires_update "
                    "was emptied: use the parameter on every rank, or leave _requires_update as it is"
                )
                basics.engine().end_world(why)
                raise HorovodInternalError(why)
            p.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Raise AttributeError: Horovod's optimizers have no such method."""
        raise AttributeError("hvd.DistributedOptimizer has no no_sync(): pass backward_passes_per_step")
        yield

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside this context, ``step`` does not synchronize. For use after ``synchronize()``.

        With a closure that leaves uncombined gradients on any rank, ``step`` does synchronize.
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the wrapped optimizer's step, on combined gradients. Collective.

        The optimizer may call ``closure`` several times, as LBFGS does; Horovod refuses a second call of ``closure``. The
        optimizer gets the average of all ranks' losses (their sum with ``op=Sum``), so that every rank makes the same
        decisions.

        Raises:
            HorovodInternalError, ValueError, RuntimeError: as :meth:`synchronize`.
            BackendError: the closure returned a loss on some ranks only; or an interrupt such as Ctrl-C has stopped an
                earlier step, which may have changed some parameters.
        """
        if self._should_synchronize and self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() "
                "context if you use optimizer.synchronize() in your code.",
                stacklevel=2,
            )
        with self._refusing_after_interrupt():
            return self._synchronize_and_step(closure)

    def _synchronize_and_step(self, closure: Callable[[], Any] | None) -> Any:
        if self._should_synchronize and closure is None:
            self.synchronize()
        synchronized, self._synchronized = self._synchronized, False
        self._changing = True
        result = self._step_wrapped(closure and self._with_reduction(closure))
        # Do not reset the reducer if the caller used skip_synchronize() without synchronize(): then zero_grad() and
        # backward must raise AssertionError.
        if self.reducer is not None and (synchronized or closure is not None):
            self.reducer.renew()
            self.reducer.reset_passes()
        return result

    def _step_wrapped(self, closure: Callable[[], Any] | None) -> Any:
        """Run the wrapped optimizer's step. Some optimizers' ``step`` has no parameter ``closure``."""
        return self._wrapped.step() if closure is None else self._wrapped.step(closure)

    def _with_reduction(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            reducer, had_gradients = self.reducer, self.has_local_gradients()
            if reducer is not None:
                reducer.renew()
                reducer.reset_passes()
            with torch.enable_grad():
                loss = closure()
            if reducer is None:
                return loss
            if self._should_synchronize or self._has_any_rank_local_gradients(reducer, had_gradients):
                self._combine(reducer)
                reducer.reset_passes()
            self._synchronized = False
            return combined_loss(loss, self.average_over_ranks)

        return evaluate

    def _has_any_rank_local_gradients(self, reducer: HorovodReducer, had_gradients: bool) -> bool:
        """Return whether any rank has uncombined gradients after a closure in ``skip_synchronize()``. Collective.

        Closures such as those of Lightning 1.x synchronize by themselves. They may set gradients to None afterwards, or run
        no backward: the optimizer must then find None, not zeros.

        Args:
            had_gradients: whether this rank had such gradients before the closure.
        """
        reducer.check_open()
        reducer.enter_world()  # sets the name of the call
        reducer.renew()  # another rank may have run backward after the closure's synchronize()
        mine = self.has_local_gradients() or (had_gradients and not self._synchronized)
        return bool(self._over_ranks(torch.tensor([float(mine)], device="cpu"), "local").item())

    def average_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the average of ``values`` over the ranks; with ``op=Sum``, their sum. Collective; blocks."""
        return self._over_ranks(values, "loss")

    def _over_ranks(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Combine ``values`` as :meth:`average_over_ranks` does; the call's name ends with ``name``. Collective; blocks."""
        assert self.reducer is not None
        op = Sum if self.op == Sum else Average
        return allreduce(values, name=f"{self.reducer.channel_name}.{name}", op=op, process_set=self.process_set)

    def has_local_gradients(self) -> bool:
        """Return whether a backward pass has run, or an exchange has begun, since gradients were last combined.

        False without a reducer, and after :meth:`close`.
        """
        return self.reducer is not None and not self.reducer.closed and (self.reducer.dirty or self.reducer.exchanging)

    def count_own_step(self) -> None:
        """Do nothing: as on Horovod, the ranks do not compare how many steps they have taken."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to None or zero. Raises AssertionError between backward and ``step`` or ``synchronize``."""
        if self.reducer is not None and self.reducer.dirty:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        if self.reducer is not None:
            self.reducer.renew()
            self.reducer.refusals.dropped = self.reducer.discarded = False
            self.reducer.hooks.restore()
        self._zero_gradients(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer, and combine its gradients too. Must be called on every rank.

        With DUALTRAIN_HVD_COMPAT=1, the gradients of the group are not combined.

        Raises:
            ValueError: the gradient of a parameter cannot be averaged. The group is not added then.
        """
        if compat.enabled():
            # Horovod has two defects. It does not combine the gradients of the new group (UNREDUCED). It fills in missing
            # options with the defaults of the optimizer's class, instead of the wrapped optimizer's defaults (REMADE). A
            # rank without a reducer never combines gradients, so only REMADE makes a difference there.
            compat.note(compat.REMADE if self.reducer is None else compat.UNREDUCED)
        if self.reducer is not None and compat.enabled():
            self._wrapped.add_param_group(param_group)
            self.reducer.hooks.known.update(map(id, self.param_groups[-1]["params"]))
        elif self.reducer is None:
            self._wrapped.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **options: Any) -> None:
        """Load the wrapped optimizer's state, and discard the step that backward has begun, if any.

        If a step is discarded, its gradients become ``None``. Every rank must then call this method, and run backward
        before its next ``step``. A rank that had not run backward in the discarded step must wait for the other ranks
        before that backward pass, for example in ``barrier``.
        """
        self._synchronized, self._should_synchronize = False, True
        if self.reducer is not None:
            self.reducer.discard_step()
        super().load_state_dict(state_dict, *args, **options)


class _DistributedOptimizer(torch.optim.Optimizer):
    """Placeholder for a name that programs import. No optimizer is an instance of this class, as in Horovod 0.28.1."""


class _DistributedAdasumOptimizer(torch.optim.Optimizer):
    """Placeholder for a name that programs import. No optimizer is an instance of this class, as in Horovod 0.28.1."""


class _AdasumOptimizer(_Optimizer):
    """Wrapper for ``op=Adasum``: each rank steps on its own gradients, then the ranks combine the parameters' changes."""

    _closed = False  # this class has no reducer that could be closed

    def close(self) -> None:
        """Allow steps that the wrapped optimizer takes itself. Callers must not call this wrapper's ``step`` afterwards."""
        self._closed = True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return whether the optimizer's step unscales gradients.

        Raises:
            AssertionError: it does not, and this rank is in the process set: only the ranks with an overflow would skip the
                step.
        """
        unscales = self._unscales_itself()
        if not unscales and self.process_set.included():
            raise AssertionError(
                "scaler.step() was called with op=Adasum: each rank would check its own gradients for overflow, and the "
                "others would wait for a rank that skips its step; pass fused=True to the optimizer, or use bfloat16 "
                "without a GradScaler"
            )
        return unscales

    def _make_reducer(self, named: Named, compression: AnyCompressor, transfer: Transfer) -> Any:
        """Make no reducer; set the name of the grouped allreduce."""
        self._name = base_name(named, self.process_set)

    def synchronize(self) -> None:
        """Do nothing: gradients are not combined."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise AssertionError: there is nothing to skip."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank alone, then replace the parameters' changes by their adaptive sum over the ranks. Collective.

        ``closure`` computes this rank's own loss. A rank outside of the process set steps without communication.

        Raises:
            ValueError: this process is not in a world, or the process set was not added or was removed; no step was taken.
            HorovodInternalError: the ranks' calls do not match, a rank failed, or Horovod was shut down.
            BackendError: an interrupt such as Ctrl-C has stopped an earlier step.
        """
        if not self.process_set.included():
            return self._step_wrapped(closure)
        self.process_set.usable_id()
        with self._refusing_after_interrupt():
            return self._step_and_combine(closure)

    def has_local_gradients(self) -> bool:
        """Return True until ``close`` is called: with Adasum, gradients are never combined."""
        return not self._closed

    def _step_and_combine(self, closure: Callable[[], Any] | None) -> Any:
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        params.sort(key=lambda p: self._parameter_names.get(p, ""))  # ranks may list them in different orders
        before = [p.detach().clone() for p in params]
        self._changing = True
        result = self._step_wrapped(closure)  # not under no_grad: an optimizer may call the closure without enable_grad
        with torch.no_grad():
            changes = [(p - start).contiguous() for p, start in zip(params, before, strict=True)]
            # If all parameters are frozen on this rank, it takes part all the same, so that a difference is an error.
            combined = grouped_allreduce(
                changes or [torch.zeros(0, device="cpu")],
                name=self._name,
                compression=self._compression,
                op=Adasum,
                process_set=self.process_set,
            )
            for p, start, change in zip(params, before, combined, strict=False):
                p.copy_(start + change)
        return result
