"""Datasets that the user's own code builds: ``--dataset pkg.mod:build``."""

from __future__ import annotations

import dataclasses
import io
import pickle
import re
import reprlib
from operator import index
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from dualtrain.data.loader import LoaderSource, Wanted
from dualtrain.data.options import Options
from dualtrain.data.own_source import OwnSource
from dualtrain.data.seeding import seeded
from dualtrain.data.sources import Source, Task, Tensors, wrong_targets
from dualtrain.data.worker_waits import unsent
from dualtrain.errors import UserError
from dualtrain.torchvision_shim import with_torchvision_shim
from dualtrain.user_code import call_user_code, in_one_line, user_code

_UNREAD_BYTES = 64 << 20  # largest pickle of a dataset that is kept for the workers


class Samples:
    """A :class:`~dualtrain.data.loader.Reader` of a map-style dataset: ``dataset[i]`` is (input, target).

    Args:
        dataset: the dataset.
        sample: input and target of one sample, for the shapes and dtypes of an empty batch.
        split: "training" or "validation", for messages.
        classes: the number of classes; targets must be below it.
        unread: the result of :func:`_pickled` before samples were read.
    """

    def __init__(self, dataset: Any, sample: Tensors, split: str, classes: int, unread: bytes | None = None) -> None:
        self.dataset = dataset
        self.unread = unread
        self.sample = sample
        self.split = split
        self.classes = classes

    def __len__(self) -> int:
        return _length(self.dataset, self.split)

    def __getitems__(self, wanted: Wanted) -> Tensors | UserError:
        """Read and stack the samples. Return an error if one fails or has a wrong target, or if they cannot be stacked."""
        numbers, seed = wanted
        if not numbers:
            inputs, targets = (part.new_empty(0, *part.shape) for part in self.sample)
            return inputs, targets
        samples = []
        for number in numbers:
            torch.set_num_threads(1)  # the dataset may have changed it when it read the sample before
            try:
                with seeded(seed, number), user_code(f"sample {number} of the dataset"):
                    samples.append(self.dataset[number])
            except UserError as error:
                return error
        try:
            inputs, targets = _stacked(samples)
        except UserError as error:
            return error
        except (TypeError, ValueError) as error:
            reason = re.sub(r"at entry (\d+)", lambda found: f"in sample {numbers[int(found[1])]}", str(error))
            return UserError(f"sample {numbers[0]} of the dataset and others do not fit into one batch: {reason}")
        return self._refusal(numbers, targets) or (inputs, targets)

    def _refusal(self, numbers: list[int], targets: Any) -> UserError | None:
        """Return an error if a target is neither a class index nor ``IGNORED``; else ``None``."""
        if not isinstance(targets, torch.Tensor):
            wrong, got = 0, f"a target of type {type(targets).__name__}"
        else:
            dtype = str(targets.dtype).removeprefix("torch.")
            bad = wrong_targets(targets, self.classes)
            if not bad.any():
                return None
            place = bad.nonzero()[0].tolist()
            wrong, got = place[0], f"the target {targets[tuple(place)].item()} ({dtype})"
        return UserError(
            f"{self.split} sample {numbers[wrong]} of the dataset has {got}: targets must be class indices (int64) from 0 "
            f"to {self.classes - 1}; convert them in the dataset, or give another --classes"
        )

    def __reduce__(self) -> Any:
        # Unpickling the dataset may import torchvision, which may need the shim: so ``_unpickled`` does it with the shim.
        try:
            dataset, more = self.unread or pickle.dumps(self.dataset), pickle.dumps((self.sample, self.split, self.classes))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"the dataset cannot be sent to worker processes ({in_one_line(error)}): define its classes and functions "
                "at the top level of a module, or give --workers 0"
            ) from error
        return _unpickled, (dataset, more)


