"""Reduction of an ``hvd.DistributedOptimizer``'s gradients by one grouped allreduce in place of buckets."""

from __future__ import annotations

from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch

from dualtrain.gradients.hooks import has_later_hook
from dualtrain.gradients.refusals import Refusals
from dualtrain.gradients.slots import Slot
from dualtrain.hvd import basics
from dualtrain.hvd.base_reducer import HorovodReducer, Named
from dualtrain.hvd.calls import ALLREDUCE
from dualtrain.hvd.compression import AnyCompressor
from dualtrain.hvd.exceptions import HorovodInternalError
from dualtrain.hvd.forms import new_handle, reduction_options, start, synchronize
from dualtrain.hvd.process_sets import ProcessSet


class CallReducer(HorovodReducer):
    """Combines all gradients by one grouped allreduce.

    Used for the user's own compressors, for Min, Max and Product, for Adasum on a process set of one rank, and, with
    DUALTRAIN_HVD_COMPAT=1, for float16 sums, which are then rounded as on Horovod.

    Args:
        named: the parameters, the same on every rank of the set, in any order.
        base_name: name of the set of parameters, the same on every rank.
        process_set: the ranks.
        passes: number of backward passes whose gradients are summed before the call.
        op: the reduction.
        compression: compresses gradients before the call, and decompresses the results.
        predivide: a factor f: gradients are multiplied by 1/f before the reduction, and results by f after it.
    """

    def __init__(
        self,
        named: Named,
        base_name: str,
        process_set: ProcessSet,
        passes: int,
        op: int,
        compression: AnyCompressor,
        predivide: float,
    ) -> None:
        super().__init__(base_name, process_set, passes)
        self._op, self._compression = op, compression
        self._predivide = predivide
        self._call: tuple[int, list[Any]] | None = None  # the handle, and the compressor's contexts
        self._refusals = Refusals(self.hooks)
        self._checked = False  # whether self._refusals was set up for the current parameters
        self._reduced = False
        self.add(named)
        self.number = basics.reducers.callers.register(self)

    @property
    def refusals(self) -> Refusals:
        """Checks that can refuse a call."""
        return self._refusals

    @property
    def exchanging(self) -> bool:
        """Return whether this rank has started the call, and has not used its result yet."""
        return self._call is not None

    def is_reduced(self) -> bool:
        """Return whether the gradients are the result of the last call."""
        return self._reduced

    def renew(self) -> None:
        """Make the next ``reduce`` read ``param.grad`` again."""
        self._reduced = False

    def layout_changed(self) -> None:
        """Make the next call check the current parameters."""
        self._checked = False

    def world_changed(self) -> None:
        """Discard the previous world's results, and make the next call check the current parameters."""
        self._checked = self._reduced = False
        self._call = None

    def reduce_once(self) -> None:
        """Compress, reduce and decompress every gradient; missing gradients count as zeros. Collective; blocks."""
        self._adopt_added()
        handle, contexts = self._submit()
        try:
            results = synchronize(handle) or ()
        except Exception:  # not KeyboardInterrupt: after Ctrl-C, the next ``reduce`` waits for the same call
            self._call = None
            raise
        self._call = None
        self.end_exchange()
        for slot, result, ctx in zip(self._slots(), results, contexts, strict=True):
            # As in buckets, a frozen parameter without a gradient contributes zeros and gets no gradient.
            if slot.param.requires_grad or slot.param.grad is not None:
                slot.param.grad = self._compression.decompress(result, ctx)
        self._reduced = True

    def abandon_call(self) -> None:
        """Discard the result of a call that this rank has made before it called ``join``. Called in the engine's thread."""
        if self._call is not None:
            basics.reducers.unused.add(self.current)
            handle, _ = self._call
            self._call = None
            with suppress(HorovodInternalError):  # raised if the ranks' calls disagreed
                synchronize(handle)  # does not wait: the other ranks have ended a later call, so this one has ended too
                self.end_exchange()
            self.reset_passes()

    def slot_ready(self, slot: Slot) -> None:
        """Start the call if all gradients are ready, unless a later hook may still change the gradient of ``slot``."""
        self._adopt_added()
        if self.ready == len(self.hooks.slots) and not has_later_hook(self, slot):
            self._submit()

    def _slots(self) -> list[Slot]:
        """Return the slots sorted by name, because ranks may list the parameters in different orders."""
        return sorted(self.hooks.slots, key=attrgetter("name"))

    def _adopt_added(self) -> None:
        """Add the parameters that other ranks added after this rank had called ``join``."""
        self.adopt(basics.reducers.added.pop(self.channel_name, []))

    def _submit(self) -> tuple[int, list[Any]]:
        """Start the call, or a call that fails on all ranks, unless this was done before; do not block."""
        if self._call is None:
            self.hooks.restore()
            self.fill_frozen()
            self._call = self._refuse() or self._start_call()
        return self._call

    def _refuse(self) -> tuple[int, list[Any]] | None:
        """If this rank cannot combine gradients, start a call that fails on all ranks with the reason; else return None."""
        if not self._checked:
            self._refusals.record_parameters([(slot.name, slot.param) for slot in self.hooks.slots])
            self._checked = True
        reason = self._refusals.reason(())
        if reason is None:
            return None
        refused = basics.engine().submit("grouped_allreduce", self.name, self.set_id, op=self._op, refused=reason)
        return new_handle(refused, tuple), []

    def _start_call(self) -> tuple[int, list[Any]]:
        params = [slot.param for slot in self._slots()]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in params]
        # Frozen parameters get no gradient on this rank, so the other ranks must not train them.
        frozen = [slot.name for slot in self.hooks.slots if not slot.param.requires_grad and slot.param.grad is None]
        packed = [self._compression.compress(grad) for grad in grads]
        tensors = [tensor.contiguous() for tensor, _ in packed]
        handle = -1  # an unknown handle, so ``synchronize`` returns None
        if tensors:
            options = reduction_options(self.name, self._op, 1 / self._predivide, self._predivide, self.process_set)
            optimizer_options = {"frozen": frozen, "position": basics.reducers.callers.position(self), "added": self.added}
            handle = start(ALLREDUCE, tensors, {**options, **optimizer_options}, grouped=True, in_place=True)
        return handle, [ctx for _, ctx in packed]
