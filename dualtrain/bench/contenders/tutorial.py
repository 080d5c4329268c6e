"""An MNIST script as in tutorials: torchvision's dataset and transforms, torch's DataLoader, DistributedDataParallel.

It trains the usual tutorial ConvNet with the optimizer and batch size of the recipe ``mnist-convnet``.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from dualtrain.bench.contenders import Contender
from dualtrain.torchvision_shim import torchvision


class ConvNet(nn.Module):
    """The ConvNet that MNIST tutorials use."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, stride=1, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2, 2)
        )
        self.layer2 = nn.Sequential(
            nn.Conv2d(16, 32, kernel_size=5, stride=1, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2, 2)
        )
        self.fc = nn.Linear(7 * 7 * 32, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits of the images ``x``."""
        out: torch.Tensor = self.fc(self.layer2(self.layer1(x)).flatten(1))
        return out


class Tutorial(Contender):
    """The training loop that MNIST tutorials use."""

    def __init__(self, device: torch.device) -> None:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device

    def loader(self, folder: str, batch: int) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
        """Return the loader of this rank's part of the training samples."""
        vision = torchvision()
        data = vision.datasets.MNIST(folder, train=True, transform=vision.transforms.ToTensor())
        sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=self.size, rank=self.rank)
        return DataLoader(data, batch_size=batch, shuffle=False, num_workers=0, pin_memory=True, sampler=sampler)

    def feed(self, folder: str, batch: int) -> int:
        """See the base class."""
        return sum(len(targets) for _, targets in self.loader(folder, batch))

    def epoch(self, folder: str, batch: int, lr: float) -> dict[str, float]:
        """Train for one epoch; return its seconds and the accuracy on the test samples."""
        torch.manual_seed(0)
        model = DistributedDataParallel(ConvNet().to(self.device))
        criterion = nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr)
        loader = self.loader(folder, batch)
        dist.barrier()
        began = time.perf_counter()
        for images, labels in loader:
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            outputs = model(images)
            loss = criterion(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        float(loss)  # wait for the kernels of a GPU
        return {"seconds": time.perf_counter() - began, "accuracy": self._accuracy(model.module, folder)}

    @torch.no_grad()
    def _accuracy(self, model: nn.Module, folder: str) -> float:
        vision = torchvision()
        data = vision.datasets.MNIST(folder, train=False, transform=vision.transforms.ToTensor())
        model.eval()
        right = sum(
            int((model(images.to(self.device)).argmax(1).cpu() == labels).sum()) for images, labels in DataLoader(data, 500)
        )
        return right / len(data)

    def close(self) -> None:
        """See the base class."""
        dist.destroy_process_group()


def start(option: str, device: torch.device) -> Contender:
    """Join the world and return the contender; see ``contenders``."""
    return Tutorial(device)
