"""The dataset that is part of the package: 1,797 real handwritten digits of 8×8 pixels, for machines without a network.

E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI Machine Learning Repository (1998), test part.
Source, license (CC BY 4.0) and changes are in ``digits.LICENSE``, beside the data.
"""

from __future__ import annotations

from importlib import resources

import numpy
import torch

from dualtrain.data.sources import Tensors

LARGEST_PIXEL = 16  # pixels are integers from 0 to 16
VALIDATION_SAMPLES = 360


def read_digits() -> tuple[Tensors, Tensors]:
    """Read the training and the validation part. The 360 validation samples are chosen at random with a fixed seed.

    Returns:
        For each part the images, float32 (n, 1, 8, 8), scaled to [0, 1], and the classes, int64 (n,).
    """
    with resources.files("dualtrain.data").joinpath("digits.npz").open("rb") as file, numpy.load(file) as arrays:
        images, classes = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["classes"])
    inputs, targets = images.to(torch.float32).div_(LARGEST_PIXEL).unsqueeze_(1), classes.to(torch.int64)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    val, train = order[:VALIDATION_SAMPLES], order[VALIDATION_SAMPLES:]
    return (inputs[train], targets[train]), (inputs[val], targets[val])
