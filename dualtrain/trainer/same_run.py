"""Check that all ranks are in the same run: compare settings, versions, data and a trainer's arguments at the start.

Without this check, ranks with different settings would train to the end without an error, and the result would
be wrong.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dualtrain.backends import Backend
from dualtrain.backends.comparison import compare
from dualtrain.config import AUTO, SETTINGS
from dualtrain.data import Source, Task
from dualtrain.data.seeding import seeded
from dualtrain.data.sources import contents_of
from dualtrain.differences import in_words
from dualtrain.errors import RanksDifferError, is_disk_or_network_error, is_transient, one_line
from dualtrain.trainer.description import Text, class_name, describe, of_module, of_object, of_weights
from dualtrain.trainer.machine import PROCESSOR, cpu_advice, processor, warn_once
from dualtrain.version import __version__

#: Settings that may differ between ranks, and why; all other settings are compared.
MAY_DIFFER = {
    "device": "each rank may use a different GPU; the kind of device is compared",
    "data_dir": "hosts may have different paths; the data are compared",
    "text_file": "hosts may have different paths; the data are compared",
    "weights": "hosts may have different paths; rank 0's weights are used; whether ranks give the flag is compared",
    "run_dir": "rank 0 alone writes",
    "resume": "one rank reads: rank 0, or with auto the rank with the newest checkpoint. Whether the flag is given, and "
    "whether it is auto, are compared",
    "workers": "depends on a host's number of cores; no sample depends on it",
    "log_every": "rank 0 alone writes",
    "log_seconds": "rank 0 alone prints",
    "tensorboard": "rank 0 alone writes",
    "verbose": "rank 0 alone prints",
}
_GIVEN_OR_NOT = ("weights", "resume")

_SAME_VERSIONS = "install the same versions on all hosts"
_CURES = {
    **dict.fromkeys(("Python", "torch", "dualtrain", "Horovod"), _SAME_VERSIONS),
    "kind of device": "give all ranks a GPU each, or --device cpu",
}
_SAMPLES = 16  # largest number of samples of each split that are compared
_UNREADABLE = "unreadable"  # takes the place of a checksum if a sample cannot be read; the reason follows
_SECONDS = 5.0  # after this time, no further sample is read for the comparison
#: Number of samples that ``_warn_if_random`` reads again. It is small, so that this reading hardly ever takes
#: ``_SECONDS``. Each reading advances the random generator of a dataset that has one: if the number of samples depended on
#: time, two equal runs would get different samples.
_SAMPLES_READ_AGAIN = 8


def compare_settings(settings: Mapping[str, Any], backend: Backend) -> None:
    """Check that all ranks have the same settings (except ``MAY_DIFFER``), versions and kind of device. Collective; blocks.

    Different processors cause one warning, since they round differently.

    Args:
        settings: the values of all settings by name.
        backend: the backend that joins the ranks.

    Raises:
        RanksDifferError: on every rank; names the settings and each rank's value.
    """

    def read() -> dict[str, Any]:
        given = {SETTINGS[name].flag: None if settings[name] is None else "given" for name in _GIVEN_OR_NOT}
        # With auto, the ranks search the run's folder together, which is collective: all ranks must give auto, or none.
        if settings["resume"] == AUTO:
            given[SETTINGS["resume"].flag] = AUTO
        same = {one.flag: settings[name] for name, one in SETTINGS.items() if name not in MAY_DIFFER}
        return {**same, **given}

    _require_same(backend, "settings", read, "give every rank the same command line")


def compare_task(task: Task, backend: Backend) -> None:
    """Check that all ranks have the same data: sizes and classes, then some samples of each split. Collective; blocks.

    Sets the task's ``checksums``. Different samples cause only a warning if the dataset gives different values at each
    read, or if it computes the samples and the processors differ.

    Raises:
        RanksDifferError: on every rank; names what differs, or which sample some ranks cannot read.
    """
    cure = "give every host the same data"
    _require_same(backend, "data", lambda: _sizes(task), cure)
    for title, source in _splits(task):
        task.checksums.update(_compare_samples(backend, title, source, cure))


def changed_samples(task: Task, old_checksums: Mapping[str, object]) -> Iterator[tuple[str, bool]]:
    """Yield, for the first changed sample of each split, the sample's name and the split's ``Source.stored``.

    Samples that could not be read, and splits whose samples differ at each read, are left out.

    Args:
        task: the data, with their checksums.
        old_checksums: the checksums of an earlier start of the run.
    """
    for title, source in _splits(task):
        mine = {name: value for name, value in task.checksums.items() if name.startswith(f"checksum of {title} ")}
        both = {name: (value, old_checksums[name]) for name, value in mine.items() if name in old_checksums}
        changed = [name for name, (now, then) in both.items() if now != then and _UNREADABLE not in f"{now} {then}"]
        if changed and _repeats(title, source, mine):
            yield changed[0].removeprefix("checksum of "), bool(getattr(source, "stored", False))


def _splits(task: Task) -> tuple[tuple[str, Source], ...]:
    return ("training", task.train), ("validation", task.val)


def compare_trainer(
    backend: Backend,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objects: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Check that all ranks make their trainers from the same classes, functions and settings. Collective; blocks.

    The model's weights are not compared, since rank 0's are broadcast later.

    Args:
        backend: the backend that joins the ranks.
        model: its modules' classes and plain attributes are compared.
        optimizer: its class, its groups (options and names of parameters) and its state are compared.
        objects: the loss, the schedule and other objects, by name.
        options: plain values by name.

    Raises:
        RanksDifferError: on every rank; names what differs.
    """

    def read() -> dict[str, Any]:
        plain = {name: None if value is None else Text(describe(value)) for name, value in options.items()}
        found = {**plain, **_optimizer(optimizer, model)}
        for name, value in objects.items():
            found |= of_object(name, value)
        return {**found, **of_weights("loss", objects["loss"], model), **of_module("model", model)}

    cure = "give every rank the same settings (attributes and variables that begin with an underscore are not compared)"
    _require_same(backend, "settings of the trainer", read, cure)


