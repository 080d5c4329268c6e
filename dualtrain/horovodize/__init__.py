"""Runner for unmodified Horovod scripts on torch.distributed, and a checker that reads them for differences."""

from dualtrain.horovodize.imports import install, uninstall

__all__ = ["install", "uninstall"]
