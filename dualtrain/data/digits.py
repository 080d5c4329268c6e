"""1,797 real handwritten digits of 8×8 pixels that come with scikit-learn: data where there is no network.

E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI Machine Learning Repository (1998), test part.
"""

from __future__ import annotations

import sklearn.datasets
import torch

from dualtrain.data import Data, Split

VALIDATION_SAMPLES = 360


def load_digits() -> Data:
    """The digits, scaled to [0, 1], 360 of them set aside by a fixed draw."""
    bunch = sklearn.datasets.load_digits()
    inputs = torch.tensor(bunch.images, dtype=torch.float32).div_(16).unsqueeze_(1)
    targets = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    val, train = order[:VALIDATION_SAMPLES], order[VALIDATION_SAMPLES:]
    return Data(Split(inputs[train], targets[train]), Split(inputs[val], targets[val]), classes=10)
