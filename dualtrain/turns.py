"""The order in which several gradient reducers of one backend exchange their buckets.

Operations on a backend are matched by their order, but backward reaches two reducers in one order on this rank and in
another on that one, or only one of the two. So where a backend has several reducers, the ranks agree at the end of a
backward pass on the reducers that have gradients on any rank, and all ranks exchange these, in one order.
"""

from __future__ import annotations

import itertools
import weakref
from functools import reduce
from operator import and_, or_
from typing import Protocol

from dualtrain.backends import Backend
from dualtrain.backends.agreement import Call, agree
from dualtrain.errors import BackendError

_PLACES = 31  # reducers are known by their number modulo this: two sets of them fit into one integer
_ROUND = Call("exchange of gradients")


class Member(Protocol):
    """A reducer."""

    @property
    def is_due(self) -> bool:
        """Whether it has sent a bucket already, or the backward pass that ends has given it gradients to send."""

    def exchange(self) -> None:
        """Averages its gradients. Collective; blocks."""


class Turns:
    """The reducers of ``backend`` that were made and not closed, on every rank the same."""

    def __init__(self, backend: Backend) -> None:
        self._backend = weakref.ref(backend)
        self._members: dict[int, weakref.ref[Member]] = {}
        self._numbers = itertools.count()
        self._first = 0  # whose buckets go before the others'

    def enter(self, member: Member) -> int:
        """Registers a reducer, in the same order on every rank; gives its number."""
        number = next(self._numbers)
        self._members[number] = weakref.ref(member)
        return number

    def leave(self, number: int) -> None:
        """Removes a reducer that was closed, on every rank; may be repeated. One that was collected leaves by itself."""
        self._members.pop(number, None)

    def may_send(self, number: int) -> bool:
        """Whether this reducer may send buckets while backward goes on: it is the only one, or goes before the others."""
        return number == self._first or len(self._members) < 2

    def due(self, number: int, member: Member) -> list[Member]:
        """The reducers that exchange their gradients now that reducer ``number`` is to. Collective where there are several.

        Raises:
            BackendError: the ranks are in different calls, or this one has dropped a reducer that another one uses.
        """
        backend = self._backend()
        if backend is None or len(self._members) < 2:
            return [member]
        places = {each % _PLACES: each for each in sorted(self._members)}  # of two, the later one
        if places.get(number % _PLACES) != number:
            raise BackendError(f"more than {_PLACES} optimizers share a backend: close() those that are not used any more")
        backend.settle()
        mine = gone = 0
        for place, each in places.items():
            other = self._members[each]()
            gone |= (other is None) << place
            mine |= (other is not None and (each == number or other.is_due)) << place
        sets = agree(backend, _ROUND, gone << _PLACES | mine)
        wanted, dropped = reduce(or_, sets), reduce(and_, sets) >> _PLACES
        numbers = [each for place, each in places.items() if wanted >> place & 1]
        numbers.sort(key=lambda each: (each != self._first, each))
        self._first = numbers[0]
        members = [self._members[each]() for each in numbers]
        for place, each in places.items():
            if dropped >> place & 1:
                self.leave(each)
        if None in members:
            raise BackendError(
                f"another rank exchanges the gradients of an optimizer that rank {backend.rank} has dropped: keep it as "
                "long as its parameters are trained, or close() it on every rank"
            )
        return [each for each in members if each is not None]


_TURNS: weakref.WeakKeyDictionary[Backend, Turns] = weakref.WeakKeyDictionary()


def turns(backend: Backend) -> Turns:
    """Those of ``backend``."""
    return _TURNS.setdefault(backend, Turns(backend))
