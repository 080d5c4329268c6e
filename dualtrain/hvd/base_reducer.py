"""Base class of the reducers of ``hvd.DistributedOptimizer``: Horovod's rules that do not depend on the transport.

An exchange is the communication that combines the gradients of one step over the ranks. The layout is the list of
parameters whose gradients are combined. The ranks must agree on it before an exchange.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from dualtrain.errors import BackendError
from dualtrain.gradients.hooks import ModuleAttribute, ParameterHooks, reducers_of, remove_freed
from dualtrain.gradients.parameters import check_supported
from dualtrain.gradients.refusals import Refusals
from dualtrain.gradients.slots import Slot
from dualtrain.hvd import basics, compat
from dualtrain.hvd.exceptions import HorovodInternalError
from dualtrain.hvd.process_sets import ProcessSet

_REASON_SECONDS = 0.5  # time for a failed rank's message to arrive: its connections may close first
Named = Iterable[tuple[str, torch.nn.Parameter]]


@contextmanager
def as_horovod_errors() -> Iterator[None]:
    """Raise HorovodInternalError in place of BackendError."""
    try:
        yield
    except HorovodInternalError:
        raise
    except BackendError as error:
        raise _failure(error) from error


def _failure(error: BackendError) -> HorovodInternalError:
    """Convert ``error`` to a HorovodInternalError. Wait up to 0.5 s for the world to end; if it ends, add the reason."""
    engine, deadline = basics.engine(), time.monotonic() + _REASON_SECONDS
    while engine.down is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if engine.down is None or engine.down in str(error):
        return HorovodInternalError(str(error))
    return HorovodInternalError(f"{engine.down} ({error})")


@contextmanager
def _without_gradients(slots: Sequence[Slot]) -> Iterator[None]:
    before = [(slot.param, slot.param.grad) for slot in slots]
    for p, _ in before:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in before:
            p.grad = grad


class HorovodReducer(ABC):
    """Combines the gradients of one optimizer over the ranks. ``reduce`` waits for other ranks; backward never does.

    Args:
        base_name: name of the set of parameters, the same on every rank.
        process_set: the ranks whose gradients are combined.
        passes: number of backward passes whose gradients are summed before they are combined.

    Attributes:
        channel_name: ``base_name`` and a number that no other reducer of this name has in the world; empty until
            :meth:`use_channel` is called in this world.
        name: name of the reducer's operations.
        ready: number of parameters for which all ``passes`` are done.
        dirty: whether a backward pass has run since the last :meth:`reset_passes`; false after :meth:`close`.
    """

    def __init__(self, base_name: str, process_set: ProcessSet, passes: int) -> None:
        self.base_name, self.process_set = base_name, process_set
        self.passes = self._next_passes = passes
        self.channel_name = self.name = ""
        self.hooks = ParameterHooks(keep_nodes=True)  # Horovod keeps the autograd nodes too
        self.ready = 0
        self.dirty = False
        #: Whether the current exchange was already discarded when ``dirty`` became true. This rank's gradients then belong
        #: to a later exchange.
        self._dirty_after_discard = False
        self.closed = False
        #: Whether ``discard_step`` has discarded gradients, and since then neither ``zero_grad`` nor ``reduce`` was called,
        #: nor did this rank contribute zeros after ``join``.
        self.discarded = False
        self._generation = 0
        self._late: list[tuple[str, torch.nn.Parameter]] = []  # added later; not in the layout yet
        self._first_slots = 0  # number of slots when this reducer got its channel name

    @property
    def set_id(self) -> int:
        """The id of the process set; 0 is the world. Raises ValueError while the set is not usable."""
        return self.process_set.usable_id()

    @property
    @abstractmethod
    def refusals(self) -> Refusals:
        """Checks that can refuse an exchange."""

    @abstractmethod
    def slot_ready(self, slot: Slot) -> None:
        """Handle a gradient for which all ``passes`` are done; do not block."""

    @abstractmethod
    def layout_changed(self) -> None:
        """Make the ranks agree on the parameters before the next exchange, because parameters were added."""

    @abstractmethod
    def world_changed(self) -> None:
        """Discard all state of the previous world, if any: this reducer gets a channel in a new world."""

    @property
    @abstractmethod
    def exchanging(self) -> bool:
        """Return whether this rank has begun to send gradients, and the exchange has not ended."""

    @abstractmethod
    def is_reduced(self) -> bool:
        """Return whether the gradients are the result of the last exchange."""

    @abstractmethod
    def renew(self) -> None:
        """Make the next ``reduce`` read ``param.grad`` again."""

    @abstractmethod
    def reduce_once(self) -> None:
        """Combine the gradients of the parameters in ``hooks`` over the ranks. Collective; blocks."""

    def reduce(self) -> None:
        """Combine the gradients over the ranks, unless ``is_reduced()``. Collective; blocks.

        Raises:
            HorovodInternalError: a rank failed, a rank refused the exchange, the ranks' parameters differ, a rank discarded
                a step whose gradients another rank uses, or Horovod was shut down. After a failed or refused exchange,
                all gradients are ``None`` if some of them may be sums already.
            ValueError: the process set is not in use, the gradient of an unfrozen parameter cannot be averaged, or the
                operation is not defined for a gradient's dtype (such as Min of complex numbers).
            RuntimeError: the reducer was closed, by ``close`` or by a later optimizer of some of its parameters.
        """
        if self.is_reduced():
            return
        self.check_open()
        self.enter_world()
        self.add_unfrozen()
        try:
            self._complete_discarded()
            self._refuse_without_gradients()
            if self._late:
                self._reduce_late()
            else:
                self.reduce_once()
        except Exception:
            if self.refusals.dropped:
                self.reset_passes()  # the program may run backward again
            raise

    def _complete_discarded(self) -> None:
        """Complete the exchanges whose results a rank discards. Collective; blocks.

        Raises:
            HorovodInternalError: this rank needs a result that another rank discards. The world was ended.
        """
        while self.exchange_is_discarded():
            # This rank needs the result if it began backward before a rank discarded the exchange.
            if self.exchanging or (self.dirty and not self._dirty_after_discard):
                basics.engine().require_unused(self.current)
            self.exchange_zeros()

    def _refuse_without_gradients(self) -> None:
        """After ``discard_step``, make the next exchange fail on all ranks if this rank has no gradients.

        Otherwise, a rank that has run no backward since would silently use zeros in the step. Horovod uses the gradients of
        the discarded step.
        """
        params = (*(slot.param for slot in self.hooks.slots), *(p for _, p in self._late))
        if self.discarded and all(p.grad is None for p in params):
            self.refusals.drop_gradients("by load_state_dict()")
        self.discarded = False

    def _reduce_late(self) -> None:
        """Combine the gradients in the current layout. Then add the late parameters, and combine theirs in the new layout.

        Some ranks may have begun an exchange in the current layout already. The second exchange sends zeros for the other
        parameters, because their gradients are sums already.
        """
        self.reduce_once()
        reduced = list(self.hooks.slots)
        if not self._add_late():
            return  # all late parameters are frozen
        try:
            with _without_gradients(reduced):
                self.reduce_once()
        except Exception:
            self.refusals.drop_gradients()  # some are sums already
            raise

    def _add_late(self) -> int:
        """Add the late parameters to the layout. Return how many of them are trained."""
        late, self._late = self._late, []
        count = self.hooks.add(self, late)
        if count:
            self.layout_changed()
        return count

    def reset_passes(self) -> None:
        """Count backward passes from zero again, and apply the value of :meth:`set_passes`.

        Does nothing if no backward pass has run since the last reset.
        """
        if not self.dirty:
            return
        self.dirty, self.ready = False, 0
        self._count_from_zero()

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes whose gradients are summed before they are combined; count from zero again.

        If gradients of this step may have been sent already, both apply from the next step on.
        """
        self._next_passes = passes
        if not self.ready:
            self._count_from_zero()

    def _count_from_zero(self) -> None:
        self.passes = self._next_passes
        for slot in self.hooks.slots:
            slot.passes = 0

    def adopt(self, added: list[str]) -> None:
        """Add the parameters that other ranks have added since this rank called ``join()``.

        Args:
            added: the value of :attr:`added` on the other ranks.

        Raises:
            HorovodInternalError: this rank's optimizer does not have one of these parameters. The world was ended.
            ValueError: as :meth:`enter_world`; or a parameter's gradient cannot be averaged.
        """
        self.enter_world()
        known = set(self.added)
        missing = [name for name in added if name not in known]
        if missing:
            pairs = dict((*self.hooks.frozen, *self._late))
            for name in set(missing).difference(pairs):
                why = (
                    f"join() was called before other ranks added the parameter {name!r} to an optimizer: add parameters on "
                    "every rank before any rank calls join()"
                )
                basics.engine().end_world(why)
                raise HorovodInternalError(why)
            chosen = [(name, pairs[name]) for name in missing]
            frozen = [p for _, p in chosen if not p.requires_grad]
            for waiting in (self.hooks.frozen, self._late):
                waiting[:] = [pair for pair in waiting if pair[0] not in missing]
            for p in frozen:
                p.requires_grad_()  # a parameter without requires_grad would get no slot, but the other ranks train it
            self.hooks.add(self, chosen)
            for p in frozen:
                p.requires_grad_(False)
            self.layout_changed()

    @property
    def added(self) -> list[str]:
        """Return the names of the parameters that were added to the layout after this reducer got its channel name."""
        return [slot.name for slot in self.hooks.slots[self._first_slots :]]

    # -- exchanges without a result ---------------------------------------------------------------------------------

    @property
    def current(self) -> tuple[str, int]:
        """Return the channel name and the number of the exchange that is in progress or comes next."""
        return self.channel_name, basics.reducers.done.get(self.channel_name, 0) + 1

    def exchange_is_discarded(self) -> bool:
        """Return whether a rank discards the result of the current exchange."""
        discarded = basics.reducers.discarded
        return bool(discarded) and self.current in discarded

    def end_exchange(self) -> None:
        """Count the current exchange as ended.

        Raises:
            HorovodInternalError: this rank uses the result, but another rank discards it. The world was ended.
        """
        exchange = self.current
        basics.reducers.done[self.channel_name] = exchange[1]
        if exchange in basics.reducers.discarded:
            basics.engine().require_unused(exchange)

    def exchange_zeros(self) -> None:
        """Complete the current exchange, with zeros for unsent gradients, and discard its result. Collective; blocks."""
        basics.reducers.unused.add(self.current)
        self.refusals.dropped = False  # an exchange of zeros is allowed even if the last exchange was refused
        with _without_gradients(self.hooks.slots):
            self.reduce_once()
        self.renew()

    def discard_step(self) -> None:
        """Discard the gradients of the step that backward has begun: set them to ``None``. Does not block.

        Other ranks may have sent their gradients already, so the next ``reduce`` completes the exchange first. Every other
        rank must discard this step too, or must not have begun it. A rank that has not begun it must begin its next step
        only after it has received the message that this rank discards the exchange (:meth:`Engine.discard`).
        """
        begun, in_world = self.dirty or self.exchanging, self._generation == basics.generation()
        if begun:
            self.discarded = True
            for slot in self.hooks.slots:
                slot.param.grad = None  # it may be a sum over the ranks already
        for _, p in (*self._late, *self.hooks.frozen):  # without a hook, so they do not count for ``begun``
            p.grad = None if p.requires_grad else p.grad
        if begun and in_world and basics.engine().down is None and self.process_set.process_set_id is not None:
            basics.engine().discard(*self.current, self.set_id)
        self.renew()
        self.reset_passes()

    def add(self, named_parameters: Named) -> None:
        """Combine the gradients of these parameters too, from the next ``reduce`` on. Must be called on every rank.

        Closes the reducers that this one replaces (:meth:`close_replaced`). After :meth:`close`, no gradients are combined,
        so the parameters get no hooks.

        Raises:
            ValueError: a parameter's gradient cannot be averaged; no parameter was added.
        """
        if self.closed:
            # Do not refuse a step that uses averages from before close().
            self.hooks.known.update(id(p) for _, p in named_parameters)
            return
        named = list(named_parameters)
        for name, p in named:
            if p.requires_grad:
                check_supported(name, p)
        # A group may have been removed and added again: this reducer does not replace itself.
        self.close_replaced([(name, p) for name, p in named if self not in reducers_of(p)], self.process_set)
        for _, p in named:
            # Not only in _add_late(): a freed reducer's hook would raise an error if backward runs before that call.
            remove_freed(p)
        self._late += named
        self.hooks.known.update(id(p) for _, p in named)
        self.renew()
        if not self.hooks.slots:
            self._add_late()  # no rank can have sent gradients

    def add_unfrozen(self) -> None:
        """Add parameters that were frozen and now require gradients; in compat mode, only record Horovod's defect."""
        unfrozen = self.hooks.take_unfrozen()
        if unfrozen and compat.enabled():
            compat.note(compat.UNREDUCED)
        elif unfrozen:
            self.add(unfrozen)

    def fill_frozen(self) -> None:
        """In compat mode, reproduce a defect of Horovod: parameters frozen after the wrapping get gradients of zeros."""
        if not compat.enabled():
            return
        for slot in self.hooks.slots:
            if not slot.param.requires_grad and slot.param.grad is None:
                slot.param.grad = torch.zeros_like(slot.param)
                compat.note(compat.FROZEN)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse exchanges if ``optimizer`` contains parameters that require gradients but were not added to this reducer.

        Copies that the optimizer updates instead of the model's parameters (apex's float32 copies) are allowed, as on
        Horovod.
        """
        self.refusals.optimizer, self.refusals.allows_copies = optimizer, True

    def close(self) -> None:
        """Remove the hooks: gradients of later backward passes are not combined. A second call does nothing."""
        self.closed, self.dirty = True, False
        self.hooks.remove()

    def check_open(self) -> None:
        """Raise RuntimeError if the reducer was closed, by ``close`` or by a later optimizer of some of its parameters."""
        if self.closed:
            raise RuntimeError(
                "this optimizer was closed, or replaced by a new optimizer of some of its parameters: use a new optimizer"
            )

    @staticmethod
    def close_replaced(named: Named, process_set: ProcessSet) -> None:
        """Close the earlier optimizers' reducers that a new reducer of ``named`` replaces.

        A reducer is replaced if it has the same process set, contains a trained parameter of ``named``, and also has a
        parameter with the name of a trained parameter of ``named``.

        Horovod fails in this case, because both optimizers send gradients under the same name. The earlier optimizer often
        exists only because garbage collection has not freed it yet: Lightning, for example, wraps the optimizer in each
        ``fit``. A frozen parameter is ignored here. When it is unfrozen, :meth:`add` calls this method again.
        """
        trained = [(name, p) for name, p in named if p.requires_grad]
        names = {name for name, _ in trained}
        for old in {reducer for _, p in trained for reducer in reducers_of(p) if isinstance(reducer, HorovodReducer)}:
            if old.process_set == process_set and not names.isdisjoint(slot.name for slot in old.hooks.slots):
                old.close()

    def begin_world(self) -> None:
        """Add late and unfrozen parameters to the layout, because no rank has sent gradients in the new world yet.

        Does nothing after :meth:`close`.
        """
        if not self.closed:
            self.add_unfrozen()
            self._add_late()

    def enter_world(self) -> None:
        """Get a channel name in this world, and discard the state of the previous one, unless this was done before.

        Raises:
            ValueError: the process set was not added in this world, or was removed.
            HorovodInternalError: this process is not in a world.
        """
        self.process_set.usable_id()
        if self._generation != basics.generation():
            self.use_channel(basics.reducers.claim(self.base_name))

    def use_channel(self, channel_name: str) -> None:
        """Use this channel in the current world."""
        self.world_changed()
        self._generation = basics.generation()
        self._first_slots = len(self.hooks.slots)
        self.channel_name, self.name = channel_name, f"gradients.{channel_name}"

    # -- during backward --------------------------------------------------------------------------------------------

    def parameter_replaced(self, attribute: ModuleAttribute, name: str) -> None:
        """Record that parameter ``name``, or a module that has it, was replaced in ``attribute``.

        Exchanges are refused while the replacement contains parameters that require gradients and have no reducer. (A
        module is ignored until one of these parameters has a gradient.)
        """
        self.refusals.record_replacement(attribute, name)

    def gradient_accumulated(self, slot: Slot) -> None:  # noqa: B027 -- no subclass overrides it
        """Do nothing: as on Horovod, hooks of the program that step before :meth:`gradient_ready` are not detected."""

    def gradient_ready(self, slot: Slot) -> None:
        """Count one more backward pass for a gradient. After the last pass, call :meth:`slot_ready`.

        If a rank discards the exchange, the gradient is only counted.

        Raises:
            AssertionError: there were too many passes, as on Horovod.
            ValueError: as :meth:`reduce`.
            HorovodInternalError: this process is not in a world or was forked from a rank, or gradients cannot be sent,
                because the world has ended, for example.
        """
        self.enter_world()
        basics.engine().check_process()  # before the gradient is copied to a bucket, which may be in shared memory
        self.renew()
        if not self.dirty:
            self.dirty, self._dirty_after_discard = True, self.exchange_is_discarded()
        slot.passes += 1
        if slot.passes > self.passes:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally (since gradients may have been sent, "
                "a new value applies from the next step on)."
            )
        if slot.passes == self.passes:
            self.ready += 1
            if not self.exchange_is_discarded():
                self.slot_ready(slot)
