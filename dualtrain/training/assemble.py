"""Make the data, the model and the trainer's arguments from the settings of a run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dualtrain.backends import Backend
from dualtrain.batchnorm import synchronize_norms
from dualtrain.config import DataSection, ModelSection, RunSection, StepSection
from dualtrain.data import Batch, Task, load_data
from dualtrain.data.draws import derived
from dualtrain.data.loader import LoaderSource
from dualtrain.data.options import LIMIT
from dualtrain.data.sampler import Sampler
from dualtrain.data.sources import Source, Tensors, contents_of, wrong_targets
from dualtrain.errors import UserError
from dualtrain.models import build, fetch
from dualtrain.on_ranks import on_all_ranks
from dualtrain.trainer.data_parallel import measured, replicate
from dualtrain.trainer.description import describe
from dualtrain.trainer.machine import warn_once
from dualtrain.trainer.modes import evaluation_mode, training_mode
from dualtrain.trainer.rank_state import seed_all
from dualtrain.trainer.same_run import compare_task
from dualtrain.training.saveable import check_state
from dualtrain.user_code import in_one_line, user_traceback

#: Largest number of samples that are searched for the cause of a loss that is not finite.
LARGEST_SEARCH = 10_000

Forward = Callable[[torch.Tensor], torch.Tensor]


def load_task(data: DataSection, model: str, backend: Backend) -> Task:
    """Load the data; with ``data.download``, one rank of each host first downloads missing files. Collective.

    Args:
        data: the dataset and its options.
        model: the model's name, for ``augment="weights"``.
        backend: communicates with the other ranks.

    Raises:
        UserError: on every rank, if the data cannot be loaded, or a split has no samples or too many.
        RanksDifferError: on every rank, if the ranks' data differ, or only some ranks can load them.
    """
    options = {**dataclasses.asdict(data), "model": model}
    dataset, folder = options.pop("dataset"), options.pop("data_dir")

    def load(download: bool) -> Task:
        return load_data(dataset, folder, **{**options, "download": download})

    fetched = None
    if data.download:
        first = backend.local_rank == 0
        fetched = on_all_ranks(backend, "download of the data", lambda: load(True) if first else None)
    task = on_all_ranks(backend, "data", lambda: _check_sizes(fetched or load(False), dataset))
    task.limit_waits(backend.timeout)
    compare_task(task, backend)
    return task


def _check_sizes(task: Task, name: str) -> Task:
    for title, source in (("train on", task.train), ("evaluate on", task.val)):
        if not len(source):
            raise UserError(f"--dataset {name!r} has no samples to {title}: add some")
        if len(source) >= LIMIT:
            raise UserError(f"--dataset {name!r} has {len(source)} samples to {title}: give fewer than {LIMIT}")
    return task


@torch.no_grad()
def try_out(task: Task, model: nn.Module, dataset: str, name: str) -> None:
    """Find out, before the run begins, whether the model fits the data, and whether its state can be saved.

    The model is run, in evaluation mode, on one validation sample and, if training samples need no transform, on one
    training sample. It is in training mode afterwards.

    Args:
        task: the data.
        model: the model, on any device.
        dataset: the dataset's name, for messages.
        name: the model's name, for messages.

    Raises:
        UserError: the model does not fit the data, or a checkpoint cannot hold its state.
    """
    device = next(model.parameters()).device
    what = f"--model {name} and --dataset {dataset} do not fit"
    with evaluation_mode(model):
        _try_sample(model, first_validation_sample(task, device), task.classes, what)
        for inputs, targets in ready_samples(task.train, [0]):
            _try_sample(model, (inputs.to(device), targets.to(device)), task.classes, what)
    training_mode(model)  # the user's own function may return a model in evaluation mode
    check_state(model, name)


def first_validation_sample(task: Task, device: torch.device) -> Tensors:
    """Return the first validation sample, as a batch of one sample."""
    return next(task.val.stream([Batch(torch.zeros(1, dtype=torch.int64))], device))


def ready_samples(source: Source, numbers: Sequence[int]) -> Iterator[Tensors]:
    """Yield the samples with the indices ``numbers``, each as a batch of one sample.

    Yield nothing if ``source.stored``: its samples may still need a transform to become the model's inputs. Leave out
    samples that are not pairs of tensors.
    """
    if getattr(source, "stored", False):
        return
    for sample in contents_of(source, numbers):
        if isinstance(sample, tuple) and len(sample) == 2 and all(isinstance(part, torch.Tensor) for part in sample):
            yield sample


def first_not_finite(source: Source, numbers: Sequence[int]) -> int | None:
    """Return the index of the first sample whose inputs are not all finite; ``None`` if no such sample is found.

    Only the first ``LARGEST_SEARCH`` of the indices ``numbers`` are searched.
    """
    searched = numbers[:LARGEST_SEARCH]
    try:
        for number, sample in zip(searched, contents_of(source, searched), strict=True):
            inputs = sample[0] if isinstance(sample, tuple) else None  # a stored sample may be of any type
            if isinstance(inputs, torch.Tensor) and not inputs.isfinite().all():
                return number
    except Exception:  # the run has read these samples without an error, so they have changed since: stop the search
        return None
    return None


def warn_of_other_workers(task: Task, backend: Backend) -> None:
    """Warn, on rank 0, if a data worker reads another sample 0 of a split than the rank does.

    A worker imports the modules of the dataset's code, but does not call the function that builds the dataset. Splits of
    image folders are left out. All ranks start their workers now, at the same time, and all of them raise a worker's error.
    """
    for title, source in (("training", task.train), ("validation", task.val)):
        if not isinstance(source, LoaderSource) or not source.workers:
            continue
        for here in map(describe, ready_samples(source, [0])):
            there = next(source.stream([Batch(torch.zeros(1, dtype=torch.int64))], backend.device))
            if here == describe(tuple(part.cpu() for part in there)):
                continue
            # A dataset with a generator of its own gives a different value at each read: ``load_task`` warns of it.
            if here in map(describe, ready_samples(source, [0])) and backend.rank == 0:
                warn_once(
                    f"data workers read a different {title} sample 0 than the rank: results depend on --workers, because "
                    "the dataset depends on something that differs between the processes, such as a global variable that "
                    "the function of --dataset sets; keep such values in the dataset, or give --workers 0"
                )


def _try_sample(model: nn.Module, sample: Tensors, classes: int, what: str) -> None:
    """Check that the model fits ``sample``, a batch of one sample, and has an output for each of the data's ``classes``.

    Error messages begin with ``what``.
    """
    # Use the sample twice: then an output without a batch dimension has the wrong shape, and BatchNorm has several values
    # per channel (in evaluation mode too, it needs them if it has no running statistics).
    inputs, targets = (torch.cat([part, part]) for part in sample)
    try:
        outputs = model(inputs)
    except UserError:
        raise
    except Exception as error:
        dtype = str(inputs.dtype).removeprefix("torch.")
        kind = "" if inputs.dtype in (torch.float32, torch.int64) else f" and dtype {dtype}"
        reason = f"a sample of shape {tuple(inputs.shape[1:])}{kind} raises {in_one_line(error)}"
        raise UserError(f"{what}: {reason}; change one of them", trace=user_traceback(error)) from error
    if not isinstance(outputs, torch.Tensor) or outputs.shape[:-1] != targets.shape:
        shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        raise UserError(
            f"{what}: the model returns {shape} for targets of shape {tuple(targets.shape)}; it must return "
            "one row of logits for each target"
        )
    if not outputs.is_floating_point():
        kind = str(outputs.dtype).removeprefix("torch.")
        raise UserError(f"{what}: the model returns values of type {kind}; it must return logits, such as float32")
    _check_targets(targets, outputs.shape[-1], what)
    if outputs.shape[-1] < classes:  # a later sample may have a class that the model lacks
        raise UserError(
            f"{what}: the model returns {outputs.shape[-1]} logits for each target, and the data has {classes} classes; "
            "it must return a logit for each class; if the data has fewer classes, give --classes"
        )


def _check_targets(targets: torch.Tensor, classes: int, what: str) -> None:
    """Raise UserError if a target is neither a class index below ``classes`` nor ``IGNORED``.

    The message begins with ``what``.
    """
    wrong = targets[wrong_targets(targets, classes)]
    if len(wrong):
        raise UserError(
            f"{what}: targets must be class indices (int64) from 0 to {classes - 1}, since the model has {classes} "
            f"outputs, and one target is {wrong[0].item()} ({str(targets.dtype).removeprefix('torch.')})"
        )


def make_model(section: ModelSection, task: Task, seed: int, backend: Backend, *, resumed: bool = False) -> nn.Module:
    """Make the model on this rank's device. Weights drawn from torch's generator are equal on every rank. Collective.

    Seed this process's random generators: with ``seed`` before the model is made, and afterwards differently on each rank.

    A ``resumed`` run gets all weights from the checkpoint. The files of its initial weights may not exist any more, so
    they are not read. The published weights of a pretrained model are not read either if ``section.weights`` replaces them.
    If the published weights are needed, one rank of each host first downloads them.

    Raises:
        UserError: on every rank, if the model cannot be made or its weights cannot be read.
        RanksDifferError: on every rank, if this fails on some ranks only.
    """
    published = not resumed and section.weights is None
    if section.pretrained and published:
        first = backend.local_rank == 0
        on_all_ranks(backend, "download of the weights", lambda: str(fetch(section.name)) if first else None)
    seed_all(seed)
    model = on_all_ranks(
        backend,
        "model",
        lambda: build(
            section.name,
            task.shape,
            task.classes,
            pretrained=section.pretrained,
            load_published=published,
            freeze_backbone=section.freeze_backbone,
            weights=None if resumed else section.weights,
        ),
    )
    # From here on, random numbers (dropout, for example) differ between ranks.
    seed_all(derived(seed, "rank", backend.rank))
    if section.sync_batchnorm:
        try:
            synchronize_norms(model, backend)
        except ValueError as error:  # the model itself is a BatchNorm layer
            raise UserError(f"--sync-batchnorm: {error}", shared=True) from error
    model = model.to(backend.device)
    # Don't convert unless requested: parameters of lazy layers have no memory format yet.
    return model.to(memory_format=torch.channels_last) if section.channels_last else model


def make_computation(
    run: RunSection, section: ModelSection, label_smoothing: float, model: nn.Module, backend: Backend
) -> dict[str, Any]:
    """Return the trainer's arguments for compiling or replicating ``model``; empty if neither is requested.

    Raises:
        UserError: nn.DataParallel is requested, but the job has several ranks, the device is not a GPU, or the output
            device does not exist.
    """
    if run.data_parallel and backend.size > 1:
        raise UserError(
            f"--data-parallel uses all GPUs from one process, and this job has {backend.size} ranks: start a single rank"
        )
    if run.parallel_loss:
        return {"measure": measured(model, backend.device, run.output_device, label_smoothing)}
    if run.data_parallel:
        return {"forward": replicate(model, backend.device, run.output_device)}
    return {"forward": compiled(model)} if section.compile else {}


def check_batches(sampler: Sampler, size: int, accumulate: int, *, sync_batchnorm: bool) -> None:
    """Raise UserError if there is no whole batch, or if SyncBatchNorm would have no samples in a rank's backward pass."""
    if not sampler.batches:
        raise UserError(
            f"--drop-last drops all {sampler.samples} samples, since a batch has {sampler.global_batch} over all ranks: "
            "give a smaller batch size"
        )
    if sync_batchnorm and sampler.smallest // size < accumulate:
        raise UserError(
            f"--sync-batchnorm needs samples on every rank in every backward pass, and the smallest batch has "
            f"{sampler.smallest} for {size} ranks × {accumulate} passes: give --drop-last, or another batch size"
        )


