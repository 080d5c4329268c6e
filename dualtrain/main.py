"""The command line: ``python -m dualtrain.main``, alone or under a launcher."""

from __future__ import annotations

from dualtrain.training.signals import (
    end_on_early_interrupt,
    ignore_late_requests,
    install,
    interrupt,
    interrupted,
    note_early_requests,
)

if __name__ == "__main__":
    # Install the handlers before the other imports, which take seconds: without a handler, a signal ends the process.
    note_early_requests()
    end_on_early_interrupt()

import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from dualtrain.config import Config, RunSection, parse
from dualtrain.console import (
    leave,
    loading,
    logging_to_stderr,
    open_closed_streams,
    print_error,
    record_for_torchrun,
    refuse_on_all,
    refuse_removed_folder,
    show,
)
from dualtrain.errors import BackendError, DivergedError, NotSavedError, RanksDifferError, StoppedError, UserError, is_final
from dualtrain.launchers import NOT_SAVED, TRY_AGAIN, World, detect_world, torchrun_is_parent
from dualtrain.processes import remove_own_folder, signal_at_parents_end

if TYPE_CHECKING:
    from dualtrain.backends import Backend
    from dualtrain.errors import PeerFailure

_INTERRUPTED = "interrupted"  # the reason that a rank reports when Ctrl-C ends it
_CTRL_C_SECONDS = 0.5  # after a Ctrl-C, this rank's own SIGINT may arrive this much later than another rank's report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one process of a training job, and return its exit status. With ``--nproc``, start the job's ranks instead.

    The status is 0 after success, 2 after an error that the user can fix, 128 + N after signal N, and 1 after any other
    error. In a rank that ``--nproc`` has started, it may be ``TRY_AGAIN`` instead of 2, and ``NOT_SAVED`` instead of 1.
    """
    world = World()
    try:
        world = detect_world()
        config = parse(arguments)
        refuse_removed_folder()
        if config.run.nproc is not None and world.launcher != "spawn":
            with logging_to_stderr():
                return _spawn(list(sys.argv[1:] if arguments is None else arguments), config.run, world)
    except UserError as error:
        record_for_torchrun(str(error))
        return refuse_on_all(error, world)
    with logging_to_stderr():
        return _run(config, world)


def _spawn(arguments: list[str], run: RunSection, world: World) -> int:
    if world.launcher != "none":
        raise UserError(
            f"--nproc starts ranks itself, and {world.launcher} has started this process already ({world.because()}): "
            "leave --nproc out, or start without a launcher; if an earlier job has left these variables, unset them"
        )
    from dualtrain.spawn import spawn

    assert run.nproc is not None
    return spawn(main, arguments, run.nproc, run.max_restarts)


def _run(config: Config, world: World) -> int:
    # When a peer has exited, torch's C++ code logs stack traces; we print one line instead.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    parent = os.getppid()
    if __name__ == "__main__" and torchrun_is_parent():
        signal_at_parents_end(signal.SIGTERM, parent)  # if the agent is killed: save, and end
    from dualtrain.heap import keep_freed_memory, use_huge_pages

    use_huge_pages()  # before connect() creates tensors; in GPU runs too, since the device is not known yet
    try:
        backend = _connect(config, world)
    except (UserError, BackendError) as error:
        record_for_torchrun(str(error))
        print_error(error, world.rank, world.size)
        return 2 if isinstance(error, UserError) else 1
    if backend.device.type == "cpu":
        keep_freed_memory()
    return _train(config, backend)


def _connect(config: Config, world: World) -> Backend:
    """Import torch and the training loop, and join the ranks; meanwhile, rank 0 prints what it waits for."""
    from dualtrain.training.progress import Waiting

    with Waiting("loading torch", config.output.log_seconds, shown=world.rank == 0) as wait:
        # Change GC settings only if this module is the program.
        with loading() if __name__ == "__main__" else nullcontext():
            import dualtrain.training.loop  # noqa: F401 (this import takes seconds)
            from dualtrain.backends import connect

        wait.phase("connecting the ranks")
        return connect(
            config.run.backend,
            world=world,
            device=config.run.device,
            timeout=config.run.timeout,
            groups=False,
            transport=config.run.transport,
        )


def _train(config: Config, backend: Backend) -> int:
    """Train with handlers for signals and for failures of other ranks, and return the exit status."""
    from dualtrain.training.loop import train

    reported = threading.Event()
    interrupted.clear()
    on_signal = partial(_leave_on_signal, reported)
    earlier = install({signal.SIGTERM: on_signal, signal.SIGHUP: on_signal, signal.SIGINT: interrupt})
    try:
        if backend.watch is not None:
            backend.watch.add_callback(lambda failure: _report_peer_failure(failure, backend, reported))
        train(config, backend)
    except BaseException as error:
        if isinstance(error, StoppedError):
            return _give_up(error, backend)
        if interrupted.is_set():  # an import that was interrupted may have raised a different error
            return _give_up(KeyboardInterrupt(), backend)
        end_on_early_interrupt()
        return _give_up(error, backend)
    finally:
        interrupted.clear()
        for number, handler in earlier.items():
            signal.signal(number, handler)
    backend.close()
    return 0


def _give_up(error: BaseException, backend: Backend) -> int:
    """Print what ended the run, report it to the other ranks, and return the exit status.

    Waits for the other ranks only if all ranks have the same error. After a failure of another rank, waits up to 1 s for
    the thread that prints this failure.
    """
    status = _status_of(error, backend.world)
    # After a final error, the printed line says "do not restart": always under torchrun, which starts the same command
    # again after any error; under other launchers, only if the run's folder refuses later starts.
    final = is_final(error) and (
        backend.world.launcher == "torchrun" or isinstance(error, DivergedError) or getattr(error, "forbids_restart", False)
    )
    reason, line = _reason(error)
    peer_failed = isinstance(error, BackendError) and backend.watch is not None and backend.watch.peer_failed
    if not peer_failed and not isinstance(error, StoppedError | KeyboardInterrupt):
        record_for_torchrun(line if isinstance(error, BackendError | DivergedError | NotSavedError) else reason)
    if isinstance(error, DivergedError | StoppedError | NotSavedError) or (isinstance(error, UserError) and error.shared):
        if backend.rank == 0 or isinstance(error, RanksDifferError):
            print_error(error, backend.rank, backend.size, final=final)
        _wait_for_all(backend)
    elif peer_failed and backend.watch is not None:
        backend.watch.wait_for_report(2 * _CTRL_C_SECONDS)  # _report_peer_failure prints the failure, in the watch's thread
    elif isinstance(error, BackendError):
        print_error(error, backend.rank, backend.size)
    elif isinstance(error, UserError):
        print_error(error, backend.rank, backend.size, final=final)
    elif isinstance(error, KeyboardInterrupt):
        if backend.rank == 0:  # one line for the job; if only another rank was interrupted, rank 0 reports that
            print_error(line, backend.rank, backend.size)
    else:
        show(reason, sys.stderr)
        print_error(line, backend.rank, backend.size)
    backend.abort(f"{line}\n{error.trace}" if isinstance(error, UserError) else reason)
    return status


def _status_of(error: BaseException, world: World) -> int:
    if isinstance(error, UserError):
        return TRY_AGAIN if world.launcher == "spawn" and not is_final(error) else 2
    if isinstance(error, NotSavedError):
        return NOT_SAVED if world.launcher == "spawn" else 1
    if isinstance(error, StoppedError):
        return 128 + error.number
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _reason(error: BaseException) -> tuple[str, str]:
    """Return two texts with the reason for the run's end: one with a traceback, if any, and a single line."""
    from dualtrain.user_code import in_one_line, user_traceback

    if isinstance(error, UserError):
        return f"{error.trace}\n{error}".strip(), str(error)
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED, _INTERRUPTED
    whole = "".join(traceback.format_exception(error)).strip()
    if isinstance(error, BackendError | DivergedError | NotSavedError | StoppedError):
        return whole, str(error)
    return user_traceback(error) or whole, in_one_line(error)