def compare_arguments(backend: Backend, call: str, values: Mapping[str, object]) -> None:
    """Check that all ranks make ``call`` with the same ``values``. Collective; blocks.

    Raises:
        RanksDifferError: on every rank; names the arguments and each rank's value.
    """
    _require_same(backend, f"arguments of {call}", lambda: values, "give every rank the same arguments")


def _require_same(backend: Backend, what: str, read: Callable[[], Mapping[str, object]], cure: str) -> None:
    """Compare the result of ``read``, versions, kinds of device and processors between ranks. Collective; blocks.

    Different processors cause only a warning, any other difference a RanksDifferError on every rank.
    """
    found = compare(backend, what, lambda: {**read(), **_platform(backend), **processor(backend)})
    unlike = [difference for difference in found if difference.name in PROCESSOR]
    others = [difference for difference in found if difference not in unlike]
    if others:
        cures = dict.fromkeys(_CURES.get(difference.name, cure) for difference in others)
        raise RanksDifferError(f"the ranks do not have the same {what}: {in_words(others)}; {', and '.join(cures)}")
    if unlike and backend.rank == 0:
        text = f"the ranks have different processors, whose results differ in the last digits: {in_words(unlike)}"
        warn_once(text + cpu_advice([difference.name for difference in unlike]))


def versions(backend: Backend) -> dict[str, str]:
    """Return the versions of the software that computes the result, by name."""
    own = {"Python": platform.python_version(), "torch": str(torch.__version__), "dualtrain": __version__}
    return {**own, **backend.versions}


def _platform(backend: Backend) -> dict[str, str]:
    return {**versions(backend), "kind of device": backend.device.type}


# -- data ---------------------------------------------------------------------------------------------------------


def _sizes(task: Task) -> dict[str, Any]:
    classes = {f"name of class {number}": name for number, name in enumerate(task.names or ())}
    return {
        "number of training samples": len(task.train),
        "number of validation samples": len(task.val),
        "shape of a sample": tuple(task.shape),
        "number of classes": task.classes,
        "kind of targets": task.kind,
        **classes,
    }


def _compare_samples(backend: Backend, title: str, source: Source, cure: str) -> dict[str, str]:
    """Compare samples of a split between the ranks; return the checksums of this rank's samples. Collective.

    Raises RanksDifferError on every rank if they differ. If equal data can have different checksums, rank 0 warns instead.
    If no sample differs and the source is not ``stored``, rank 0 reads some again: see :func:`_warn_if_random`.
    """
    what = f"{title} data"
    first: dict[str, str] = {}
    errors: list[Exception] = []

    def read() -> dict[str, Any]:
        first.update(_checksums(title, source, errors=errors))
        return {**first, **processor(backend)}

    found = compare(backend, what, read)
    # A rank that reads slowly has checksums of fewer samples.
    samples = [one for one in found if one.name not in PROCESSOR and None not in one.values]
    if not samples:
        if backend.rank == 0 and not getattr(source, "stored", False):
            _warn_if_random(title, source, first)
        return first
    partly_readable = [one for one in samples if len({_UNREADABLE in str(value) for value in one.values}) > 1]
    samples = partly_readable or samples
    processors_differ = any(one.name in PROCESSOR for one in found)
    # If only some ranks can read a sample, the cause is not a different processor or a random dataset.
    reason = (
        None if partly_readable else _why_not_comparable(backend, title, source, first, processors_differ=processors_differ)
    )
    seen = f"{samples[0]}" + (f" (and {len(samples) - 1} more of the compared samples)" if len(samples) > 1 else "")
    if reason is None:
        # All ranks must make the same decision: a launcher may read the exit status of any of them.
        transient = any(backend.allgather_object(_are_transient(errors), name="whether samples may be read later"))
        raise RanksDifferError(f"the ranks do not have the same {what}: {seen}; {cure}", transient=transient)
    if backend.rank == 0:
        warn_once(f"cannot check that the ranks have the same {what}: {seen}; a possible cause: {reason}")
    return first