def _pickled(dataset: Any) -> bytes | None:
    """Pickle a dataset of which no sample was read; return ``None`` if that is impossible or takes over 64 MiB.

    Many datasets open a file at the first read, and cannot be pickled afterwards. Large datasets are in memory.
    """
    file = _LimitedFile()
    try:
        pickle.dump(dataset, file)
    except Exception:  # the dataset's code may raise anything; ``Samples.__reduce__`` reports an error
        return None
    return file.getvalue()


class _LimitedFile(io.BytesIO):
    """File in memory. A write that would make it too large raises OverflowError."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _UNREAD_BYTES:
            raise OverflowError
        return super().write(data)


def _length(dataset: Any, split: str) -> int:
    with user_code(f"the length of the {split} dataset"):
        return len(dataset)


def _stacked(samples: list[Any]) -> Any:
    """Stack the samples into a batch.

    Raises:
        ValueError, TypeError: the samples do not fit together.
        UserError: in a worker, shared memory is full, or too many of its files are open.
    """
    try:
        batch = default_collate(samples)
    # Raised for tensors of different sizes or kinds, and, in a worker, for a tensor followed by another type.
    except (RuntimeError, AttributeError) as error:
        if "shared memory" in str(error):  # default_collate stacks tensors in memory that the rank can map
            raise unsent(error) from error
        raise ValueError(str(error).partition("\n")[0]) from error
    # default_collate gives all inputs one dtype. In a worker, this is the first input's dtype, and others may overflow.
    dtypes = [getattr(next(iter(sample), None), "dtype", "") for sample in samples]
    if any(dtype is not dtypes[0] for dtype in dtypes):
        _compare_names(dtypes)
    return batch


def _compare_names(dtypes: list[Any]) -> None:
    """Raise ValueError if the names of two ``dtypes`` of torch or numpy differ.

    "" stands for Python's numbers, which are converted together with numpy's, without overflow.
    """
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    typed = [(entry, name) for entry, name in enumerate(names) if name]
    for entry, name in typed:
        if name != typed[0][1]:
            raise ValueError(f"the inputs have dtype {typed[0][1]} at entry {typed[0][0]} and {name} at entry {entry}")


def _unpickled(dataset: bytes, more: bytes) -> Samples:
    return with_torchvision_shim(lambda: Samples(pickle.loads(dataset), *pickle.loads(more)))


def load_own(name: str, folder: str | None, options: Options) -> Task:
    """Call the function ``name`` with ``folder``, or without arguments if it takes none; return the task that it builds.

    The function must return a :class:`Task`, or two map-style datasets, for training and evaluation.

    Raises:
        UserError: the function does not exist, fails, or returns something else, or :func:`wrap` raises it.
    """
    built = call_user_code(name, "--dataset", "the folder of --data-dir", folder)
    if isinstance(built, Task):
        return _checked(built, name)
    if not isinstance(built, tuple | list) or len(built) != 2 or not all(map(_map_style, built)):
        kinds = " of " + ", ".join(type(part).__name__ for part in built[:4]) if isinstance(built, tuple | list) else ""
        raise UserError(
            f"--dataset {name!r} returned a {type(built).__name__}{kinds}: it must return a dualtrain.data.Task, or two "
            "map-style datasets, for training and evaluation"
        )
    return wrap(built[0], built[1], classes=options.classes, workers=options.workers, name=name)


def _checked(task: Task, name: str) -> Task:
    """Return the user's task with its sources as :class:`OwnSource`. Raises UserError if it is not usable."""
    for source in (task.train, task.val):
        if not hasattr(source, "stream") or not hasattr(source, "__len__"):
            raise UserError(
                f"--dataset {name!r} returned a Task with a {type(source).__name__}, not a dualtrain.data.Source: return "
                "two map-style datasets, or a Task of sources"
            )
    try:
        shape, classes = tuple(map(index, task.shape)), index(task.classes)
    except TypeError:
        shape, classes = (), 0
    if classes < 1 or task.kind not in ("classes", "tokens"):
        raise UserError(
            f"--dataset {name!r} returned a Task of shape {task.shape!r}, classes {task.classes!r}, kind {task.kind!r}: "
            "give a tuple of whole numbers, a whole number above 0, and 'classes' or 'tokens'"
        )
    train, val = OwnSource(task.train, "training", classes), OwnSource(task.val, "validation", classes)
    return dataclasses.replace(task, train=train, val=val, shape=shape, classes=classes)


