"""The way across for whole scripts: a Horovod script runs on torch.distributed without a change, or is read for traps."""

from dualtrain.horovodize.imports import install, uninstall

__all__ = ["install", "uninstall"]
