"""Functions that run on several ranks: in processes of this host here, on Spark's and Ray's workers in their packages."""

from dualtrain.functions.local import horovod_run, run

__all__ = ["horovod_run", "run"]
