"""One process on several GPUs: torch's ``nn.DataParallel``, with the loss computed where the outputs are.

``nn.DataParallel`` copies a model to every GPU, gives each a part of the batch, and gathers the outputs on one of them.
A loss beside the model then works on that one GPU alone, and needs all outputs there. A loss inside it (``WithLoss``)
leaves four sums of each GPU to gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from dualtrain.errors import UserError
from dualtrain.training.objective import cross_entropy

Measure = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
_Module = TypeVar("_Module", bound=nn.Module)


def sums(logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Compute ``objective.cross_entropy`` as four sums, (4,), float64, the first (the loss) with its gradient."""
    losses, found = cross_entropy(logits, targets, label_smoothing)
    return torch.cat([losses.double().sum()[None], found[1:]])


class WithLoss(nn.Module):
    """A model and its loss as one module. Its weights are the model's own, for optimizers and checkpoints of that."""

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """:func:`sums` of this part of the batch, (1, 4): gathered from n GPUs they are (n, 4), to be summed over n."""
        return sums(self.model(inputs), targets, self.label_smoothing)[None]


def replicate(module: _Module, device: torch.device, output_device: int | None = None) -> nn.DataParallel[_Module]:
    """Replicate ``module``, a model or a ``WithLoss``, on all GPUs that this process sees.

    Inputs are taken on ``device`` and split as by ``Tensor.chunk``: equal parts, the last one smaller, on fewer GPUs where
    there are fewer samples. Buffers (running statistics of BatchNorm) are those of the first part.

    Args:
        module: has its parameters on ``device``.
        device: a GPU.
        output_device: the number of the GPU on which the outputs are gathered; by default that of ``device``.

    Raises:
        UserError: ``device`` is no GPU, or there is no GPU of the number ``output_device``.
    """
    if device.type != "cuda":
        raise UserError(
            f"nn.DataParallel needs GPUs: on the {device.type} device it would only run the one model; start ranks "
            "instead, with torchrun --nproc_per_node=N or with --nproc N"
        )
    count = torch.cuda.device_count()
    first = device.index if device.index is not None else torch.cuda.current_device()
    if output_device is not None and not 0 <= output_device < count:
        raise UserError(
            f"--output-device {output_device} is not there: torch sees {count} GPUs on this host, from number 0 on; "
            "give one of these"
        )
    # The parameters' GPU comes first: nn.DataParallel copies from there.
    others = [number for number in range(count) if number != first]
    return nn.DataParallel(module, device_ids=[first, *others], output_device=output_device)


def measured(model: nn.Module, device: torch.device, output_device: int | None, label_smoothing: float) -> Measure:
    """Make an objective that computes the loss on every GPU, inside the replicas. Raises as :func:`replicate`."""
    replicas = replicate(WithLoss(model, label_smoothing), device, output_device)

    def measure(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = replicas(inputs, targets).sum(0)
        found = total.detach().cpu()
        return total[0] / max(found[1].item(), 1.0), found

    return measure
