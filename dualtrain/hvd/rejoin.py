"""Know which ranks of a world that has ended will join the next one, and whether one of their processes has ended.

The connections of the world are closed by then. So the ranks use the world's part of the job's store, which is left.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from dualtrain.backends import Backend
from dualtrain.errors import UserError, first_line
from dualtrain.hvd.exceptions import HorovodInternalError
from dualtrain.rendezvous.key_value_store import KeyValueStore

_POLL_SECONDS = 0.05
#: The cure if a rank cannot join again.
NEEDS_ALL = "elastic.run needs all ranks: restart the job (torchrun --max-restarts)"


class Rejoin:
    """One rank of the world of ``backend``, after it has left this world."""

    def __init__(self, backend: Backend) -> None:
        self._store = backend.store
        self._rank, self._size, self._timeout = backend.rank, backend.size, backend.timeout
        self._process = os.getpid()

    def announce(self) -> None:
        """Report to the other ranks that this rank joins the next world."""
        self._report(f"joins/{self._rank}")

    def announce_end(self) -> None:
        """Report to the other ranks that this process ends. Only the first such report of all ranks is kept."""
        self._report("ended")

    def _report(self, key: str) -> None:
        """Set ``key``, unless it is set already. Does nothing in a forked child."""
        if self._store is not None and self._process == os.getpid():
            with suppress(RuntimeError, UserError):  # the process that serves the store has ended
                if not self._store.check([key]):
                    self._store.set(key, str(self._rank))

    def await_others(self) -> None:
        """Block until all ranks have announced that they join the next world.

        Raises:
            HorovodInternalError: a rank's process, or the process that serves the store, has ended; or a rank did not
                continue in time.
        """
        if self._store is None:
            return
        try:
            obstacle = self._obstacle(self._store)
        except (RuntimeError, UserError) as error:
            obstacle = first_line(error)
        if obstacle is not None:
            raise HorovodInternalError(f"{obstacle}\n{NEEDS_ALL}")

    def _obstacle(self, store: KeyValueStore) -> str | None:
        """Wait for all ranks, and return why a rank does not join; ``None`` if all join."""
        deadline = time.monotonic() + self._timeout
        keys = [f"joins/{rank}" for rank in range(self._size)]
        while time.monotonic() < deadline:
            if store.check(keys):
                return None
            if store.check(["ended"]):
                return f"rank {store.get('ended').decode()} has ended, so it cannot join again"
            time.sleep(_POLL_SECONDS)
        late = (rank for rank, key in enumerate(keys) if not store.check([key]))
        return next((f"rank {rank} did not join again within {self._timeout:g} s" for rank in late), None)
