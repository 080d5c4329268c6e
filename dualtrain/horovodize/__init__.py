"""Runner for unmodified Horovod scripts on torch.distributed, and a checker that finds differences in their source."""

from dualtrain.horovodize.imports import install, uninstall

__all__ = ["install", "uninstall"]
