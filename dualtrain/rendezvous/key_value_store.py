"""Protocol with the methods of torch.distributed's stores that ``dualtrain.rendezvous`` calls. It does not import torch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol


class KeyValueStore(Protocol):
    """A key-value store that all ranks share.

    A wait that times out raises RuntimeError. A call may raise UserError if the process that serves the store has ended or
    cannot serve another process, or if two processes have joined as the same rank or with different world sizes.
    """

    def set(self, key: str, value: str) -> Any:
        """Set ``key``."""
        ...

    def get(self, key: str) -> bytes:
        """Return the value of ``key``; block until it is set."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number ``key``, which begins at 0, and return the sum."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Return whether all ``keys`` are set. Does not block."""
        ...

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Block until all ``keys`` are set."""
        ...
