"""Run a function on several ranks of this host. ``dualtrain.spark`` and ``dualtrain.ray`` run it on their workers."""

from dualtrain.functions.local import horovod_run, run

__all__ = ["horovod_run", "run"]