def check_virtual_ranks(step: StepSection, model: ModelSection, run: RunSection, size: int) -> None:
    """Raise UserError if virtual ranks are requested with settings that they do not support on ``size`` ranks."""
    virtual = step.virtual_ranks
    if virtual is None:
        return
    flag = f"--virtual-ranks {virtual}"
    if step.compress != "none":
        raise UserError(
            f"--compress rounds each rank's sums, so bits depend on the number of ranks: leave out --compress or {flag}"
        )
    if model.compile:
        raise UserError(f"--compile may give different bits at each number of ranks: leave out --compile or {flag}")
    if run.data_parallel:
        raise UserError(f"--data-parallel splits batches over GPUs by itself: leave out --data-parallel or {flag}")
    if model.sync_batchnorm and size != virtual:
        raise UserError(
            f"--sync-batchnorm with {flag} needs one rank for each virtual rank, and this job has {size}: start {virtual}, "
            "or leave --sync-batchnorm out"
        )


def compiled(model: nn.Module) -> Forward:
    """Wrap ``model`` with torch.compile, which compiles when the result is called. The call raises UserError on failure."""
    fast = torch.compile(model)

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        try:
            outputs: torch.Tensor = fast(inputs)
        except compile_error() as error:
            lines = str(error).strip().splitlines() or [""]  # the reason may follow a line "backend='inductor' raised:"
            reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
            raise UserError(f"--compile fails with this model on this host ({reason}): leave out --compile") from error
        return outputs

    return forward


def compile_error() -> type[Exception]:
    """Return the base class of torch.compile's errors, including Inductor's.

    Private in torch 2.5 to 2.15: the class has no public name.
    """
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


@contextmanager
def determinism(requested: bool) -> Iterator[None]:
    """If ``requested``, make the block's operations deterministic; those that cannot be deterministic raise an error."""
    if not requested:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # needed by cuBLAS; stays set
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
