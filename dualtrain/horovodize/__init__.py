"""Runner for unmodified Horovod scripts on torch.distributed, and a checker of their source code."""

from dualtrain.horovodize.imports import install, uninstall

__all__ = ["install", "uninstall"]
