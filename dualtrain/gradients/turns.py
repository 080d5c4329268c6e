"""The order in which several gradient reducers of one backend exchange their buckets.

Operations on a backend are matched by their order. But backward may reach two reducers in a different order on each rank,
or only one of them on some ranks. So if a backend has several reducers, the ranks agree at the end of a backward pass
which reducers have gradients on any rank. Then all ranks exchange the gradients of these reducers in the same order. Only
one of several reducers sends buckets during backward: the one that came first in their last exchange (initially, number 0).
If any rank has sent a bucket of this reducer, the reducer comes first again.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import reduce
from operator import and_, or_
from typing import Protocol

from dualtrain.backends import Backend
from dualtrain.backends.agreement import Call, agree
from dualtrain.errors import BackendError

_PLACES = 20  # how many reducers fit into one integer, with three bits for each
_ALL = (1 << _PLACES) - 1
_MORE = 1 << 3 * _PLACES  # a bit of the same integer: whether this rank has reducers that did not fit
_ROUND = Call("exchange of gradients")
_State = tuple[int, int, int]


class Member(Protocol):
    """The part of a reducer that this module uses."""

    @property
    def steps(self) -> int:
        """The number of steps that the reducer's optimizer has taken."""

    @property
    def is_due(self) -> bool:
        """Return whether a bucket was sent already, or the backward pass that ends now has produced gradients to send."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Only accumulate gradients inside the block."""

    def end_interrupted(self) -> None:
        """End an exchange that was interrupted after all sums had arrived."""

    def exchange(self) -> None:
        """Average the reducer's gradients. Collective; blocks."""


class Turns:
    """The reducers of ``backend`` that are not closed. An exchange by a reducer that a rank lacks is refused."""

    def __init__(self, backend: Backend) -> None:
        self._backend = weakref.ref(backend)
        self._members: dict[int, weakref.ref[Member]] = {}
        self._first = 0  # number of the reducer that sends its buckets before the other reducers

    def enter(self, member: Member) -> int:
        """Register a reducer; return its number, the lowest free one. Every rank must register in the same order."""
        number = next(each for each in itertools.count() if each not in self._members)
        self._members[number] = weakref.ref(member)
        return number

    def leave(self, number: int) -> None:
        """Remove a closed reducer. Call this once, on every rank.

        :meth:`due` removes reducers that were garbage-collected on every rank.
        """
        self._members.pop(number, None)

    def may_send(self, number: int) -> bool:
        """Return whether this reducer may send buckets during backward: it is the only one, or comes before the others."""
        return number == self._first or len(self._members) < 2

    def others(self, number: int) -> list[Member]:
        """Return all reducers except reducer ``number`` and garbage-collected ones."""
        members = [ref() for each, ref in self._members.items() if each != number]
        return [member for member in members if member is not None]

    def due(self, number: int, member: Member) -> list[Member]:
        """Return the reducers that exchange gradients now, in the same order on every rank.

        These are reducer ``number`` and the reducers with gradients to send, on any rank. Collective if there are several
        reducers.

        Args:
            number: the number of the reducer that has called this method.
            member: this reducer.

        Raises:
            BackendError: the ranks differ in their calls or in the steps taken, or a reducer that a rank uses was
                garbage-collected or closed on a different rank.
        """
        backend = self._backend()
        if backend is None or len(self._members) < 2:
            return [member]
        backend.drain()
        due, odd, absent = self._gather(backend, self._state(number))
        due_anywhere = reduce(or_, due)
        _refuse_absent(due_anywhere, absent, backend.members)
        _refuse_other_steps(due_anywhere, odd)
        for each in _numbers_in(reduce(and_, absent)):
            self.leave(each)
        numbers = sorted(_numbers_in(due_anywhere), key=lambda each: (each != self._first, each))
        self._first = numbers[0]
        members = [self._members[each]() for each in numbers]
        return [each for each in members if each is not None]

    def _gather(self, backend: Backend, state: _State) -> tuple[list[int], list[int], list[int]]:
        """Return the three bit sets of :meth:`_state` of all ranks: three lists in rank order. Collective; blocks."""
        due, odd, absent = ([0] * backend.size for _ in range(3))
        for low in itertools.count(0, _PLACES):
            mine = [bits >> low & _ALL for bits in state]
            more = _MORE * (max(self._members) >= low + _PLACES)
            sets = agree(backend, _ROUND, more | mine[2] << 2 * _PLACES | mine[1] << _PLACES | mine[0])
            for rank, packed in enumerate(sets):
                due[rank] |= (packed & _ALL) << low
                odd[rank] |= (packed >> _PLACES & _ALL) << low
                absent[rank] |= (packed >> 2 * _PLACES & _ALL) << low
            if not any(packed & _MORE for packed in sets):
                break
        return due, odd, absent

    def _state(self, number: int) -> _State:
        """Return three bit sets of reducers.

        They contain the reducers to exchange, those with an odd number of steps (which shows whether ranks are a step
        apart), and all numbers without a reducer on this rank, because it was garbage-collected, closed, or not made.
        """
        due, odd, absent = 0, 0, -1
        for each, ref in self._members.items():
            member = ref()
            if member is not None:
                due |= (each == number or member.is_due) << each
                odd |= (member.steps & 1) << each
                absent ^= 1 << each
        return due, odd, absent


def _refuse_absent(due_anywhere: int, absent: list[int], ranks: Sequence[int]) -> None:
    rank = next((rank for rank, numbers in zip(ranks, absent, strict=True) if numbers & due_anywhere), None)
    if rank is not None:
        raise BackendError(
            f"an optimizer whose gradients are to be exchanged was garbage-collected or closed on rank {rank}: keep it as "
            "long as its parameters are trained, or close() it on every rank"
        )


def _refuse_other_steps(due_anywhere: int, odd: list[int]) -> None:
    """Raise BackendError if some ranks are a step ahead: the ranks would average gradients of different steps."""
    if len({each & due_anywhere for each in odd}) > 1:
        raise BackendError(
            "the optimizers have not taken the same steps on every rank: step them in the same order on all ranks, or "
            "use one optimizer"
        )


def _numbers_in(bits: int) -> list[int]:
    """Return the numbers of the reducers in a bit set."""
    return [each for each in range(bits.bit_length()) if bits >> each & 1]


_TURNS: weakref.WeakKeyDictionary[Backend, Turns] = weakref.WeakKeyDictionary()


def turns(backend: Backend) -> Turns:
    """Return the :class:`Turns` of ``backend``."""
    return _TURNS.setdefault(backend, Turns(backend))
