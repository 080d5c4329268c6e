"""The two errors that Horovod's users catch."""

from __future__ import annotations

from dualtrain.errors import BackendError


class HorovodInternalError(BackendError):
    """A collective operation did not happen: the ranks did not match, one failed, or Horovod was shut down.

    A RuntimeError. Under ``elastic.run`` the committed state is restored and the world is joined anew.
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818
    """The hosts of the job have changed: under ``elastic.run`` the world is joined anew, without restoring anything.

    ``skip_sync`` says that hosts were only removed, so that no newcomer needs the state.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync
