"""A user's own source of samples: its errors keep their traceback, and its batches are checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from dualtrain.data.sources import Batch, Source, Tensors, contents_of, wrong_targets
from dualtrain.errors import UserError
from dualtrain.user_code import user_code


class OwnSource(Source):
    """Wrapper of a user's own source: a :class:`Source`, or an object that has at least ``stream`` and a length.

    Args:
        source: the user's source.
        split: "training" or "validation", for messages.
        classes: the number of classes; targets must be below it.
    """

    def __init__(self, source: Any, split: str, classes: int) -> None:
        self._source, self._what, self._classes = source, f"the source of the {split} data", classes

    def __len__(self) -> int:
        with user_code(f"{self._what} (its length)"):
            return len(self._source)

    @property
    def stored(self) -> bool:  # type: ignore[override]
        """See the base class."""
        return bool(getattr(self._source, "stored", False))

    @property
    def timeout(self) -> float:
        """See the base class."""
        return float(getattr(self._source, "timeout", Source.timeout))

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        if isinstance(self._source, Source):  # a source of an unrelated class need not have a ``timeout``
            with suppress(AttributeError):  # the ``timeout`` may be read-only
                self._source.timeout = seconds

    def contents(self, numbers: Sequence[int]) -> Iterator[Any]:
        """See the base class."""
        return self._read(lambda: contents_of(self._source, numbers))

    def stream(self, batches: Iterable[Batch], device: torch.device) -> Iterator[Tensors]:
        """See the base class. Raises UserError if the source fails, or yields other batches than the requested ones."""
        waiting: deque[Batch] = deque()

        def requests() -> Iterator[Batch]:
            for batch in batches:
                waiting.append(batch)
                yield batch

        requested, count = requests(), 0
        for found in self._read(lambda: self._source.stream(requested, device)):
            if not waiting:
                raise UserError(
                    f"{self._what} has yielded more batches than the {count} that were requested: yield one for each"
                )
            count += 1
            yield self._checked(found, len(waiting.popleft().numbers))
        if waiting or _has_more(requested):
            raise UserError(
                f"{self._what} has ended after batch {count}: yield inputs and targets for each requested batch"
            )

    def close(self) -> None:
        """See the base class."""
        # The source may be of an unrelated class, without close().
        with user_code(f"{self._what} (its close)"):
            getattr(self._source, "close", lambda: None)()

    def _read(self, read: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        exhausted = object()
        with user_code(self._what):
            found = iter(read())
        while True:
            with user_code(self._what):
                item = next(found, exhausted)
            if item is exhausted:
                return
            yield item

    def _checked(self, found: Any, size: int) -> Tensors:
        """Return ``found``, a batch of ``size`` samples. Raises UserError if ``found`` is anything else.

        Inputs that are not a tensor, and the values of targets on a GPU, are not checked.
        """
        if not isinstance(found, tuple | list) or len(found) != 2 or not isinstance(found[1], torch.Tensor):
            raise UserError(f"{self._what} has yielded a {type(found).__name__}: yield (inputs, targets), two tensors")
        inputs, targets = found
        for part in found:
            if isinstance(part, torch.Tensor) and part.shape[:1] != (size,):
                shapes = f"a tensor of shape {tuple(part.shape)} for a batch of {size} samples"
                raise UserError(f"{self._what} has yielded {shapes}: yield one row for each sample")
        wrong = targets[wrong_targets(targets, self._classes)] if targets.is_cpu else targets[:0]
        if len(wrong):
            target = f"the target {wrong[0].item()} ({str(targets.dtype).removeprefix('torch.')})"
            rule = f"targets must be class indices (int64) from 0 to {self._classes - 1}"
            raise UserError(f"{self._what} has yielded {target}: {rule}")
        return inputs, targets


def _has_more(requested: Iterator[Batch]) -> bool:
    try:
        return next(requested, None) is not None
    except ValueError:  # "generator already executing": a thread of the source is requesting a batch now
        return False
