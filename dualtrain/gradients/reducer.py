"""The heart: gradients are summed over the ranks while backward still runs.

Autograd finishes a parameter's gradient → its hook ticks it off in its bucket → the bucket is full and next in line:
one ``start_sum``, while backward goes on → at the end of backward: wait; it was scaled by 1/size. From then on
``param.grad`` is the average on every rank, so that clipping, unscaling and looking at it need no further call.

Every rank sends the same buckets in the same order, whatever order its own backward has: the k-th is sent when it is
full and the k-1 before it were sent, those that never fill at the end.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch.utils.hooks import RemovableHandle

from dualtrain.backends import Backend
from dualtrain.backends.agreement import agree_on_list
from dualtrain.errors import BackendError
from dualtrain.gradients.buckets import AVERAGE, Bucket, Slot, Transfer, after, lay_out
from dualtrain.gradients.parameters import check_supported, make_hook
from dualtrain.gradients.passes import EndOfPass, at_end_of_pass
from dualtrain.gradients.refusals import Refusals
from dualtrain.gradients.turns import Turns, turns

Unused = Literal["zero", "none"]

_NUMBERS: weakref.WeakKeyDictionary[Backend, Iterator[int]] = weakref.WeakKeyDictionary()


class GradientReducer:
    """Averages the gradients of some parameters over the ranks of a backend, in backward.

    Args:
        named_parameters: (name, parameter) pairs, the same on every rank. Frozen ones may be among them, and are
            reduced from the step on in which they are thawed.
        backend: the ranks to average over.
        unused: what becomes of a parameter that no rank used in a step: a gradient of zeros (``"zero"``, Horovod's
            rule: weight decay and momentum still apply), or none at all (``"none"``, DDP's). Used on some ranks only,
            it gets the average either way, the others counting as zero.
        passes: backward passes that are summed locally before the ranks exchange anything.
        carry: how many numbers of the caller's own travel along, summed over ranks (see :attr:`cargo`).
        transfer: how gradients travel: the factors around the sum (the average by default), their dtype, the buckets.

    The first reduction is collective in two more ways: the ranks compare their layouts (a difference raises
    BackendError, naming the parameter), and they agree on which parameters have sparse gradients; those travel as
    their indices and values. ``param.grad`` is a view into a buffer that the next backward overwrites; assign to it or
    to its ``.data`` as you like. Keep the reducer as long as the model trains: the hooks on its parameters do not.

    Raises:
        ValueError: an option out of its bounds, or a parameter whose gradient cannot be averaged.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        backend: Backend,
        *,
        unused: Unused = "zero",
        passes: int = 1,
        carry: int = 0,
        transfer: Transfer = AVERAGE,
    ) -> None:
        if unused not in ("zero", "none"):
            raise ValueError(f'unused={unused!r} is not known: choose "zero" or "none"')
        if transfer.dtype is not None and transfer.dtype not in backend.narrow:
            raise ValueError(f"the {backend.name} backend does not carry {transfer.dtype}: compress to float16")
        if passes < 1:
            raise ValueError(f"backward passes per step must be 1 or more, not {passes}")
        self.backend = backend
        # Two reducers may have their first bucket under way at once, and Horovod tells them apart by name.
        self.name = f"gradients.{next(_NUMBERS.setdefault(backend, itertools.count()))}"
        self._turns = self._enter(backend)
        self.unused: Unused = unused
        self.passes = passes
        self.transfer = transfer
        #: What this rank sends along with the next reduction; after it the sum over ranks. float64, (carry,), on the
        #: CPU, but summed in the precision of the gradients.
        self.cargo = torch.zeros(carry, dtype=torch.float64, device="cpu")
        #: Hooks run in one thread for each device, but buckets are packed and sent one after another.
        self.lock: threading.RLock | None = None
        self.slots: list[Slot] = []
        self._refusals = Refusals()
        self._closed = False
        self._frozen: list[tuple[str, torch.nn.Parameter]] = []
        self._hooks: list[RemovableHandle] = []
        self._buckets: list[Bucket] = []
        self._carried = self.cargo  # the place of the cargo behind the last bucket, once there is one
        self._used = self.cargo[:0]  # behind it and the flag, with unused="none": how many ranks used each parameter
        self._sparse: dict[int, int] = {}  # slot number → number of sparse dimensions
        self._sparse_again: dict[int, int] = {}  # the same, of those that travel as dense ones
        self._laid_out = False
        self._next = 0  # the first bucket that was not sent yet
        self._seen = 0  # backward passes since the last reduction
        #: What runs when the pass that goes on has ended; dead where that pass failed: autograd has dropped it then.
        self._ending: weakref.ref[Callable[[], None]] | None = None
        self._round = 1  # of the exchanges, and of their buckets: what a slot was ticked off in
        self._reduced = False
        self._handed_out: list[tuple[torch.Tensor, int]] = []  # buffers that were, and their versions then
        self._paused = False
        self.add(named_parameters)

    def add(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Reduces these parameters too, from the next backward on. Every rank adds the same."""
        pairs = list(named_parameters)
        for name, p in pairs:
            if p.requires_grad:
                check_supported(name, p)
        self._refusals.known.update(id(p) for _, p in pairs)
        for name, p in pairs:
            if not p.requires_grad:
                self._frozen.append((name, p))
                continue
            self.slots.append(Slot(name, p))
            if p.device != self.slots[0].param.device:
                self.lock = self.lock or threading.RLock()
            self._hooks.append(p.register_post_accumulate_grad_hook(make_hook(self, len(self.slots) - 1, name)))
            self._laid_out = False

    def _enter(self, backend: Backend) -> tuple[Turns, int] | None:
        """The order among the reducers of ``backend``, and this one's number there."""
        order = turns(backend)
        return order, order.enter(self)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to go on once ``optimizer`` has parameters that were not added here."""
        self._refusals.optimizer = optimizer

    def close(self) -> None:
        """Remove the hooks: gradients of later backward passes stay this rank's own. May be called again. On every rank."""
        self._closed = True
        if self._turns is not None:
            self._turns[0].leave(self._turns[1])
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the next one outside (or ``reduce``) sends the sum."""
        paused, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = paused

    def reduce(self) -> None:
        """Makes every ``param.grad`` the average over ranks, unless it is already. Collective; blocks.

        Backward calls it at its end. Called once more, by ``step``, it also covers a rank that had no backward at all
        (it counts as zeros).

        Raises:
            BackendError: a rank was lost, did not come within the backend's timeout, or has other parameters.
            RuntimeError: the reducer was closed.
        """
        if self.is_reduced():
            self._refusals.check_groups(self.backend)
            return
        if self._closed:
            raise RuntimeError("the reducer was closed, and averages gradients no more: make the optimizer anew")
        due = [self] if self._turns is None else self._turns[0].due(self._turns[1], self)
        for reducer in due:
            reducer.exchange()

    @property
    def steps(self) -> int:
        """The number of steps that the optimizer which uses the gradients has taken."""
        return self._refusals.steps

    @property
    def is_due(self) -> bool:
        """Whether a bucket was sent already, or the backward pass that ends has given gradients to send."""
        ended = self._ending is not None and self._ending() is not None and self._seen >= self.passes
        return ended or self._next > 0

    def exchange(self) -> None:
        """Averages the gradients over the ranks. Collective; blocks."""
        self._prepare()
        while self._next < len(self._buckets):
            self._send_next()
        for bucket in self._buckets:
            bucket.finish()
        if self._refusals.flagged(self.backend, self._buckets, len(self.cargo) > 0):
            self._start_over(reduced=False)
            self._refusals.refuse(self.backend, self._buckets)
        self._hand_out()
        self._reduce_sparse()
        self._start_over(reduced=True)

    def is_reduced(self) -> bool:
        """Whether the gradients are the average of the last exchange; no more once the user has dropped or zeroed them."""
        if not self._reduced or not self._handed_out:
            return self._reduced
        if all(slot.param.grad is None for slot in self.slots):
            self._reduced = False
        elif any(buffer.is_cpu and buffer._version != version for buffer, version in self._handed_out):
            # Clipped in place, or zeroed. A GPU's values are not looked at: the host would wait for it.
            self._reduced = any(_has_values(slot.param.grad) for slot in self.slots)
        return self._reduced

    def _start_over(self, *, reduced: bool) -> None:
        self._next, self._seen, self._ending, self._reduced = 0, 0, None, reduced
        self._round += 1

    def _prepare(self) -> None:
        """Before the rest is sent: buckets for all parameters that there are now."""
        self._look_for_thawed()
        if not self._laid_out:
            self._lay_out()

    def renew(self, *, stepped: bool = False) -> None:
        """The gradients were used, by a step of the optimizer or otherwise: ``reduce`` starts from ``param.grad`` next."""
        self._reduced = False
        self._refusals.steps += stepped

    def forget(self, backend: Backend) -> None:
        """Drops an exchange that failed, and goes on with another backend: layouts are compared anew."""
        self.backend = backend
        self._buckets, self._laid_out = [], False
        self._start_over(reduced=False)
        for slot in self.slots:
            slot.bucket = None

    # -- during backward ------------------------------------------------------------------------------------------

    def parameter_replaced(self, place: tuple[int, str], number: int | None) -> None:
        """A module has a new parameter in ``place``, in that of slot ``number``; refused until ``None`` takes it back."""
        self._refusals.replace(place, None if number is None else self.slots[number].name)

    def gradient_is_there(self, slot: Slot) -> None:
        """Autograd has finished the gradient of this slot's parameter. All that is done for each of them in a step."""
        self._reduced = False
        if self._paused:
            return
        if self._ending is None or self._ending() is None:
            self._begin_pass()
        if self._seen < self.passes or not self._laid_out:
            return  # summed locally, or the first reduction: nothing is sent before the layouts were compared
        bucket = slot.bucket
        if bucket is None:
            return  # sparse: it travels at the end
        if slot.ticked == self._round:
            self._arrived_twice(slot)
        slot.ticked = self._round
        self._tick_off(slot, bucket)

    def _tick_off(self, slot: Slot, bucket: Bucket) -> None:
        if slot.large:
            slot.move_in()
        bucket.pending -= 1
        if not bucket.pending:
            self._send_full()

    def _send_full(self) -> None:
        if self._turns is not None and not self._turns[0].may_send(self._turns[1]):
            return
        while self._next < len(self._buckets) and self._buckets[self._next].pending == 0:
            self._send_next()

    def _begin_pass(self) -> None:
        if self._ending is not None:
            self._forget_failed_pass()

        end_pass = EndOfPass(self.end_pass)
        self._ending = weakref.ref(end_pass)
        self._seen += 1
        self._look_for_thawed()
        at_end_of_pass(end_pass)

    def end_pass(self) -> None:
        """The pass that goes on has ended: all its gradients are there."""
        self._ending = None
        if self._seen >= self.passes:
            self.reduce()

    def _forget_failed_pass(self) -> None:
        if self._next:
            raise BackendError(
                f"an earlier backward pass failed on rank {self.backend.rank}, after some of its gradients had been sent: "
                "call synchronize() on the ranks where it failed, to end the exchange, and drop these gradients on all"
            )
        for bucket in self._buckets:
            bucket.pending = len(bucket.slots)
        self._round += 1

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.fill()
        if self._next == len(self._buckets):
            self._load(bucket)
        self.backend.settle()
        bucket.start(self.backend)

    def _arrived_twice(self, slot: Slot) -> None:
        if slot.bucket is not None and slot.bucket.work is not None:
            raise BackendError(
                f"the gradient of {slot.name!r} changed after it was sent, in one backward pass: this is what reentrant "
                "checkpointing does to a parameter used twice; pass use_reentrant=False to torch.utils.checkpoint"
            )
        if slot.bucket is not None:
            slot.bucket.pending += 1

    # -- the caller's numbers, and who used what ------------------------------------------------------------------

    def _load(self, bucket: Bucket) -> None:
        """Fills the numbers behind the last bucket: the caller's, the flag, then 1 for each parameter used here."""
        if len(self._carried):
            self._carried.copy_(self.cargo)
        self._refusals.load(self._buckets)
        if self.unused == "none":
            used = [float(slot.param.grad is not None) for slot in self.slots]
            self._used.copy_(torch.tensor(used))

    def _hand_out(self) -> None:
        if len(self._carried):
            self.cargo.copy_(self._carried)
        for bucket in self._buckets:
            bucket.hand_out()
        if self.unused == "none" and self._buckets:
            used = self._used.tolist()
            for slot, ranks in zip(self.slots, used, strict=True):
                if slot.bucket is not None and not ranks:
                    slot.param.grad = None
        for number, dims in self._sparse_again.items():
            slot = self.slots[number]
            if slot.param.grad is not None:
                slot.param.grad = slot.view.to_sparse(dims)
        any_grad = any(slot.param.grad is not None for slot in self.slots)
        self._handed_out = [(bucket.values, bucket.values._version) for bucket in self._buckets] if any_grad else []

    # -- the layout -----------------------------------------------------------------------------------------------

    def _look_for_thawed(self) -> None:
        thawed = [pair for pair in self._frozen if pair[1].requires_grad]
        if thawed:
            self._frozen = [pair for pair in self._frozen if not pair[1].requires_grad]
            self.add(thawed)

    def _lay_out(self) -> None:
        """Compares parameters with the other ranks, agrees on the sparse ones, and makes the buckets."""
        agree_on_list(self.backend, "parameters", [slot.describe() for slot in self.slots])
        sparse = {
            number: slot.param.grad.sparse_dim()
            for number, slot in enumerate(self.slots)
            if slot.param.grad is not None and slot.param.grad.is_sparse
        }
        for found in self.backend.allgather_object(sparse, name="sparse gradients"):
            if self.transfer.sparse_as_dense:
                self._sparse_again |= found
            else:
                self._sparse |= found
        self._make_buckets()

    def _make_buckets(self) -> None:
        dense = [slot for number, slot in enumerate(self.slots) if number not in self._sparse]
        for slot in self.slots:
            slot.bucket = None
        carry = self.cargo.numel()
        extra = carry + len(self.slots) * (self.unused == "none")
        # With the flag that says that a rank cannot go on, unless there are no parameters and nothing travels at all.
        self._buckets = lay_out(dense, extra + bool(self.slots or extra), self.backend, self.name, self.transfer)
        self._carried = self.cargo
        if self._buckets:
            self._carried = self._buckets[-1].extra[:carry]
        if len({slot.param.device for slot in self.slots}) > 1:
            self.lock = self.lock or threading.RLock()
        extras = self._buckets[-1].extra if self._buckets else torch.zeros(carry + 1)
        flag, self._used = extras[carry : carry + 1], extras[carry + 1 :]
        self._refusals.lay_out([(slot.name, slot.param) for slot in self.slots], flag)
        self._handed_out = []
        self._next, self._laid_out = 0, True

    @torch.no_grad()
    def _reduce_sparse(self) -> None:
        for number, dims in sorted(self._sparse.items()):
            slot = self.slots[number]
            p = slot.param
            if p.grad is None:
                grad = _sparse(torch.empty(dims, 0, dtype=torch.int64), p.new_empty(0, *p.shape[dims:]), p)
            else:
                grad = (p.grad if p.grad.is_sparse else p.grad.to_sparse(dims)).coalesce()
            indices = self.backend.allgather(grad.indices().t(), name=f"{slot.name}.indices")
            values = self.backend.allgather(grad.values(), name=f"{slot.name}.values")
            if not len(indices) and self.unused == "none":
                p.grad = None
                continue
            p.grad = _sparse(indices.t(), values, p)
            p.grad.values().mul_(self.transfer.before * after(self.transfer, self.backend.size))


def _has_values(grad: torch.Tensor | None) -> bool:
    if grad is None:
        return False
    return bool(grad._nnz()) if grad.is_sparse else bool(grad.any())


def _sparse(indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    # Left to its default, the check of the indices makes torch warn that it is off.
    return torch.sparse_coo_tensor(indices, values, like.shape, device=like.device, check_invariants=False).coalesce()
