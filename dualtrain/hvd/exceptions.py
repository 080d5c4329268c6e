"""Horovod's exceptions."""

from __future__ import annotations

from dualtrain.errors import BackendError


class HorovodInternalError(BackendError):
    """A collective operation failed: the ranks' calls did not match, a rank failed, or Horovod was shut down.

    It is a RuntimeError. ``elastic.run`` catches it, restores the committed state and joins the world again.
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818
    """The hosts of the job have changed. ``elastic.run`` catches this and joins the world again, without a restore.

    ``skip_sync`` is True if hosts were only removed: then no new rank needs the state.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync
