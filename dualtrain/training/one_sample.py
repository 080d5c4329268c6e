"""Refuse, before the first step, batches of one sample for a model that cannot be trained on one sample.

A BatchNorm layer, for example, raises an error in training mode if it gets a single value per channel.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from dualtrain.batchnorm import is_synchronized
from dualtrain.config import StepSection
from dualtrain.data import Task
from dualtrain.data.sampler import Sampler
from dualtrain.data.sources import Tensors
from dualtrain.errors import UserError
from dualtrain.trainer.rank_state import random_state, restore_random_state
from dualtrain.training.assemble import first_validation_sample, ready_samples
from dualtrain.user_code import in_one_line, user_traceback


def check_one_sample(
    model: nn.Module, name: str, task: Task, sampler: Sampler, step: StepSection, parts: int, steps: int
) -> None:
    """Raise UserError if a backward pass of the run has one sample, and the model cannot be trained on one sample.

    With several parts, a model with SyncBatchNorm is not checked: its layers use the samples of all ranks.

    Args:
        model: the model, in training mode. A copy of it is tried, so that its buffers do not change.
        name: the model's name, for messages.
        task: the data.
        sampler: the order of the training samples, and the global batches.
        step: has the number of backward passes for each part of a global batch.
        parts: the number of parts: ranks or virtual ranks.
        steps: the number of steps of the run.
    """
    whole = sampler.samples >= sampler.global_batch
    sizes = {"a batch": sampler.global_batch} if whole else {}
    if steps >= sampler.batches:
        sizes["the last batch of an epoch"] = sampler.smallest
    single = {what: size for what, size in sizes.items() if smallest_pass(size, parts, step.accumulate) == 1}
    synchronized = parts > 1 and any(map(is_synchronized, model.modules()))
    if not single or synchronized:
        return
    error = _error_of_one_sample(model, task)
    if error is None:
        return
    what, size = next(iter(single.items()))
    ranks = f"{'virtual ' * (step.virtual_ranks is not None)}rank{'s' * (parts != 1)}"
    cures = ["--drop-last"] if whole and "a batch" not in single else []
    cures += ["another batch size", *["fewer passes"] * (step.accumulate > 1), *[f"fewer {ranks}"] * (parts > 1)]
    cure = " or ".join(filter(None, [", ".join(cures[:-1]), cures[-1]]))
    passes = f"{step.accumulate} pass{'es' * (step.accumulate != 1)}"
    raise UserError(
        f"--model {name} cannot be trained on one sample ({in_one_line(error)}), and {what} has {size} "
        f"sample{'s' * (size != 1)} for {parts} {ranks} × {passes}: give {cure}",
        trace=user_traceback(error),
    ) from error


def smallest_pass(size: int, parts: int, accumulate: int) -> int:
    """Return the number of samples in the smallest pass when ``BatchPlan`` splits a global batch of ``size`` samples."""
    lengths = [length for length in (size // parts, -(-size // parts)) if length]
    return min(length // min(accumulate, length) for length in lengths)


@torch.no_grad()
def _error_of_one_sample(model: nn.Module, task: Task) -> Exception | None:
    """Return the error that a copy of ``model`` raises for one sample, but not for two; ``None`` if there is none."""
    device = next(model.parameters()).device
    before = random_state(device)
    try:
        inputs = _sample(task, device)[0].to(device)
        tried = copy.deepcopy(model)
        tried(torch.cat([inputs, inputs]))
    except Exception:  # deepcopy may fail for a correct model; the first step will report other errors
        return None
    else:
        try:
            tried(inputs)
        except Exception as error:
            return error
        return None
    finally:
        restore_random_state(before, device)


def _sample(task: Task, device: torch.device) -> Tensors:
    """Return a batch of one training sample, or of one validation sample if ``ready_samples`` yields no training sample."""
    sample = next(iter(ready_samples(task.train, [0])), None)
    if sample is None:
        sample = first_validation_sample(task, device)
    return sample