def _are_transient(errors: Sequence[Exception]) -> bool:
    """Return whether the errors of samples that this rank cannot read may be gone at the next start."""
    return any(is_transient(error) or is_disk_or_network_error(error) for error in errors)


def _warn_if_random(title: str, source: Source, checksums: Mapping[str, str]) -> None:
    """Warn if the samples change when they are read again.

    All ranks may still have read the same samples: usually, the dataset has a generator with the same seed on every rank.
    """
    if not _repeats(title, source, checksums, _SAMPLES_READ_AGAIN):
        warn_once(
            f"the {title} dataset gives a different value each time that a sample is read: results depend on the numbers "
            "of ranks and workers, and on restarts; draw random numbers from the global generators of torch, numpy or "
            "random, which are seeded for each sample"
        )


def _why_not_comparable(
    backend: Backend, title: str, source: Source, checksums: Mapping[str, str], *, processors_differ: bool
) -> str | None:
    """Return why equal data can have different checksums; ``None`` if they cannot. Collective; equal on every rank."""
    repeats = _repeats(title, source, checksums)
    if not all(backend.allgather_object(repeats, name="whether samples can be read again")):
        return "the dataset gives a different value each time that a sample is read"
    # All ranks must make the same decision.
    stored = all(backend.allgather_object(bool(getattr(source, "stored", False)), name="whether samples are as stored"))
    return "the ranks compute the samples on different processors" if processors_differ and not stored else None


def _repeats(title: str, source: Source, checksums: Mapping[str, str], limit: int = _SAMPLES) -> bool:
    """Return whether the first ``limit`` samples of ``checksums`` have the same checksums when they are read again."""
    try:
        again = _checksums(title, source, limit)
    except Exception:  # a dataset that cannot be read twice
        return False
    return all(again[name] == checksums[name] for name in again.keys() & checksums.keys())


def _checksums(title: str, source: Source, limit: int = _SAMPLES, errors: list[Exception] | None = None) -> dict[str, str]:
    """Hash the first ``limit`` of up to ``_SAMPLES`` samples, which are evenly spread from the split's first to its last.

    Stop at a sample that cannot be read, append its error to ``errors``, and stop after ``_SECONDS``.
    """
    size, began = len(source), time.monotonic()
    found: dict[str, str] = {}
    most = min(_SAMPLES, size)
    numbers = sorted({place * (size - 1) // max(1, most - 1) for place in range(most)})[:limit]
    with seeded(0, 0):
        read = _lazily(source, numbers)
        for number in numbers:
            name = f"checksum of {title} sample {number}"
            try:
                found[name] = hashlib.blake2b(describe(next(read)).encode(), digest_size=8).hexdigest()
            except Exception as error:
                # A sample that all ranks fail to read with the same error counts as equal: the run raises the error when it
                # reaches that sample.
                found[name] = f"{_UNREADABLE} ({one_line(error) or type(error).__name__})"
                if errors is not None:
                    errors.append(error)
                break
            if time.monotonic() - began > _SECONDS:
                break
    return found


def _lazily(source: Source, numbers: list[int]) -> Iterator[Any]:
    """Yield the samples ``numbers``. The first ``next()`` raises the errors of :func:`contents_of` itself."""
    yield from contents_of(source, numbers)


# -- a trainer ----------------------------------------------------------------------------------------------------


def _optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Any] = {"optimizer": Text(class_name(type(optimizer)))}
    for number, group in enumerate(optimizer.param_groups):
        where = f"optimizer.param_groups[{number}]"
        for option, value in group.items():
            if option != "params":
                found[f"{where}[{option!r}]"] = Text(describe(value))
        for place, parameter in enumerate(group["params"]):
            found[f"parameter {place} of {where}"] = names.get(id(parameter), "not a parameter of the model")
    for number, (parameter, held) in enumerate(optimizer.state.items()):
        name = names.get(id(parameter), f"parameter {number}, which is not of the model")
        found[f"optimizer.state of {name}"] = Text(describe(held))
    return found
