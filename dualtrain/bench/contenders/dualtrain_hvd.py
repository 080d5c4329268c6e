"""The Horovod script of ``horovod_script.py`` on ``dualtrain.hvd``, as ``horovodize`` runs such a script."""

from __future__ import annotations

import torch

import dualtrain.hvd as hvd
from dualtrain import keep_freed_memory
from dualtrain.bench.contenders import Contender
from dualtrain.bench.horovod_script import HorovodScript


def start(option: str, device: torch.device) -> Contender:
    """Join the world and return the contender; see ``contenders``.

    On the CPU, call ``keep_freed_memory`` as ``horovodize`` does.
    """
    if device.type == "cpu":
        keep_freed_memory()
    return HorovodScript(hvd, device)
