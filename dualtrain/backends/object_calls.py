"""Collective calls that send Python objects (``objects.py``): broadcast_object, allgather_object."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from dualtrain.backends import objects
from dualtrain.backends.agreement import Call, agree, exchange_text
from dualtrain.backends.base import Broadcast, Gather
from dualtrain.backends.movement import Movement
from dualtrain.differences import ranks_in_words
from dualtrain.errors import BackendError

_REASON_BYTES = 1024  # the reason why an object cannot be sent is cut to this length before it is sent to other ranks


class ObjectCalls(Movement):
    """The calls that send objects."""

    def broadcast_object(self, obj: Any = None, root: int = 0, name: str | None = None) -> Any:
        """Copy rank ``root``'s ``obj`` (values of the classes that ``objects.py`` lists, never code) to every rank. Blocks.

        Return the copy, whose tensors are on the CPU; on the root, return ``obj`` itself.

        Raises:
            ValueError: ``root`` is not a rank of this backend.
            TypeError: ``root`` is not an integer; or, on the root, ``obj`` holds an object of a class that is not in
                that list. (In the second case, the other ranks raise BackendError.)
            BackendError: as :meth:`allreduce`.
        """
        return self._now("broadcast_object", name, partial(self._broadcast_object, obj, root, name))

    def allgather_object(self, obj: Any, name: str | None = None) -> list[Any]:
        """Gather every rank's ``obj`` (as in :meth:`broadcast_object`) in rank order, on every rank. Blocks.

        Return copies of all objects, this rank's own included; their tensors are on the CPU.

        Raises:
            TypeError: on a rank whose ``obj`` holds an object of a class that cannot be sent; the other ranks raise
                BackendError.
            BackendError: as :meth:`allreduce`.
        """
        return self._now("allgather_object", name, partial(self._allgather_object, obj, name))

    # -- implementation -------------------------------------------------------------------------------------------

    def _broadcast_object(self, obj: Any, root: int, name: str | None) -> Any:
        root = self._checked_root(root)
        data, problem = _encoded(obj) if self.rank == root else (None, None)
        length = -1 if problem else 0 if data is None else len(data)
        broadcast = Broadcast(root, data)  # ``agree`` may send short data; it then sets ``result``
        length = agree(self, Call("broadcast_object", name, root=root), length, broadcast)[root]
        self._refuse_if_unsent({root: length}, problem)
        if (buffer := broadcast.result) is None:
            buffer = self.send_data(partial(self._broadcast_bytes, data, length, root, name or "broadcast_object"))
        return obj if data is not None else objects.decode(buffer)

    def _broadcast_bytes(self, data: torch.Tensor | None, length: int, root: int, name: str) -> torch.Tensor:
        buffer = torch.empty(length, dtype=torch.uint8, device="cpu") if data is None else data
        self.start_broadcast(buffer, root, name).wait()
        return buffer

    def _allgather_object(self, obj: Any, name: str | None) -> list[Any]:
        data, problem = _encoded(obj)
        gather = None if data is None else Gather(data, unit=1)
        lengths = agree(self, Call("allgather_object", name), -1 if data is None else len(data), gather)
        self._refuse_if_unsent(dict(enumerate(lengths)), problem)
        assert data is not None
        if gather is not None and gather.result is not None:
            return [objects.decode(part) for part in gather.result.split(lengths)]
        return [objects.decode(part) for part in self.gather(data, lengths, name or "allgather_object")]

    def _refuse_if_unsent(self, lengths: dict[int, int], problem: TypeError | None) -> None:
        """Raise on every rank, with the reason, if a rank's object cannot be sent (its length is then negative).

        Collective in this case; blocks.
        """
        refused = [rank for rank, length in lengths.items() if length < 0]
        if not refused:
            return
        reasons = exchange_text(self.compare_numbers, "" if problem is None else str(problem), _REASON_BYTES)
        if problem is not None:
            raise problem
        ranks = ranks_in_words(self.members[rank] for rank in refused)
        raise BackendError(f"{ranks} could not send an object: {reasons[refused[0]]}")


def _encoded(obj: Any) -> tuple[torch.Tensor | None, TypeError | None]:
    try:
        return objects.encode(obj), None
    except TypeError as problem:
        return None, problem
