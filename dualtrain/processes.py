"""The helper processes of Python's multiprocessing, which receive the signals that are sent to a whole job.

``timeout``, systemd and batch systems send SIGTERM to every process of a job. The ranks save and stop. The resource
tracker, the fork server and its worker processes must survive the signal, since the workers still read the last batches.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, spawn, util
from pathlib import Path
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any

from dualtrain.errors import UserError

#: SIGTERM, SIGINT and SIGHUP (save and stop), and SIGUSR1 (save). Only ranks act on them; ``--nproc`` passes them on to
#: its ranks.
JOB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
RELEASE_SECONDS = 3.0
#: What the user can do if the system refuses a process or a thread.
LIMIT_CURE = "raise the limit of processes and threads (ulimit -u, or the container's limit), or start fewer ranks"
_PR_SET_PDEATHSIG = 1
#: Ids of the processes that have started a fork server. A forked process inherits this set, but must not kill the server
#: that its parent has started.
_starters: set[int] = set()
#: Multiprocessing's temporary folders, by the ids of the processes that have made them; ``None`` for processes that use
#: the folder of their parent process.
_folders: dict[int, str | None] = {}
#: Program that removes a folder when the process that holds the write end of its standard input has ended.
_REMOVAL = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"


def start_thread(target: Callable[..., None], name: str, args: tuple[Any, ...] = ()) -> threading.Thread:
    """Call ``target(*args)`` in a new daemon thread, and return the thread.

    Raises:
        UserError: the system refuses to start a thread.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise UserError(f"the thread {name!r} could not be started ({error}): {LIMIT_CURE}", transient=True) from error
    return thread


def signal_name(number: int) -> str:
    """Return a signal's name, such as "SIGKILL", or "signal 40" for a real-time signal that has no name in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_at_parents_end(number: int, parent: int) -> None:
    """Ask the kernel to send the signal ``number`` to this process when its parent ends.

    For the kernel, the parent is the thread that started this process. If the process ``parent`` has ended before the call,
    the signal is sent at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def start_tracker() -> None:
    """Start the resource tracker, if it does not run yet, with the job's signals blocked, and in a session of its own.

    mpirun and horovodrun send SIGKILL to the process groups of ranks that do not end in time. The tracker must survive it.
    """
    # The tracker removes what a killed process leaves behind, and warns about it. Disable the warnings by a filter, which
    # the tracker inherits.
    filters, sys.warnoptions = sys.warnoptions, [*sys.warnoptions, "ignore:resource_tracker:UserWarning"]
    try:
        with _blocked(), _own_session():
            resource_tracker.ensure_running()
    finally:
        sys.warnoptions = filters


def start_forkserver(preload: Sequence[str]) -> None:
    """Start the server that worker processes are forked from, if it does not run yet.

    The server imports ``preload``. It blocks the job's signals; its workers block them until :func:`begin_worker`.
    """
    # Without this call, forkserver.ensure_running() would start the tracker, and then unblock the signals blocked here.
    start_tracker()
    with _blocked():
        _start_folder_removal()
        forkserver.set_forkserver_preload(list(preload))
        forkserver.ensure_running()
    _starters.add(os.getpid())


def hide_lost_starts() -> None:
    """Make this fork server print no traceback if a rank is killed while it starts a worker.

    The worker then cannot read all the data that it needs from the rank, and exits. Call this in a module that the fork
    server preloads.
    """
    earlier = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        codes = [frame.f_code for frame, _ in traceback.walk_tb(trace)]
        # If ``spawn._main``, a private function, raises one of these errors itself, the pipe from the rank has ended too
        # early. Errors in the user's own methods of unpickling have more frames.
        cut_off = codes[-1:] == [spawn._main.__code__]
        if not (cut_off and isinstance(error, EOFError | pickle.UnpicklingError)):
            earlier(kind, error, trace)

    sys.excepthook = show


def forkserver_pid() -> int | None:
    """Return the process id of the fork server that this process has started; ``None`` if it has started none."""
    return forkserver._forkserver._forkserver_pid if os.getpid() in _starters else None  # type: ignore[attr-defined]


