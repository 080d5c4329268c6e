"""Run a function on several ranks of this host. See also ``dualtrain.spark`` and ``dualtrain.ray``."""

from dualtrain.functions.local import horovod_run, run

__all__ = ["horovod_run", "run"]
