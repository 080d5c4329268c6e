"""One process on several GPUs: torch's ``nn.DataParallel``, with the loss computed where the outputs are.

``nn.DataParallel`` copies a model to every GPU, gives each a part of the batch, and gathers the outputs on one of them.
A loss beside the model then works on that one GPU alone, and needs all outputs there. A loss inside it (``WithLoss``)
leaves four sums of each GPU to gather.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional

from dualtrain.errors import UserError
from dualtrain.training.objective import IGNORED

_Module = TypeVar("_Module", bound=nn.Module)


def sums(logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Cross entropy and right answers of one batch, as sums that those of other batches can be added to.

    Args:
        logits: (…, classes), of any floating dtype; computed in float32 at least.
        targets: class numbers, (…), int64; those of -100 do not count.
        label_smoothing: the probability that is taken from the true class for all.

    Returns:
        The loss, how many targets count, how many are right, and right among the first five: ``objective.NAMES``,
        float64, (4,), on the logits' device. The first has its gradient. The mean loss is the first by the second, where
        that is not 0. Does not wait for the device.
    """
    logits, targets = logits.flatten(0, -2), targets.flatten()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = functional.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED, label_smoothing=label_smoothing)
    with torch.no_grad():
        counted = targets != IGNORED
        best = logits.topk(min(5, logits.shape[1]), 1).indices
        right = (best == targets[:, None]) & counted[:, None]
        counts = [counted.sum(), right[:, 0].sum(), right.sum()]
    return torch.stack([loss.double(), *(count.double() for count in counts)])


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
    """``module`` on all GPUs that this process sees: a model, or one ``WithLoss``.

    Inputs are taken on ``device`` and cut as by ``Tensor.chunk``: equal parts, the last one smaller, on fewer GPUs where
    there is not enough for all. Buffers (running statistics of batch norm) are those that the first part gives.

    Args:
        module: has its parameters on ``device``.
        device: a GPU.
        output_device: the number of the GPU that what ``module`` returns is gathered on; that of ``device`` by default.

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