def _wait_for_all(backend: Backend) -> None:
    """Wait until rank 0 has printed the error that all ranks share, and close the backend.

    A launcher ends all ranks as soon as one rank exits.
    """
    try:
        backend.barrier()
        backend.close()
    except BackendError:
        pass  # a rank has exited already: don't wait for it


def _report_peer_failure(failure: PeerFailure, backend: Backend, reported: threading.Event) -> None:
    """Print that a rank has failed. Don't leave this to the training loop: a launcher may end this process earlier.

    Print nothing if the failed rank reports a Ctrl-C, and the Ctrl-C reaches this rank too.
    """
    if failure.reason.endswith(f": {_INTERRUPTED}") and interrupted.wait(_CTRL_C_SECONDS):
        reported.set()
        return  # rank 0 prints one line for the job
    first, _, rest = failure.describe().partition("\n")
    print_error(f"stopping, since {first}", backend.rank, backend.size)
    if rest and backend.rank == (0 if failure.rank else 1):  # one rank prints the traceback: rank 0, if it has not failed
        show(rest, sys.stderr)
    reported.set()


def _leave_on_signal(reported: threading.Event, number: int, frame: FrameType | None) -> None:
    """Exit on SIGTERM or SIGHUP before or after the training loop, which has its own handler.

    Launchers send SIGTERM when a rank has failed, so first wait up to 0.9 s until the failure is printed.

    After a StoppedError, ignore the signal. The same signal often comes twice: from the launcher, and from a sender that
    signals the whole job. The second signal must not suppress the message about the checkpoint, or make other ranks report
    this rank as failed.
    """
    if not isinstance(sys.exc_info()[1], StoppedError):  # after a StoppedError, the run is saved, and is about to end
        # Do not leave this to the program that processes.py has started: a container may end with this process.
        remove_own_folder()
        reported.wait(0.9)  # mpirun sends SIGKILL after one second
        os._exit(128 + number)


if __name__ == "__main__":
    open_closed_streams()
    status = main()
    ignore_late_requests()
    leave(status)
