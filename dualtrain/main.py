"""The command line: ``python -m dualtrain.main``, alone or under a launcher."""

from __future__ import annotations

from dualtrain.training.signals import ignore_late_requests, note_early_requests

if __name__ == "__main__":
    note_early_requests()  # before the other imports, during which a SIGUSR1 would end this process

import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from dualtrain.config import Config, parse
from dualtrain.console import leave, loading, refuse_alike, say, show
from dualtrain.errors import BackendError, DivergedError, NotSavedError, RanksDifferError, StoppedError, UserError
from dualtrain.launchers import World, detect_world

if TYPE_CHECKING:
    from dualtrain.backends import Backend
    from dualtrain.errors import PeerFailure


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one process of a training job; gives its exit status: 0 done, 2 the user can mend it, 1 anything else."""
    world = World()
    try:
        world = detect_world()
        config = parse(arguments)
        if config.nproc is not None and world.launcher != "spawn":
            return _spawn(list(sys.argv[1:] if arguments is None else arguments), config.nproc, world)
    except UserError as error:
        return refuse_alike(error, world)
    return _run(config, world)


def _spawn(arguments: list[str], nproc: int, world: World) -> int:
    if world.launcher != "none":
        raise UserError(
            f"--nproc starts ranks itself, and {world.launcher} has started this process already: leave --nproc out, or "
            "start without a launcher"
        )
    from dualtrain.spawn import spawn

    return spawn(arguments, nproc)


def _run(config: Config, world: World) -> int:
    # What torch's C++ side warns of when a peer is gone, stack traces included, is said in one line here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Another program's process keeps its own ways.
    with loading() if __name__ == "__main__" else nullcontext():
        from dualtrain.backends import connect
        from dualtrain.heap import keep_freed_memory
        from dualtrain.training.loop import train

    try:
        backend = connect(
            config.backend,
            world=world,
            device=config.device,
            timeout=config.timeout,
            groups=False,
            transport=config.transport,
        )
    except (UserError, BackendError) as error:
        say(error, world.rank, world.size)
        return 2 if isinstance(error, UserError) else 1
    if backend.device.type == "cpu":
        keep_freed_memory()
    said = threading.Event()
    if backend.watch is not None:
        backend.watch.on_peer_failure = lambda failure: _report_peer_failure(failure, backend, said)
    earlier = signal.signal(signal.SIGTERM, lambda *_: _leave_on_sigterm(said))
    try:
        train(config, backend)
    except BaseException as error:
        return _give_up(error, backend)
    finally:
        signal.signal(signal.SIGTERM, earlier)
    backend.close()
    return 0


def _give_up(error: BaseException, backend: Backend) -> int:
    """Says what ended the run, tells the other ranks, and leaves without waiting for them."""
    status = 2 if isinstance(error, UserError) else 130 if isinstance(error, KeyboardInterrupt) else 1
    if isinstance(error, StoppedError):
        status = 128 + error.number
    if isinstance(error, DivergedError | StoppedError | NotSavedError) or (isinstance(error, UserError) and error.shared):
        if backend.rank == 0 or isinstance(error, RanksDifferError):
            say(error, backend.rank, backend.size)
        _wait_for_all(backend)
    elif isinstance(error, BackendError):
        if backend.watch is None or not backend.watch.peer_failed:  # otherwise it is reported already
            say(error, backend.rank, backend.size)
    elif isinstance(error, UserError | KeyboardInterrupt):
        say(error if str(error) else "interrupted", backend.rank, backend.size)
    else:
        show(traceback.format_exc().rstrip(), sys.stderr)
        say(f"{type(error).__name__}: {error}", backend.rank, backend.size)
    backend.abort("".join(traceback.format_exception(error)).strip())
    return status


def _wait_for_all(backend: Backend) -> None:
    """All ranks have the same reason to leave: none goes before rank 0 has said it."""
    try:
        backend.barrier()
        backend.close()
    except BackendError:
        pass  # a rank that is gone already need not be waited for


def _report_peer_failure(failure: PeerFailure, backend: Backend, said: threading.Event) -> None:
    """Print at once that a rank has failed: a launcher may end this process before the loop notices."""
    first, _, rest = failure.describe().partition("\n")
    say(f"stopping, since {first}", backend.rank, backend.size)
    speaker = 0 if failure.rank else 1
    if rest and backend.rank == speaker:
        show(rest, sys.stderr)
    said.set()


def _leave_on_sigterm(said: threading.Event) -> None:
    """Launchers end all processes the moment that one dies: the news of which one must still be said."""
    said.wait(0.9)  # mpirun sends SIGKILL after one second
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    status = main()
    ignore_late_requests()
    leave(status)
