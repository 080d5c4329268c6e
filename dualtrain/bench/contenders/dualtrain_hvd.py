"""The training script in ``horovod_script.py``, with ``dualtrain.hvd`` in place of ``horovod.torch``."""

from __future__ import annotations

import torch

import dualtrain.hvd as hvd
from dualtrain import keep_freed_memory
from dualtrain.bench.contenders import Contender
from dualtrain.bench.horovod_script import HorovodScript


def start(option: str, device: torch.device) -> Contender:
    """Join the world and return the contender; see ``contenders``.

    On the CPU, also call ``keep_freed_memory``, because ``dualtrain horovodize`` does so before it runs a script.
    """
    if device.type == "cpu":
        keep_freed_memory()
    return HorovodScript(hvd, device)
