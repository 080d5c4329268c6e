"""Source of samples that worker processes read: torch's DataLoader over the batches that the trainer requests."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader

from dualtrain.data.sources import Batch, Source, Tensors
from dualtrain.data.transforms import Transform
from dualtrain.errors import UserError
from dualtrain.processes import begin_worker, forkserver_pid, is_stopped, kill_forkserver, start_forkserver

T = TypeVar("T")
#: Sample indices and seed of a batch. The indices are a list, because a tensor sent to a worker takes a file descriptor.
Wanted = tuple[list[int], int]
#: The limit on the start of the workers is at least this: the fork server first imports torch, which a busy host delays.
START_SECONDS = 60.0
_LESS = (
    "raise the limits of open files and processes (ulimit -n, -u), or give fewer --workers (0: the rank reads the samples)"
)
#: Messages of torch's and multiprocessing's exceptions when a batch cannot be sent for lack of file descriptors.
_TOO_MANY_FILES = re.compile("too many open files|items of ancdata", re.I)


class Reader(Protocol):
    """Reader of samples, used in a worker process."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitems__(self, wanted: Wanted) -> Tensors | UserError:
        """Return inputs and targets of a batch, or the error.

        The error is returned and not raised, because DataLoader would add the worker's traceback to its message.
        """


class LoaderSource(Source):
    """A :class:`Source` of the samples that ``reader`` reads in ``workers`` processes (0: in this process).

    ``transform`` is applied to whole batches, on the device. Workers run until :meth:`close` or until this process exits.
    """

    def __init__(self, reader: Reader, workers: int, transform: Transform | None = None) -> None:
        self._reader = reader
        self._workers = workers
        self._transform = transform
        self._feed = _Feed()
        self._loader: DataLoader[Any] | None = None
        self._waits: _Waits | None = None
        self._process = os.getpid()  # the process that has started the workers

    def __len__(self) -> int:
        return len(self._reader)

    @property
    def stored(self) -> bool:  # type: ignore[override]
        """True if the reader has a method ``contents``. See the base class."""
        return hasattr(self._reader, "contents")

    def contents(self, numbers: Sequence[int]) -> Iterator[Any]:
        """See the base class. The samples are read in this process; only :meth:`stream` starts workers."""
        read = getattr(self._reader, "contents", None) or (lambda number: _unwrap(self._reader.__getitems__(([number], 0))))
        return (read(number) for number in numbers)

    def stream(self, batches: Iterable[Batch], device: torch.device) -> Iterator[Tensors]:
        """Yield the batches, prefetched. The first stream starts the workers; later streams reuse them."""
        requests = _Requests(batches)
        self._feed.batches = requests
        try:
            if self._loader is None or self._waits is None:
                self._loader, self._process = self._start(device), os.getpid()
                self._waits = _Waits(self._running, self.timeout if self._workers else 0.0)
            loader, waits = self._loader, self._waits
            read = waits.bound(lambda: iter(loader))
        except UserError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise UserError(
                f"the data workers cannot be started ({error}): set TMPDIR to a shorter path, or {_LESS}", transient=True
            ) from error
        # Register ``close`` after the workers start, so that it runs before torch's own exit handler, which waits for them.
        atexit.unregister(self.close)
        atexit.register(self.close)
        try:
            for (inputs, targets), batch in zip(_sent(waits.each(read), device), requests.in_order(), strict=False):
                if self._transform is not None:
                    inputs = self._transform(inputs, batch.numbers.to(device), batch.seed)
                yield inputs, targets
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Stop the workers. An open stream cannot continue."""
        atexit.unregister(self.close)
        if self._process != os.getpid():
            return  # a forked child must not stop its parent's workers
        if self._waits is not None:
            self._waits.end()
        # Private API of torch, the same in torch 2.5 to 2.15: no public function stops the workers.
        # tests/data/test_private_torch.py fails when this API is gone.
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            workers = self._running()
            # Don't wait for garbage collection: an error's traceback may keep the iterator alive for too long.
            iterator._shutdown_workers()
            for worker in workers:
                if worker.is_alive():
                    worker.kill()  # the worker hangs in a read, and ignores SIGTERM
        self._loader = self._waits = None

    def _running(self) -> list[BaseProcess]:
        """Return the worker processes, by torch's private API (see :meth:`close`)."""
        return list(getattr(getattr(self._loader, "_iterator", None), "_workers", ()))

    def _start(self, device: torch.device) -> DataLoader[Any]:
        options: dict[str, Any] = {}
        if self._workers:
            # Don't fork this process: the child would inherit its GPU context and its communicators' sockets.
            context = multiprocessing.get_context("forkserver")
            start_forkserver(["dualtrain.data.preload"])
            options = {"multiprocessing_context": context, "persistent_workers": True, "worker_init_fn": _begin}
        return _Loader(
            self._reader,  # type: ignore[arg-type]
            batch_sampler=self._feed,  # type: ignore[arg-type]
            num_workers=self._workers,
            collate_fn=_as_read,  # type: ignore[arg-type]
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # with torch's default, each epoch would draw from the global generator
            **options,
        )