def _map_style(part: Any) -> bool:
    return hasattr(part, "__getitem__") and hasattr(part, "__len__") and not isinstance(part, IterableDataset)


def wrap(train: Any, val: Any, *, classes: int | None = None, workers: int = 0, name: str = "dataset") -> Task:
    """Make a :class:`Task` of two map-style datasets.

    Each sample is a pair of an input tensor and a target. The target is a class index (the task's kind is then
    "classes") or an int64 tensor of shape (t,) (the kind is then "tokens").

    ``classes`` may be left out if the training dataset has an attribute ``classes`` (the names, or their number) or
    ``num_classes``.

    Raises:
        UserError: the training dataset is empty or fails, its sample 0 is not such a pair, or the number of classes is
            unknown or unusable.
    """
    classes = classes or _classes(train, name)
    unread = [_pickled(part) if workers and not isinstance(part, Source) else None for part in (train, val)]
    sample = _sample(train, name)
    return Task(
        _source(train, Samples(train, sample, "training", classes, unread[0]), workers),
        _source(val, Samples(val, sample, "validation", classes, unread[1]), workers),
        shape=tuple(sample[0].shape),
        classes=classes,
        kind="tokens" if sample[1].dim() else "classes",
    )


def _classes(dataset: Any, name: str) -> int:
    """Return the number of classes that the dataset's attribute ``classes`` (names or number) or ``num_classes`` states."""
    with user_code(f"the classes of --dataset {name!r}"):
        known: Any = getattr(dataset, "classes", None)
        if known is None:
            known = getattr(dataset, "num_classes", None)
    if known is None:
        raise UserError(f"--dataset {name!r} does not say how many classes it has: give --classes")
    try:
        number = _number(known)
    except (TypeError, OverflowError):
        number = 0
    if number < 1:
        raise UserError(
            f"--dataset {name!r} has unusable classes ({reprlib.repr(known)}): set its attribute classes to their names or "
            "their number, or give --classes"
        )
    return number


def _number(classes: Any) -> int:
    """Return ``classes`` if it is a number, else the number of names in it. Raises TypeError for all other values."""
    if isinstance(classes, str | bytes | bool):
        raise TypeError
    try:
        return index(classes)
    except TypeError:
        return int(classes) if isinstance(classes, float) and classes.is_integer() else len(classes)


def _source(dataset: Any, samples: Samples, workers: int) -> Source:
    """Return a source of the dataset's samples. A dataset that is also a :class:`Source` yields its batches itself."""
    if isinstance(dataset, Source):
        return OwnSource(dataset, samples.split, samples.classes)
    return LoaderSource(samples, workers)


def _sample(dataset: Any, name: str) -> Tensors:
    """Return sample 0 of the training dataset, as two dense tensors. Raises UserError if that is impossible."""
    if not _length(dataset, "training"):
        raise UserError(f"--dataset {name!r} has no samples to train on: give some")
    with seeded(0, 0), user_code(f"sample 0 of --dataset {name!r}"):
        sample = dataset[0]
    try:
        inputs, targets = _stacked([sample])
    except (TypeError, ValueError) as error:
        raise UserError(
            f"--dataset {name!r} has samples that are not (tensor, class index): {str(error).partition(chr(10))[0]}"
        ) from error
    if not isinstance(inputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        raise UserError(f"--dataset {name!r} has samples that are not (tensor, class index): convert them in the dataset")
    for part in (inputs, targets):
        if part.layout != torch.strided or part.is_meta or part.is_quantized:
            kind = "meta" if part.is_meta else "quantized" if part.is_quantized else "sparse"
            raise UserError(f"--dataset {name!r} has samples with a {kind} tensor: give dense tensors of numbers")
    return inputs[0], targets[0]
