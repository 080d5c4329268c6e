"""One process on several GPUs: torch's ``nn.DataParallel``, optionally with the loss computed on each GPU.

``nn.DataParallel`` copies a model to every GPU, gives each GPU a part of the batch, and gathers the outputs on one GPU.
A loss outside the model is computed on that GPU alone, from all outputs. With the loss inside the model (``WithLoss``),
only four sums of each GPU are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from dualtrain.errors import UserError
from dualtrain.trainer.objective import cross_entropy

Measure = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
_Module = TypeVar("_Module", bound=nn.Module)


def sums(logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return the sums ``objective.NAMES`` of the cross entropy: shape (4,), float64. The first (loss) is differentiable."""
    losses, found = cross_entropy(logits, targets, label_smoothing)
    return torch.cat([losses.double().sum()[None], found[1:]])


class WithLoss(nn.Module):
    """A model and its loss as one module. Optimizers and checkpoints use the model alone, which has all weights."""

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the :func:`sums` of this GPU's part of the batch, in shape (1, 4), to be gathered as (n, 4) for n GPUs."""
        return sums(self.model(inputs), targets, self.label_smoothing)[None]


def replicate(module: _Module, device: torch.device, output_device: int | None = None) -> nn.DataParallel[_Module]:
    """Replicate ``module``, a model or a ``WithLoss``, on all GPUs that this process sees.

    Inputs on ``device`` are split as by ``Tensor.chunk``: into equal parts, except that the last may be smaller. A small
    batch can leave some GPUs without samples. Only the first part changes the module's buffers (running statistics of
    BatchNorm).

    Args:
        module: a module with its parameters on ``device``.
        device: a GPU.
        output_device: the index of the GPU on which the outputs are gathered; by default ``device``.

    Raises:
        UserError: ``device`` is not a GPU, or no GPU has the index ``output_device``.
    """
    if device.type != "cuda":
        raise UserError(
            f"nn.DataParallel needs GPUs: on the {device.type} device it would run a single copy of the model; start ranks "
            "instead, with torchrun --nproc_per_node=N or with --nproc N"
        )
    count = torch.cuda.device_count()
    first = device.index if device.index is not None else torch.cuda.current_device()
    if output_device is not None and not 0 <= output_device < count:
        raise UserError(
            f"--output-device {output_device} does not exist: torch sees {count} GPU{'s' * (count != 1)} on this host, "
            "numbered from 0; give one of these"
        )
    # The GPU that holds the parameters comes first, because nn.DataParallel copies them from the first GPU.
    others = [number for number in range(count) if number != first]
    return nn.DataParallel(module, device_ids=[first, *others], output_device=output_device)


def measured(model: nn.Module, device: torch.device, output_device: int | None, label_smoothing: float) -> Measure:
    """Make a function of (inputs, targets) that computes the loss on every GPU, in the replicas.

    It is the ``measure`` of a ``Trainer``. Raises UserError: see :func:`replicate`.
    """
    replicas = replicate(WithLoss(model, label_smoothing), device, output_device)

    def measure(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = replicas(inputs, targets).sum(0)
        found = total.detach().cpu()
        return total[0] / max(found[1].item(), 1.0), found

    return measure
