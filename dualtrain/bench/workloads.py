"""Workloads: the models and batches, which are the same for every contender."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from dualtrain.bench.plan import LENGTHS, steps_of

DISTINCT = 4  # number of different batches per rank; the steps use them in rotation
Tensors = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, and the shape of one rank's batch."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    bf16: bool = False
    channels_last: bool = False


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        shortcut = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        self.downsample = nn.Sequential(*shortcut) if stride != 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        return torch.relu(x + identity)


def resnet18() -> nn.Module:
    """Build torchvision's ResNet-18 without torchvision, whose import would take longer than the measured steps."""
    widths = (64, 64, 128, 256, 512)
    blocks = [
        nn.Sequential(_Block(before, width, 1 if width == before else 2), _Block(width, width, 1))
        for before, width in pairwise(widths)
    ]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))


def _wide_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))


def _convnet() -> nn.Module:
    from dualtrain.models.small import mnist_convnet

    return mnist_convnet((1, 28, 28), 10)


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))  # type: ignore[no-any-return]


def _vgg() -> nn.Module:
    widths = (3, 64, 128, 256, 256, 512, 512)
    pooled = (1, 2, 4, 6)  # the convolutions, counted from 1, after which there is a pooling layer
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(pairwise(widths), 1):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (number in pooled)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def _chain(width: int, count: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(count - 1):
        layer = nn.Linear(width, width)
        # With torch's default initialization, gradients shrink in every layer until they are denormal, which is slow.
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


WORKLOADS = {
    "tiny": Workload(lambda: nn.Linear(8, 2), (4, 8)),
    "layers20": Workload(lambda: _chain(32, 20), (16, 32)),
    "empty": Workload(lambda: nn.Linear(1, 2, bias=False), (1, 1)),
    "small": Workload(lambda: _chain(68, 100), (32, 68)),
    "convnet": Workload(_convnet, (100, 1, 28, 28)),
    "resnet18": Workload(resnet18, (32, 3, 32, 32)),
    "mlp": Workload(_mlp, (128, 784)),
    "resnet18-cl": Workload(resnet18, (32, 3, 32, 32), channels_last=True),
    "resnet18-bf16-cl": Workload(resnet18, (32, 3, 32, 32), bf16=True, channels_last=True),
    "virtual-convnet": Workload(_convnet, (100, 1, 28, 28)),
    "virtual-resnet18": Workload(resnet18, (32, 3, 32, 32)),
    "virtual-mlp": Workload(_mlp, (128, 784)),
    "transformer": Workload(_Transformer, (8, 64, 256)),
    "vgg": Workload(_vgg, (16, 3, 32, 32)),
    "mlp33m": Workload(_wide_mlp, (32, 4096)),
    "layers250": Workload(lambda: _chain(32, 250), (16, 32)),
    "linear": Workload(lambda: nn.Linear(4096, 2048), (4, 4096)),
}


class Task:
    """One workload for one contender: the model, the batches of a rank, and the number of steps.

    ``step_fraction`` is the fraction of the workload's timed steps that is run; at least two steps are run.
    """

    lr = 0.001

    def __init__(self, name: str, device: torch.device, step_fraction: float) -> None:
        self.workload = WORKLOADS[name]
        self.device = device
        self.warmup, self.steps = LENGTHS[name][0], steps_of(name, step_fraction)

    def model(self) -> nn.Module:
        """Build the model, with equal weights in every process and for every contender."""
        torch.manual_seed(0)
        layout = torch.channels_last if self.workload.channels_last else torch.preserve_format
        return self.workload.build().to(device=self.device, memory_format=layout)  # type: ignore[call-overload,no-any-return]

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context; it is disabled unless the workload uses bf16."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.workload.bf16)

    def batches(self, rank: int) -> Iterator[Tensors]:
        """Yield the batches of all steps."""
        batches = self.distinct_batches(rank)
        for number in range(self.warmup + self.steps):
            yield batches[number % DISTINCT]

    def distinct_batches(self, rank: int) -> list[Tensors]:
        """Return the ``DISTINCT`` batches of a rank."""
        generator = torch.Generator().manual_seed(1 + rank)
        return [self._draw(generator) for _ in range(DISTINCT)]

    def _draw(self, generator: torch.Generator) -> Tensors:
        layout = torch.channels_last if self.workload.channels_last else torch.contiguous_format
        inputs = torch.randn(self.workload.shape, generator=generator)
        targets = torch.randint(2, self.workload.shape[:1], generator=generator)
        return inputs.to(self.device).contiguous(memory_format=layout), targets.to(self.device)
