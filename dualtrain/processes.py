"""The helper processes of Python's multiprocessing, which belong to a job and get the signals that are sent to all of it.

``timeout``, systemd and batch systems send SIGTERM to every process of a job. Its ranks save and stop; the resource tracker
and the server that worker processes are forked from must outlive that, since the next batches come through them.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker, util
from types import FrameType

#: The signals that are for ranks alone: to save and stop, the first two; to save, the last one.
JOB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
RELEASE_SECONDS = 3.0
_OWN_FOLDER = "dualtrain own folder"


def start_tracker() -> None:
    """Starts the resource tracker, if it is not there yet, with the job's signals blocked."""
    # What a killed process leaves it removes: it need not warn of that. It takes the filters of the command line.
    filters, sys.warnoptions = sys.warnoptions, [*sys.warnoptions, "ignore:resource_tracker:UserWarning"]
    try:
        with _blocked():
            resource_tracker.ensure_running()
    finally:
        sys.warnoptions = filters


def start_forkserver(preload: Sequence[str]) -> None:
    """Starts the server that worker processes are forked from, if it is not there yet.

    It imports ``preload``. It and its workers have the job's signals blocked, until :func:`begin_worker`.
    """
    start_tracker()  # before the block, which its start would end
    _note_own_folder()
    with _blocked():
        forkserver.set_forkserver_preload(list(preload))
        forkserver.ensure_running()


def begin_worker() -> None:
    """Makes a worker process ignore the job's signals, and end when the process that has started it ends."""
    for number in JOB_SIGNALS:
        signal.signal(number, _ignore)
        signal.siginterrupt(number, False)  # reads of C libraries go on
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)
    threading.Thread(target=_end_with_parent, name="dualtrain-parent", daemon=True).start()


def _note_own_folder() -> None:
    """Notes which temporary folder of multiprocessing's this process made itself, if any; its workers inherit the note."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get(_OWN_FOLDER, (None, None))[0] != os.getpid():
        # A process that multiprocessing has started uses the folder of the program above it, which still needs it.
        inherited = config.get("tempdir") is not None
        config[_OWN_FOLDER] = os.getpid(), None if inherited else util.get_temp_dir()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join()
    _remove_own_folder(parent.pid)  # a killed parent leaves it behind
    os._exit(0)


def _remove_own_folder(pid: int | None) -> None:
    """Removes the folder that process ``pid``, this one or the one that has started it, made itself, if any."""
    owner, folder = multiprocessing.current_process()._config.get(_OWN_FOLDER, (None, None))  # type: ignore[attr-defined]
    if owner == pid and folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def release() -> None:
    """Removes what multiprocessing has in the file system, for a process that ends without its exit handlers."""
    # In a thread, since some of them wait for other threads or processes, which may never end.
    thread = threading.Thread(target=_run_finalizers, name="dualtrain-release", daemon=True)
    thread.start()
    thread.join(RELEASE_SECONDS)
    _remove_own_folder(os.getpid())


def _run_finalizers() -> None:
    util._run_finalizers(0)  # type: ignore[attr-defined]
    util._run_finalizers()  # type: ignore[attr-defined]


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler and not SIG_IGN, which programs inherit."""


@contextmanager
def _blocked() -> Iterator[None]:
    """Blocks the job's signals in this thread, and so in the processes that it starts."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
