"""The training script in ``horovod_script.py``, with ``dualtrain.hvd`` in place of ``horovod.torch``."""

from __future__ import annotations

import torch

import dualtrain.hvd as hvd
from dualtrain.bench.contenders import Contender
from dualtrain.bench.horovod_script import HorovodScript
from dualtrain.heap import keep_freed_memory, use_huge_pages


def start(option: str, device: torch.device) -> Contender:
    """Join the world and return the contender; see ``contenders``.

    On the CPU, also change the memory settings that ``dualtrain horovodize`` changes before it runs a script.
    """
    if device.type == "cpu":
        keep_freed_memory()
        use_huge_pages()
    return HorovodScript(hvd, device)
