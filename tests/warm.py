"""Imports that the ranks of most tests need. The fork server imports this module once."""

from __future__ import annotations

import gc
import importlib
import importlib.util

import torch

#: Not in this list: dualtrain.main, because tests run it as __main__; Horovod, because horovodize replaces it.
MODULES = [
    *("torch._dynamo", "torch.distributed", "torchinfo", "safetensors.torch", "PIL.Image"),
    *("dualtrain.training.loop", "dualtrain.hvd.elastic", "dualtrain.predict", "tests.models_for_tests"),
]

for name in MODULES:
    if importlib.util.find_spec(name.partition(".")[0]) is not None:
        importlib.import_module(name)
importlib.import_module("dualtrain.torchvision_shim").torchvision()
torch.set_num_threads(1)
# Freeze the objects of these modules: otherwise each garbage collection would visit them, and copy their memory in each
# forked process.
gc.collect()
gc.freeze()
