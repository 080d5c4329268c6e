"""Horovod, used as in its documentation. The launcher chooses Gloo or MPI."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from dualtrain.bench.contenders import Contender
from dualtrain.bench.horovod_script import HorovodScript


def start(option: str, device: torch.device) -> Contender:
    """Join the world and return the contender; see ``contenders``."""
    return HorovodScript(hvd, device)