class _Waits:
    """Limit on each wait for data workers: after ``limit`` seconds, a thread kills the workers, and torch raises an error.

    If no worker has started yet, the thread kills the fork server, which has to start them.

    DataLoader's own ``timeout`` is not used, because it would delay the detection of a worker that something else has
    killed. There is no thread if ``limit`` is 0.
    """

    def __init__(self, workers: Callable[[], Sequence[BaseProcess]], limit: float) -> None:
        self._workers, self._limit = workers, limit
        self._since: float | None = None  # when the current wait began
        self._late = ""
        self._ended = threading.Event()
        if limit:
            threading.Thread(target=self._watch, name="dualtrain-data", daemon=True).start()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()

    def bound(self, wait: Callable[[], T]) -> T:
        """Return ``wait()``. Raises UserError if a worker failed, the wait was too long, or too many files are open."""
        self._since = time.monotonic()
        try:
            return wait()
        except Exception as error:  # its type varies: torch detects that a worker has ended, or the connection breaks
            problem = self._late or self._ended_worker(1.0 if isinstance(error, OSError | EOFError) else 0.0)
            if not problem and _TOO_MANY_FILES.search(str(error)):
                problem = f"the data workers cannot send their batches (too many open files): {_LESS}"
            if problem:
                raise UserError(problem, transient=True) from error
            raise
        finally:
            self._since = None

    def each(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches, and limit the wait for each."""
        none: Any = object()
        while (batch := self.bound(lambda: next(batches, none))) is not none:
            yield batch

    def _watch(self) -> None:
        tick, waited, before = min(1.0, self._limit), 0.0, None
        while not self._ended.wait(tick):
            # Add up ticks, not clock time: time in which this process is stopped (Ctrl-Z, a suspended job) must not count.
            since = self._since
            began = since is not None and since != before
            waited = 0.0 if since is None else min(tick, time.monotonic() - since) if began else waited + tick
            before = since
            workers = self._workers()
            limit = self._limit if workers else max(self._limit, START_SECONDS)
            if since is None or waited < limit:
                continue
            self._late = self._describe(limit)
            for worker in workers:
                worker.kill()
            if workers:
                return
            kill_forkserver()

    def _ended_worker(self, seconds: float) -> str:
        """Describe a worker that has ended, or ends within ``seconds``; return "" if none does."""
        workers = self._workers()
        if seconds:
            # The connection breaks before the worker's exit status is available: wait for the exit.
            multiprocessing.connection.wait([worker.sentinel for worker in workers], seconds)
        for number, worker in enumerate(workers):
            if worker.exitcode is not None:  # 0 too: the dataset's code may call sys.exit()
                by, cause = _end_in_words(worker.exitcode)
                return f"data worker {number} (process {worker.pid}) has ended with {by}: {cause}"
        return ""

    def _describe(self, seconds: float) -> str:
        """Describe a wait that was too long."""
        if not self._workers():
            server = forkserver_pid() or 0
            what = f"waited {seconds:g} s for the start of the data workers by the fork server (process {server})"
            if is_stopped(server):
                return f"{what}, which is stopped: find out what has stopped it (SIGSTOP, a debugger), then start again"
            return (
                f"{what}: its imports hang or are slow; repair the storage of the Python packages, give a longer "
                "--timeout, or --workers 0"
            )
        named = {worker: f"data worker {number} (process {worker.pid})" for number, worker in enumerate(self._workers())}
        stopped = [name for worker, name in named.items() if is_stopped(worker.pid or 0)]
        what = f"waited {seconds:g} s for a batch from {', '.join(stopped or named.values())}"
        if stopped:
            return f"{what}, which is stopped: find out what has stopped it (SIGSTOP, a debugger), then start again"
        return f"{what}: the storage hangs or is slow; repair it, or give a longer --timeout"


def _end_in_words(status: int) -> tuple[str, str]:
    """Return the signal or exit status that ended a worker, and its usual cause with the cure."""
    by = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    if -status == signal.SIGKILL:
        return by, "too little memory, in most cases; give fewer --workers, or --workers 0"
    if -status == signal.SIGBUS:
        return by, "too little shared memory, in most cases; enlarge /dev/shm, or give --workers 0"
    return by, "the dataset's code, or a library, ended it; to find the cause, read the samples in the rank (--workers 0)"


class _Loader(DataLoader[Any]):
    """A DataLoader without torch's warning about more workers than cores: the run prints its own warning, once."""

    def check_worker_number_rationality(self) -> None:
        """Do nothing."""


class _Feed:
    """The DataLoader's batch sampler. Each stream assigns new ``batches``."""

    batches: Iterable[Wanted] = ()

    def __iter__(self) -> Iterator[Wanted]:
        return iter(self.batches)


class _Requests:
    """Batches that were requested from the workers, kept until their samples arrive."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = batches
        self._waiting: list[Batch] = []

    def __iter__(self) -> Iterator[Wanted]:
        for batch in self._batches:
            self._waiting.append(batch)
            yield batch.numbers.tolist(), batch.seed

    def in_order(self) -> Iterator[Batch]:
        while True:
            yield self._waiting.pop(0)


def _as_read(batch: Tensors | UserError) -> Tensors | UserError:
    return batch


def _begin(worker: int) -> None:
    """Ignore the job's signals in a worker: the trainer handles them, and needs batches until its step ends."""
    begin_worker()


def _sent(batches: Iterator[Tensors | UserError], device: torch.device) -> Iterator[Tensors]:
    """Copy the batches to ``device``. A GPU gets each batch while the trainer computes with the previous batch."""
    if device.type != "cuda":
        for batch in batches:
            inputs, targets = _unwrap(batch)
            yield inputs.to(device), targets.to(device)
        return
    side, ahead = torch.cuda.Stream(device), None
    for batch in batches:
        current, ahead = ahead, _send(_unwrap(batch), side)
        if current is not None:
            yield _arrived(*current)
    if ahead is not None:
        yield _arrived(*ahead)


def _send(batch: Tensors, side: torch.cuda.Stream) -> tuple[Tensors, torch.cuda.Event]:
    """Start copying ``batch`` to the GPU on the stream ``side``; return the copy, and an event that marks its end."""
    with torch.cuda.stream(side):
        inputs, targets = (tensor.to(side.device, non_blocking=True) for tensor in batch)
        return (inputs, targets), side.record_event()


def _arrived(batch: Tensors, sent: torch.cuda.Event) -> Tensors:
    """Make the current stream wait for the copy, and keep the batch's memory until the current stream's work is done."""
    for tensor in batch:
        current = torch.cuda.current_stream(tensor.device)
        current.wait_event(sent)
        tensor.record_stream(current)
    return batch


def _unwrap(batch: Tensors | UserError) -> Tensors:
    """Return ``batch``, or raise it if it is an error."""
    if isinstance(batch, UserError):
        raise batch
    return batch
