"""Samples that are read by worker processes: torch's DataLoader, asked for the batches that the trainer wants."""

from __future__ import annotations

import atexit
import multiprocessing
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from dualtrain.data.sources import Batch, Source, Tensors
from dualtrain.data.transforms import Transform
from dualtrain.errors import UserError
from dualtrain.processes import begin_worker, start_forkserver

Wanted = tuple[list[int], int]  # a batch in plain numbers, since a tensor would cost a file descriptor on its way


class Reader(Protocol):
    """Reads samples, in a worker process."""

    def __len__(self) -> int:
        """How many samples there are."""

    def __getitems__(self, wanted: Wanted) -> Tensors | UserError:
        """Inputs and targets of a batch, or what is wrong with it: raised here, it would grow a traceback on its way."""


class LoaderSource(Source):
    """A :class:`Source` of what ``reader`` reads in ``workers`` processes (0: in this one).

    ``transform`` is for whole batches, on the device. Workers stay until :meth:`close`, or this process's exit.
    """

    def __init__(self, reader: Reader, workers: int, transform: Transform | None = None) -> None:
        self._reader = reader
        self._workers = workers
        self._transform = transform
        self._feed = _Feed()
        self._loader: DataLoader[Any] | None = None

    def __len__(self) -> int:
        return len(self._reader)

    def stream(self, batches: Iterable[Batch], device: torch.device) -> Iterator[Tensors]:
        """The batches, read and sent ahead. The first stream starts the workers, who stay for the next ones."""
        if self._loader is None:
            self._loader = self._start(device)
        asked = _Asked(batches)
        self._feed.batches = asked
        read = iter(self._loader)
        # After the workers' start, to run before torch's own ending of them at exit, which waits until they are killed.
        atexit.unregister(self.close)
        atexit.register(self.close)
        try:
            for (inputs, targets), batch in zip(_sent(read, device), asked.given(), strict=False):
                if self._transform is not None:
                    inputs = self._transform(inputs, batch.numbers.to(device), batch.seed)
                yield inputs, targets
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Ends the workers; a stream that is still open cannot go on."""
        atexit.unregister(self.close)
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            # Not left to its end of life: an error's traceback may keep it until the workers' queues are gone.
            iterator._shutdown_workers()
            for worker in getattr(iterator, "_workers", ()):
                if worker.is_alive():
                    worker.kill()  # one that hangs in a read; it ignores SIGTERM
        self._loader = None

    def _start(self, device: torch.device) -> DataLoader[Any]:
        options: dict[str, Any] = {}
        if self._workers:
            # A fork of this process would share its GPU context, its threads and its communicators' sockets.
            context = multiprocessing.get_context("forkserver")
            start_forkserver(["dualtrain.data.preload"])
            options = {"multiprocessing_context": context, "persistent_workers": True, "worker_init_fn": _begin}
        return DataLoader(
            self._reader,  # type: ignore[arg-type]
            batch_sampler=self._feed,  # type: ignore[arg-type]
            num_workers=self._workers,
            collate_fn=_as_read,  # type: ignore[arg-type]
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # else each epoch would draw from the model's random numbers
            **options,
        )


class _Feed:
    """The batches that the DataLoader asks for, replaced for each stream."""

    batches: Iterable[Wanted] = ()

    def __iter__(self) -> Iterator[Wanted]:
        return iter(self.batches)


class _Asked:
    """Batches on their way to the workers, remembered until their samples come back."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = batches
        self._waiting: list[Batch] = []

    def __iter__(self) -> Iterator[Wanted]:
        for batch in self._batches:
            self._waiting.append(batch)
            yield batch.numbers.tolist(), batch.seed

    def given(self) -> Iterator[Batch]:
        while True:
            yield self._waiting.pop(0)


def _as_read(batch: Tensors | UserError) -> Tensors | UserError:
    return batch


def _begin(worker: int) -> None:
    """Signals to the whole job are for the trainer, which needs batches until its next step's end."""
    begin_worker()


def _sent(batches: Iterator[Tensors | UserError], device: torch.device) -> Iterator[Tensors]:
    """The batches on ``device``; to a GPU, one is on its way while the one before is computed with."""
    if device.type != "cuda":
        for batch in batches:
            inputs, targets = _good(batch)
            yield inputs.to(device), targets.to(device)
        return
    side, ahead = torch.cuda.Stream(device), None
    for batch in batches:
        behind, ahead = ahead, _send(_good(batch), side)
        if behind is not None:
            yield _arrived(*behind)
    if ahead is not None:
        yield _arrived(*ahead)


def _send(batch: Tensors, side: torch.cuda.Stream) -> tuple[Tensors, torch.cuda.Event]:
    """``batch`` on its way to the GPU, and the event of its arrival."""
    with torch.cuda.stream(side):
        inputs, targets = (tensor.to(side.device, non_blocking=True) for tensor in batch)
        return (inputs, targets), side.record_event()


def _arrived(batch: Tensors, sent: torch.cuda.Event) -> Tensors:
    """``batch``, which later work may use: it waits for the copy, and the memory stays until that work is done."""
    for tensor in batch:
        current = torch.cuda.current_stream(tensor.device)
        current.wait_event(sent)
        tensor.record_stream(current)
    return batch


def _good(batch: Tensors | UserError) -> Tensors:
    if isinstance(batch, UserError):
        raise batch
    return batch
