"""Importing this module loads what the ranks of most tests load, where it is installed; the fork server does so."""

from __future__ import annotations

import importlib
import importlib.util

import torch

#: Not dualtrain.main, which tests run as __main__; not Horovod, whose place horovodize takes in scripts.
MODULES = [
    *("torch._dynamo", "torch.distributed", "torchinfo", "safetensors.torch", "PIL.Image"),
    *("dualtrain.training.loop", "dualtrain.hvd.elastic", "dualtrain.predict", "tests.models_for_tests"),
]

for name in MODULES:
    if importlib.util.find_spec(name.partition(".")[0]) is not None:
        importlib.import_module(name)
importlib.import_module("dualtrain.torchvision_shim").torchvision()
torch.set_num_threads(1)
