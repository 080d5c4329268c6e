"""Datasets that the user's own code builds: ``--dataset pkg.mod:build``."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from dualtrain.data.loader import LoaderSource, Wanted
from dualtrain.data.options import Options
from dualtrain.data.seeding import seeded
from dualtrain.data.sources import Source, Task, Tensors
from dualtrain.errors import UserError
from dualtrain.torchvision_shim import with_torchvision_shim
from dualtrain.user_code import call_user_code, user_code


class Samples:
    """A :class:`~dualtrain.data.loader.Reader` of a map-style dataset: ``dataset[i]`` is (input, target)."""

    def __init__(self, dataset: Any, sample: Tensors) -> None:
        self.dataset = dataset
        self.sample = sample  # gives an empty batch its shapes and dtypes

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, wanted: Wanted) -> Tensors | UserError:
        """Read the samples and stack them; if the dataset fails, return its error."""
        numbers, seed = wanted
        if not numbers:
            inputs, targets = (part.new_empty(0, *part.shape) for part in self.sample)
            return inputs, targets
        samples = []
        for number in numbers:
            try:
                with seeded(seed, number), user_code(f"sample {number} of the dataset"):
                    samples.append(self.dataset[number])
            except UserError as error:
                return error
        try:
            inputs, targets = _stacked(samples)
        except ValueError as error:
            return UserError(f"sample {numbers[0]} of the dataset and others do not fit into one batch: {error}")
        return inputs, targets

    def __reduce__(self) -> Any:
        # Unpickling the dataset may import torchvision, which needs the shim: a worker process must install it first.
        return _unpickled, (pickle.dumps((self.dataset, self.sample)),)


def _stacked(samples: list[Any]) -> Any:
    """Stack the samples to a batch. Raises ValueError or TypeError."""
    try:
        return default_collate(samples)
    except RuntimeError as error:  # torch raises it for tensors of different sizes or kinds
        raise ValueError(str(error).partition("\n")[0]) from error


def _unpickled(content: bytes) -> Samples:
    return Samples(*with_torchvision_shim(lambda: pickle.loads(content)))


def load_own(name: str, folder: str | None, options: Options) -> Task:
    """Call the function ``name`` with ``folder``; it must return a :class:`Task`, or datasets for training and evaluation.

    Raises:
        UserError: the callable does not exist, or returns something else.
    """
    built = call_user_code(name, "--dataset", "the folder of --data-dir", folder)
    if isinstance(built, Task):
        return built
    if not isinstance(built, tuple | list) or len(built) != 2 or not all(map(_map_style, built)):
        raise UserError(
            f"--dataset {name!r} returned a {type(built).__name__}: it must return a dualtrain.data.Task, or two map-style "
            "datasets, for training and evaluation"
        )
    return wrap(built[0], built[1], classes=options.classes, workers=options.workers, name=name)


def _map_style(part: Any) -> bool:
    return hasattr(part, "__getitem__") and hasattr(part, "__len__") and not isinstance(part, IterableDataset)


def wrap(train: Any, val: Any, *, classes: int | None = None, workers: int = 0, name: str = "dataset") -> Task:
    """Make a :class:`Task` of two map-style datasets, whose samples are (tensor, class number or int64 tensor (t,)).

    ``classes`` is needed if the training dataset has no attribute ``classes`` (the names) or ``num_classes``.

    Raises:
        UserError: the samples are of another kind, or the number of classes is unknown.
    """
    known = len(train.classes) if hasattr(train, "classes") else getattr(train, "num_classes", None)
    classes = classes or known
    if not classes:
        raise UserError(f"--dataset {name!r} does not say how many classes it has: give --classes")
    sample = _sample(train, name)
    return Task(
        _source(train, sample, workers),
        _source(val, sample, workers),
        shape=tuple(sample[0].shape),
        classes=classes,
        kind="tokens" if sample[1].dim() else "classes",
    )


def _source(dataset: Any, sample: Tensors, workers: int) -> Source:
    return dataset if isinstance(dataset, Source) else LoaderSource(Samples(dataset, sample), workers)


def _sample(dataset: Any, name: str) -> Tensors:
    if not len(dataset):
        raise UserError(f"--dataset {name!r} has no samples to train on: give some")
    with seeded(0, 0), user_code(f"sample 0 of --dataset {name!r}"):
        sample = dataset[0]
    try:
        inputs, targets = _stacked([sample])
    except (TypeError, ValueError) as error:
        raise UserError(
            f"--dataset {name!r} has samples that are not (tensor, class number): {str(error).partition(chr(10))[0]}"
        ) from error
    if not isinstance(inputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        raise UserError(f"--dataset {name!r} has samples that are not (tensor, class number): convert them in the dataset")
    for part in (inputs, targets):
        if part.layout != torch.strided or part.is_meta or part.is_quantized:
            kind = "meta" if part.is_meta else "quantized" if part.is_quantized else "sparse"
            raise UserError(f"--dataset {name!r} has samples with a {kind} tensor: give dense tensors of numbers")
    return inputs[0], targets[0]
