"""Average gradients over the ranks while backward still runs.

When autograd has computed a parameter's gradient, the parameter's hook marks the gradient ready. When the next bucket in
order is complete, the reducer starts to sum it over the ranks, while backward continues. At the end of backward, the
reducer waits for all sums. From then on ``param.grad`` is the average on every rank: clip, unscale or read it without
another call.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from dualtrain.backends import Backend
from dualtrain.backends.comparison import agree_on_list
from dualtrain.backends.sum_order import SumOrder
from dualtrain.errors import BackendError
from dualtrain.gradients.buckets import Bucket
from dualtrain.gradients.deprecated import renamed_option, warn_renamed
from dualtrain.gradients.exchange import Exchange, Unused
from dualtrain.gradients.hooks import ModuleAttribute, ParameterHooks, has_later_hook
from dualtrain.gradients.layout import AVERAGE, Transfer
from dualtrain.gradients.parameter_order import refuse_other_order
from dualtrain.gradients.passes import EndOfPass, at_end_of_pass
from dualtrain.gradients.refusals import SENT_DROPPED
from dualtrain.gradients.slots import Slot
from dualtrain.gradients.sparse import sparse_dims
from dualtrain.gradients.step_check import StepCheck
from dualtrain.gradients.turns import turns

#: Backend → numbers for the names of its reducers.
_NAME_COUNTERS: weakref.WeakKeyDictionary[Backend, Iterator[int]] = weakref.WeakKeyDictionary()


class GradientReducer:
    """Reducer that averages the gradients of some parameters over the ranks of a backend, in backward.

    Args:
        named_parameters: (name, parameter) pairs, the same on every rank. They may include frozen parameters: the
            reducer averages their gradients once they are unfrozen.
        backend: the ranks to average over.
        unused: the gradient of a parameter that no rank used in a step. With ``"zero"`` it is zeros, as in Horovod, so
            that weight decay and momentum still apply. With ``"none"`` it is ``None``, as in DDP. A parameter that only
            some ranks used always gets the average, in which the other ranks count as zero.
        passes: number of backward passes that are summed locally before the ranks exchange anything.
        extra: how many of the caller's scalars are sent along and summed over ranks (see :attr:`extra`).
        transfer: how gradients are sent: factors before and after the sum (by default, the result is the average), the
            dtype in which gradients are sent, and the buckets.
        order: the tree along which gradients are summed, so that the bits do not depend on backend and transport. Its
            leaves are shards: parts of the global batch, of which a rank may have several (see :meth:`add_shard`). The
            average is then over the shards. ``None`` for the backend's own order.
        carry: the former name of ``extra``; deprecated.

    In the first reduction, the ranks compare their parameters and options; a difference raises BackendError, which names
    it. They also agree on which gradients are sparse: the indices and values of these gradients are gathered, unless
    ``transfer`` has ``sparse_as_dense``. Gradients that become sparse only later are averaged as dense ones. With an
    ``order`` and without ``sparse_as_dense``, a sparse gradient raises BackendError.
    ``param.grad`` becomes a view into a buffer. Some gradients are not replaced, and the average is copied into them: those
    to which the program has a reference, those that share memory with another tensor, and those that have a graph
    (``create_graph=True``). You may assign to ``param.grad`` or to its ``.data``.
    If the program keeps a gradient or a view of it (``param.grad.view(-1)``, ``param.grad.numpy()``) after ``zero_grad()``,
    its values do not change, as in torch. After the program has kept a view of a gradient, all gradients of the same bucket
    are copies instead of views into a buffer. With gradients on a GPU, views do not keep their values: the next backward
    overwrites them.
    Keep a reference to the reducer as long as the model trains: the hooks on the parameters hold weak references only.
    ``torch.utils.swap_tensors`` drops these hooks. Call :meth:`renew` afterwards, as
    ``DistributedOptimizer.zero_grad`` does.

    Attributes:
        extra: float64, (extra,), on the CPU. Set this rank's scalars before a reduction. The reduction replaces them by
            their sums over the ranks, computed in the dtype in which gradients are sent: 16 bits with ``Transfer.dtype``.
            With an ``order``, the sums are over the shards: the scalars of a rank without shards are not added.
        closed: whether :meth:`close` was called.
        has_local: whether backward has added to gradients since the last exchange or :meth:`renew`.

    Raises:
        TypeError: ``transfer`` is not a ``Transfer``.
        ValueError: an option is out of its bounds, or the gradient of a parameter cannot be averaged.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        backend: Backend,
        *,
        unused: Unused = "zero",
        passes: int = 1,
        extra: int = 0,
        transfer: Transfer = AVERAGE,
        order: SumOrder | None = None,
        carry: int | None = None,
    ) -> None:
        if unused not in ("zero", "none"):
            raise ValueError(f'unused={unused!r} is not known: choose "zero" or "none"')
        if not isinstance(transfer, Transfer):
            raise TypeError(f"transfer is a {type(transfer).__name__}: give a dualtrain.gradients.Transfer")
        if transfer.dtype is not None and transfer.dtype not in backend.narrow:
            raise ValueError(f"the {backend.name} backend does not reduce {transfer.dtype}: compress to float16")
        if order is not None and (transfer.dtype is not None or len(order.ranges) != backend.size):
            raise ValueError(
                "a fixed order of the sum must fit the backend's size, and gradients must be sent in their own dtype"
            )
        self.passes = _count("backward passes per step", passes, least=1)
        extra = _count("the number of extra scalars", renamed_option("carry", carry, "extra", extra), least=0)
        self.extra = torch.zeros(extra, dtype=torch.float64, device="cpu")
        self.hooks = ParameterHooks()
        self._exchange = Exchange(self.hooks, transfer, unused, extra, order)
        self._scalars = self.extra if extra else None
        self._own_scalars = torch.zeros_like(self.extra)  # this rank's scalars of the last reduction
        self._summed_version = -1  # the version of ``extra`` when its sums were copied to it; -1 after ``renew``
        self._enter(backend)
        self.closed = False
        self.has_local = False
        self._paused = False
        self._seen = 0  # backward passes since the last reduction
        self._dropped = False  # True if ``zero_grad`` was called between two of the step's ``passes``
        #: The callback for the end of the running pass. The reference is dead if the pass failed.
        self._ending: weakref.ref[Callable[[], None]] | None = None
        self._step_check = StepCheck(self.slots)
        self._refused_pass = False  # whether a pass was refused since the last reduction; it may have changed gradients
        #: The number of the round (one exchange) in which a failed backward pass had sent gradients before ``zero_grad``
        #: dropped them; else ``None``.
        self._dropped_round: int | None = None
        self.add(named_parameters)

    def _enter(self, backend: Backend) -> None:
        self.backend = backend
        # Two reducers may send their first buckets at the same time, and Horovod matches operations by name.
        self.name = f"gradients.{next(_NAME_COUNTERS.setdefault(backend, itertools.count()))}"
        self._turns = turns(backend)
        self._number = self._turns.enter(self)

    def _leave(self) -> None:
        if not self.closed:  # after ``close``, another reducer may have this number
            self._turns.leave(self._number)

    @property
    def cargo(self) -> torch.Tensor:
        """The former name of :attr:`extra`; deprecated."""
        warn_renamed("cargo", "extra")
        return self.extra

    @property
    def slots(self) -> list[Slot]:
        """The trained parameters, in the order in which they were added."""
        return self.hooks.slots

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of the current layout, in the order in which they are sent; none before the first reduction."""
        return self._exchange.schedule.buckets

    def add(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Reduce these parameters too, from the next backward on. Every rank must add the same parameters.

        After :meth:`close`, no gradients are reduced, so the parameters get no hooks.

        Raises:
            ValueError: the gradient of a parameter cannot be averaged. None of the parameters is added then.
        """
        if self.closed:
            # ``step`` may still use averages from before ``close``. It refuses parameters that are not known.
            self.hooks.known.update(id(p) for _, p in named_parameters)
        elif self.hooks.add(self, named_parameters):
            self._exchange.laid_out = False

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse reductions if ``optimizer`` has a parameter with ``requires_grad`` that was not added to this reducer."""
        self._exchange.refusals.optimizer = optimizer

    def close(self) -> None:
        """Remove the hooks, so that later backward passes average nothing. Call it on every rank. May be repeated."""
        self._leave()
        self.closed = True
        self.hooks.remove()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients inside the block; the next pass after the block, or ``reduce``, sends the sum."""
        paused, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = paused

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Pause the backend's other reducers inside the block: they accumulate gradients as in :meth:`no_sync`."""
        with ExitStack() as stack:
            for other in self._turns.others(self._number):
                stack.enter_context(other.no_sync())
            yield

    def reduce(self) -> None:
        """Make every ``param.grad`` the average over ranks, unless it is the average already. Collective; blocks.

        Runs at the end of backward. The optimizer's ``step`` calls it again, since some ranks may have run no backward:
        their gradients count as zeros.

        Raises:
            BackendError: a rank failed, did not take part within the backend's timeout, has different parameters, or has
                another reason to refuse (see ``Refusals``). If gradients were sent already, all gradients are then
                ``None``, because some of them may be sums. Also raised if a gradient was changed or assigned after it was
                sent.
            RuntimeError: the reducer was closed.
        """
        for reducer in (self, *self._turns.others(self._number)):
            reducer.end_interrupted()
        if self.is_reduced():
            self._exchange.refusals.check_groups(self.backend)
            self._exchange.check_assigned()
            return
        if self.closed:
            raise RuntimeError("the reducer was closed, and no longer averages gradients: make a new optimizer")
        for reducer in self._turns.due(self._number, self):
            reducer.exchange()

    @property
    def steps(self) -> int:
        """Number of steps that the optimizer has taken with these gradients, on the current backend."""
        return self._exchange.refusals.steps

    def count_step(self) -> None:
        """Count an optimizer step. In each exchange, the ranks compare whether their numbers are odd: see ``Refusals``."""
        self._exchange.refusals.steps += 1

    @property
    def is_due(self) -> bool:
        """Return whether the reducer must exchange its gradients when the running backward pass ends.

        This is so if a bucket was sent already, or if the pass has produced a gradient and is the last of :attr:`passes`.
        """
        return (self._is_running and self._seen >= self.passes) or self._exchange.schedule.next > 0

    def end_interrupted(self) -> None:
        """End an exchange that an exception such as KeyboardInterrupt has stopped after all sums had arrived.

        The other ranks have ended this exchange. If this rank repeated it, they would treat it as their next exchange.
        """
        if self._exchange.has_sums:
            self.exchange()

    def exchange(self) -> None:
        """Average the gradients over the ranks. Collective; blocks."""
        exchange = self._exchange
        if self._scalars is not None and not self.has_local:
            self._restore_own_scalars()
        self._use_layout()
        while exchange.schedule.has_unsent:
            exchange.send_next(self._scalars)
        if exchange.wait(cpu_waits=self._scalars is not None):
            self._start_over(reduced=False)
            exchange.refuse()
        if self._scalars is not None:
            self._own_scalars.copy_(self._scalars)
            self._scalars.copy_(exchange.extra)
            self._summed_version = self._scalars._version  # private in torch 2.5 to 2.15, as in ``Exchange``
        # After a failed pass, the program may drop the gradients, so changes of them are not errors.
        failed = self._refused_pass or (self._ending is not None and self._ending() is None)
        changed = None if failed else exchange.changed_late()
        exchange.unpack()
        self._step_check.record(exchange.refusals.ranks_in_step)
        self._start_over(reduced=changed is None)
        if changed is not None:
            raise BackendError(
                f"rank {self.backend.job_rank}: the gradient of {changed.name!r} changed after it was sent, during "
                "backward: change it in a hook of the parameter (register_post_accumulate_grad_hook), or after backward; "
                "or run backward in no_sync(), so that step() sends the gradients"
            )

    def _restore_own_scalars(self) -> None:
        """Replace sums in :attr:`extra` by this rank's own scalars, if a step's reduction is repeated.

        A reduction is repeated if all averages were zero and the program changed them in place, for example by clipping:
        the gradients then look as if the model's ``zero_grad(set_to_none=False)`` had zeroed them.
        """
        sums = self._exchange.extra.double()
        # ``torch.equal`` would compare NaN as different from itself.
        if self.extra._version == self._summed_version and torch.allclose(self.extra, sums, 0, 0, equal_nan=True):
            self.extra.copy_(self._own_scalars)

    def begin_shards(self) -> None:
        """Begin a step in which ranks have several shards. Collective if buckets must be made; blocks.

        Raises:
            BackendError: an earlier backward pass failed after it had sent some of its gradients.
        """
        self._forget_failed_pass()
        self._use_layout()
        for bucket in self.buckets:
            bucket.sum.begin()

    def _use_layout(self) -> None:
        """Make the buckets (collective; blocks) before the first exchange, and after a parameter was added."""
        self.backend.check_process()  # before zeros are copied to a bucket; ``_begin_pass`` checks it for gradients
        self._add_unfrozen()
        if not self._exchange.laid_out:
            self._exchange.leave_layout(cpu_waits=self._scalars is not None)
            self._lay_out()

    def add_shard(self) -> None:
        """Add this rank's gradients and :attr:`extra` to the partial sums, as its next shard; set gradients to ``None``.

        Not for a rank's last shard, which the next reduction adds. The reducer needs an ``order``; call
        :meth:`begin_shards` before, and run the shard's backward passes in :meth:`no_sync`. Not collective.

        Raises:
            RuntimeError: the reducer has no ``order``, or all shards of this rank before its last one were added already.
        """
        self._exchange.add_shard(self._scalars)
        self._exchange.reduced = False

    def _start_over(self, *, reduced: bool) -> None:
        self.has_local = False
        self._exchange.refusals.changed.clear()
        self._exchange.refusals.drift.clear()
        self._exchange.end_round(reduced=reduced)
        self._seen = self.passes if self._dropped else 0
        self._ending, self._refused_pass = None, False

    def is_reduced(self) -> bool:
        """Return whether the gradients are the last exchange's average, and not all were zeroed or made ``None`` since."""
        return self._exchange.is_reduced()

    def renew(self, *, stepped: bool = False) -> None:
        """Make the next ``reduce`` average ``param.grad`` again. Call this after the averages were used. Not collective.

        Parameters that were unfrozen, or lost their hooks by ``torch.utils.swap_tensors``, are averaged from the next
        backward on. ``stepped`` says whether an optimizer step used the averages.
        """
        self._exchange.reduced = self._exchange.refusals.dropped = self.has_local = False
        self._summed_version = -1
        self._step_check.record([])
        self._exchange.refusals.steps += stepped
        if stepped:
            self._exchange.refusals.drift.record(self.steps, self.slots)
        self._exchange.refusals.changed.clear()
        self._exchange.refusals.sent_dropped = False
        sent = self._exchange.schedule.next > 0
        self._dropped_round = self._exchange.schedule.round if sent and not self._is_running else None
        if not sent and not self._is_running:
            # The program may call ``zero_grad`` between the ``passes`` of a step, on all ranks or on this rank only. This
            # rank cannot distinguish these cases, so it keeps its count. Once the count has reached ``passes``, every pass
            # exchanges gradients until this method is called again.
            self._dropped = 0 < self._seen < self.passes and not stepped
            self._seen = self._seen if self._dropped else 0
        if not self.closed:
            self.hooks.restore()
            self._add_unfrozen()  # a hook adds them too, but the next backward may run no hook

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Call :meth:`reduce` in this context if a step of the optimizer follows at once.

        If ``reduce`` exchanges the gradients in this context, the step uses the averages unchanged. The exchange reports
        this to the other ranks. If ``zero_grad`` dropped gradients of a round in progress, every rank refuses the
        reduction.

        Raises:
            BackendError: at the end of the context, on this rank, for one of these reasons:

                - ``zero_grad`` was called after all gradients of a failed pass were sent (:meth:`refuse_dropped`).
                - The gradients were averaged before, the program has changed them since, and another rank averages only in
                  its step.
        """
        schedule, refusals = self._exchange.schedule, self._exchange.refusals
        refusals.sent_dropped = schedule.round == self._dropped_round and schedule.has_unsent
        refusals.in_step = True
        try:
            yield
        finally:
            refusals.in_step = False
        self.refuse_dropped()
        self._step_check.refuse_changed(self.backend.job_rank)

    def refuse_dropped(self) -> None:
        """Raise BackendError, on this rank, if ``zero_grad`` dropped the last round's gradients after all were sent."""
        if self._dropped_round is not None and self._exchange.schedule.round == self._dropped_round + 1:
            raise BackendError(f"rank {self.backend.job_rank}: {SENT_DROPPED}")

    def forget(self, backend: Backend) -> None:
        """Discard a failed exchange, and use the new ``backend``, whose ranks then compare their layouts.

        The ranks do not compare the steps that they took before, so make their parameters equal. If there are several
        reducers, every rank must call their ``forget`` in the same order.
        """
        self._leave()
        self._enter(backend)
        if self.closed:
            self._turns.leave(self._number)
        self._exchange.forget()
        self._step_check.record([])
        refusals = self._exchange.refusals
        refusals.changed.clear()
        refusals.drift.clear()
        refusals.dropped = refusals.sent_dropped = False
        refusals.steps = 0  # a rank that is new on this backend has taken none
        self._seen, self._dropped, self._ending, self._refused_pass = 0, False, None, False
        self._dropped_round = None

    # -- during backward ------------------------------------------------------------------------------------------

    @property
    def _is_running(self) -> bool:
        """Return whether a backward pass that has produced gradients is running."""
        return self._ending is not None and self._ending() is not None

    def parameter_replaced(self, attribute: ModuleAttribute, name: str) -> None:
        """Record that parameter ``name``, or a module that has it, was replaced: see ``Refusals.record_replacement``."""
        self._exchange.refusals.record_replacement(attribute, name)

    def gradient_accumulated(self, slot: Slot) -> None:
        """Record that a gradient is this rank's own, and the number of steps. Runs before the program's hooks may step."""
        self._exchange.reduced, self.has_local = False, True
        self._exchange.refusals.changed.watch(slot, self._exchange.schedule.round)
        slot.steps = self.steps

    def gradient_ready(self, slot: Slot) -> None:
        """Mark a gradient ready, and send the buckets that are complete and next in order. Runs for each gradient."""
        exchange = self._exchange
        if slot.steps is not None and slot.steps != exchange.refusals.steps:
            return  # a hook of the program that runs before this one has stepped, with the average of this gradient
        exchange.reduced, self.has_local = False, True
        # torch (2.5 to 2.15) has no public way to count a parameter's hooks.
        if slot.node_hooks or len(slot.param._post_accumulate_grad_hooks) > 1:
            exchange.refusals.changed.watch(slot, exchange.schedule.round)
        running = self._is_running
        if self._paused:
            # A failed pass may have sent some of its gradients. Their sums would overwrite the gradients of this pass.
            if exchange.schedule.next and not running and exchange.is_unfinished:
                self._forget_failed_pass()
            return
        if not running:
            self._begin_pass()
        if self._seen < self.passes or not exchange.laid_out:
            return  # a pass that is only summed locally, or the first reduction, which must compare the layouts first
        bucket = slot.bucket
        if bucket is None:
            return  # a sparse gradient, which is sent at the end
        schedule = exchange.schedule
        if slot.ready_in_round == schedule.round:
            exchange.refuse_change(slot)
            bucket.pending += 1
        slot.ready_in_round = schedule.round
        slot.ready_version = slot.param._version  # private in torch 2.5 to 2.15, as in ``Exchange``
        if slot.copies_early:
            slot.copy_to_bucket()
        if schedule.mark_ready(bucket) and not has_later_hook(self, slot):
            self._send_complete()

    def _send_complete(self) -> None:
        if self._turns.may_send(self._number):
            while self._exchange.schedule.next_is_complete:
                self._exchange.send_next(self._scalars)

    def _begin_pass(self) -> None:
        self.backend.check_process()  # before a gradient is copied to a bucket, which may be in shared memory
        # The last pass may have failed, or an interrupt may have stopped the exchange at the end of that pass.
        if self._ending is not None or self._exchange.is_unfinished:
            self._forget_failed_pass()
        end_pass = EndOfPass(self.end_pass)
        self._ending = weakref.ref(end_pass)
        self._seen += 1
        self._add_unfrozen()
        at_end_of_pass(end_pass)

    def end_pass(self) -> None:
        """Handle the end of the running backward pass: all its gradients are ready."""
        self._ending = None
        if self._seen >= self.passes:
            # ``reduce`` can average gradients whose hooks did not run, but raises an error while hooks are dropped:
            # restore the hooks first.
            self.hooks.restore()
            self.reduce()

    def _forget_failed_pass(self) -> None:
        """Forget the gradients that a failed backward pass has marked ready. Raise BackendError if some were sent."""
        if self._exchange.schedule.next:
            self._refused_pass = True
            self._exchange.refuse_after_failure()
            raise BackendError(
                f"an earlier backward pass failed on rank {self.backend.job_rank}, after some of its gradients had "
                "been sent: call synchronize() on the ranks where it failed, to end the exchange, and drop these gradients "
                "on every rank"
            )
        self._exchange.schedule.forget_ready()

    # -- the layout -----------------------------------------------------------------------------------------------

    def _add_unfrozen(self) -> None:
        unfrozen = self.hooks.take_unfrozen()
        if unfrozen:
            self.add(unfrozen)

    def _lay_out(self) -> None:
        """Compare parameters and options with the other ranks, agree on the sparse gradients, and make the buckets.

        Collective; blocks.
        """
        agree_on_list(self.backend, "parameters", [slot.describe() for slot in self.slots])
        refuse_other_order(self.backend, [(slot.name, slot.param) for slot in self.slots])
        agree_on_list(self.backend, "options of the gradients' exchange", self._exchange.describe(self.backend.size))
        for dims in self.backend.allgather_object(sparse_dims(self.slots), name="sparse gradients"):
            self._exchange.expect_sparse(dims)
        self._exchange.lay_out(self.backend, self.name)


def _count(what: str, value: float, *, least: int) -> int:
    """Return ``value`` as an int. Raises ValueError if it is not a whole number, or is less than ``least``."""
    try:
        is_whole = value % 1 == 0  # also true for 2.0, the quotient 4 / 2; false for NaN and infinity
    except TypeError:
        is_whole = False
    if not is_whole:
        raise ValueError(f"{what} must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{what} must be {least} or more, not {value}")
    return int(value)