def kill_forkserver() -> None:
    """Kill the fork server that this process has started, if any. Calls that wait for the server then raise an error."""
    server = forkserver_pid()
    if server is not None:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def begin_worker() -> None:
    """Make this worker process ignore the job's signals, and exit when its parent exits.

    It also exits if the parent frees the worker's ``Process`` object, which closes the parent's end of their pipe.
    """
    for number in JOB_SIGNALS:
        if signal.getsignal(number) == signal.SIG_IGN:
            continue  # as under nohup: programs that the worker starts must ignore the signal too
        signal.signal(number, _ignore)
        signal.siginterrupt(number, False)  # do not interrupt reads of C libraries
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)
    threading.Thread(target=_end_with_parent, name="dualtrain-parent", daemon=True).start()


def is_stopped(pid: int) -> bool:
    """Return whether a process of this host is stopped, by SIGSTOP or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False  # it has ended


def _start_folder_removal() -> None:
    """Start a process that removes multiprocessing's temporary folder when this process has ended, even by SIGKILL.

    Make the folder if there is none. Start nothing if the folder is the parent process's, or at the second call. Like the
    tracker, the process has a session of its own.
    """
    if os.getpid() in _folders:
        return
    # A process that multiprocessing has started uses its parent's folder, so it must not remove the folder.
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    inherited = config.get("tempdir") is not None and not _made_folder()
    folder = None if inherited else util.get_temp_dir()
    if folder is not None:
        read_end, write_end = os.pipe()  # this process keeps ``write_end`` open until it ends; then the program continues
        try:
            # In isolated mode (-I), Python imports no modules of the user's folders.
            command = [spawn.get_executable(), "-I", "-S", "-c", _REMOVAL, folder]
            null = subprocess.DEVNULL
            _start_apart(command, stdin=read_end, stdout=null, stderr=null)
        except OSError:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
    _folders[os.getpid()] = folder


def _made_folder() -> bool:
    """Return whether multiprocessing has made a temporary folder in this process, for example for the user's Manager."""
    finalizers = list(util._finalizer_registry.values())  # type: ignore[attr-defined]
    return any(each._pid == os.getpid() and each._callback is util._remove_temp_dir for each in finalizers)  # type: ignore[attr-defined]


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def remove_own_folder() -> None:
    """Remove multiprocessing's temporary folder, if this process has made it. For a process that is about to exit."""
    folder = _folders.get(os.getpid())
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def release() -> None:
    """Kill the fork server, run multiprocessing's finalizers (for 3 s at most), and call :func:`remove_own_folder`.

    For a process that will not run its exit handlers.
    """
    # A server that still imports modules would fork the requested workers after this process has exited, and they would
    # print tracebacks.
    kill_forkserver()
    _starters.discard(os.getpid())
    # Run the finalizers in a thread: some wait for other threads or processes, which may never end.
    with suppress(UserError):  # no thread can be started: leave out the finalizers
        start_thread(_run_finalizers, "dualtrain-release").join(RELEASE_SECONDS)
    remove_own_folder()


def _run_finalizers() -> None:
    util._run_finalizers(0)  # type: ignore[attr-defined]
    util._run_finalizers()  # type: ignore[attr-defined]


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore a signal. Programs that the worker starts do not inherit this handler; they would inherit SIG_IGN."""


@contextmanager
def _own_session() -> Iterator[None]:
    """Start the resource tracker in a session, and so a process group, of its own."""
    # ``resource_tracker.util`` is private in Python 3.11 to 3.13: multiprocessing has no option for a process's session.
    # Replace ``util`` in this module only, since other threads may call ``util.spawnv_passfds`` at the same time.
    module: Any = resource_tracker
    module.util = SimpleNamespace(**{**vars(util), "spawnv_passfds": _spawn_in_own_session})
    try:
        yield
    finally:
        module.util = util


def _spawn_in_own_session(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Start a program as ``util.spawnv_passfds`` does, but in a new session; return its process id."""
    return _start_apart(args, executable=path, pass_fds=passfds)


def _start_apart(command: Sequence[Any], **options: Any) -> int:
    """Start a program in a new session, and never wait for it; return its process id. ``options`` are those of Popen."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    process.returncode = 0  # otherwise later calls of subprocess would wait for it in multiprocessing's place
    return process.pid


@contextmanager
def _blocked() -> Iterator[None]:
    """Block the job's signals in this thread, and so in the processes that it starts."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
