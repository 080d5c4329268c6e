"""Source of samples that worker processes read: torch's DataLoader over the batches that the trainer requests."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from dualtrain.data.sources import Batch, Source, Tensors
from dualtrain.data.transforms import Transform
from dualtrain.data.worker_waits import Waits, unsent, unstarted
from dualtrain.errors import UserError
from dualtrain.processes import begin_worker, start_forkserver

#: Sample indices and seed of a batch. The indices are a list, because a tensor sent to a worker takes a file descriptor.
Wanted = tuple[list[int], int]


class Reader(Protocol):
    """Reader of samples, used in a worker process."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitems__(self, wanted: Wanted) -> Tensors | UserError:
        """Return inputs and targets of a batch, or the error if a sample cannot be read.

        The error is returned and not raised, because DataLoader would add the worker's traceback to its message.
        """


class LoaderSource(Source):
    """A :class:`Source` of the samples that ``reader`` reads in ``workers`` processes (0: in this process).

    ``transform`` is applied to whole batches, on the device. Workers run until :meth:`close` or until this process exits.
    """

    def __init__(self, reader: Reader, workers: int, transform: Transform | None = None) -> None:
        self._reader = reader
        self.workers = workers
        self._transform = transform
        self._feed = _Feed()
        self._loader: DataLoader[Any] | None = None
        self._waits: Waits | None = None
        self._process = os.getpid()  # the process that has started the workers

    def __len__(self) -> int:
        return len(self._reader)

    @property
    def stored(self) -> bool:  # type: ignore[override]
        """True if the reader has a method ``contents``. See the base class."""
        return hasattr(self._reader, "contents")

    def contents(self, numbers: Sequence[int]) -> Iterator[Any]:
        """See the base class. The samples are read in this process; only :meth:`stream` starts workers."""
        reader = _OneThread(self._reader)
        read = getattr(self._reader, "contents", None) or (lambda number: _unwrap(reader.__getitems__(([number], 0))))
        return (read(number) for number in numbers)

    def stream(self, batches: Iterable[Batch], device: torch.device) -> Iterator[Tensors]:
        """Yield the batches, which workers prefetch. The first stream starts the workers; later streams reuse them.

        An error stops the workers, as :meth:`close` does. The next stream then starts new ones.

        Raises:
            UserError: the workers cannot be started, a worker failed, a wait was too long, or a sample cannot be read.
        """
        requests = _Requests(batches)
        self._feed.batches = requests
        try:
            if self._loader is None or self._waits is None:
                self._loader, self._process = self._make_loader(device), os.getpid()
                self._waits = Waits(self._running, self.timeout if self.workers else 0.0)
            loader, waits = self._loader, self._waits
            read = waits.bound(lambda: iter(loader))
        except UserError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise unstarted(error) from error
        # Register ``close`` after the workers start, so that it runs before torch's own exit handler, which waits for them.
        atexit.unregister(self.close)
        atexit.register(self.close)
        try:
            for (inputs, targets), batch in zip(_on_device(waits.each(read), device), requests.in_order(), strict=False):
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

    def _make_loader(self, device: torch.device) -> DataLoader[Any]:
        """Return the loader, whose first iterator starts the workers. Start the fork server for them."""
        options: dict[str, Any] = {}
        if self.workers:
            # Don't fork this process: the child would inherit its GPU context and its communicators' sockets.
            start_forkserver(["dualtrain.data.preload"])
            begin = partial(_begin, torch.get_default_dtype())
            options = {"multiprocessing_context": _Context(), "persistent_workers": True, "worker_init_fn": begin}
        return _Loader(
            self._reader if self.workers else _OneThread(self._reader),  # type: ignore[arg-type]
            batch_sampler=self._feed,  # type: ignore[arg-type]
            num_workers=self.workers,
            collate_fn=_as_read,  # type: ignore[arg-type]
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # with torch's default, each epoch would draw from the global generator
            **options,
        )


class _OneThread:
    """Reader that reads in this process with one intra-op thread, as a worker does.

    Otherwise the last bits of sums in a dataset would depend on whether there are workers.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __len__(self) -> int:
        return len(self._reader)

    def __getitems__(self, wanted: Wanted) -> Tensors | UserError:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._reader.__getitems__(wanted)
        finally:
            torch.set_num_threads(threads)


class _Loader(DataLoader[Any]):
    """A DataLoader without torch's warning about more workers than cores: the run prints its own warning, once."""

    def check_worker_number_rationality(self) -> None:
        """Do nothing."""


class _Context(ForkServerContext):
    """Multiprocessing's context for processes of the fork server, with queues of the class ``_Queue``.

    The constructor makes the first queue and event, and raises OSError if it cannot (/dev/shm may be full). If that failed
    inside the constructor of DataLoader's iterator, the unfinished iterator's ``__del__`` would print a traceback.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queues, self._events = [_Queue(ctx=self)], [super().Event()]

    def Queue(self, maxsize: int = 0) -> Queue[Any]:  # noqa: N802 - the name in multiprocessing
        return self._queues.pop() if self._queues and not maxsize else _Queue(maxsize, ctx=self)

    def Event(self) -> Event:  # noqa: N802 - the name in multiprocessing
        return self._events.pop() if self._events else super().Event()


class _Queue(Queue):  # type: ignore[type-arg] # not generic at run time
    """Queue that sends an error in place of a batch that it cannot send, for example because /dev/shm is full.

    Multiprocessing's own queue prints a traceback and sends nothing, so the rank would wait until the timeout.
    """

    def _on_queue_feeder_error(self, error: Exception, item: tuple[Any, Any]) -> None:
        # Private API of Python, the same in 3.11 to 3.14: the thread that sends the items calls this method after an error.
        self.put((item[0], unsent(error)))


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


def _begin(dtype: torch.dtype, worker: int) -> None:
    """Make a worker exit with its parent, ignore the job's signals, and use the parent's default ``dtype``.

    The trainer handles the signals, and needs batches until its step ends.
    """
    torch.set_default_dtype(dtype)
    begin_worker()


def _on_device(batches: Iterator[Tensors | UserError], device: torch.device) -> Iterator[Tensors]:
    """Copy the batches to ``device``. A GPU gets each batch while the trainer computes with the previous batch."""
    if device.type != "cuda":
        for batch in batches:
            inputs, targets = _unwrap(batch)
            yield inputs.to(device), targets.to(device)
        return
    copy_stream, following = torch.cuda.Stream(device), None
    for batch in batches:
        current, following = following, _start_copy(_unwrap(batch), copy_stream)
        if current is not None:
            yield _after_copy(*current)
    if following is not None:
        yield _after_copy(*following)


def _start_copy(batch: Tensors, copy_stream: torch.cuda.Stream) -> tuple[Tensors, torch.cuda.Event]:
    """Start copying ``batch`` to the GPU on ``copy_stream``; return the copy, and an event that marks its end."""
    with torch.cuda.stream(copy_stream):
        inputs, targets = (tensor.to(copy_stream.device, non_blocking=True) for tensor in batch)
        return (inputs, targets), copy_stream.record_event()


def _after_copy(batch: Tensors, copy_end: torch.cuda.Event) -> Tensors:
    """Return ``batch``. Make the current stream wait for the copy, and keep the memory until the stream's work is done."""
    for tensor in batch:
        current = torch.cuda.current_stream(tensor.device)
        current.wait_event(copy_end)
        tensor.record_stream(current)
    return batch


def _unwrap(batch: Tensors | UserError) -> Tensors:
    """Return ``batch``, or raise it if it is an error."""
    if isinstance(batch, UserError):
        raise batch
    return batch
