"""Horovod's API: ``import dualtrain.hvd as hvd`` in place of ``import horovod.torch as hvd``.

If Horovod's own launcher or MPI started the process and Horovod is installed, this module is the real
``horovod.torch``. Otherwise the same API runs on torch.distributed. DUALTRAIN_BACKEND=torch or =horovod overrides this
choice. On torch.distributed, rank 0 matches the ranks' calls by name (``engine.py``, ``coordinator.py``). An optimizer's
gradients are usually sent without this matching (``optimizer.py``). Modules such as ``mpi_ops`` have the names of Horovod's
modules, so that programs can also import from them. On torch.distributed, if a launcher other than MPI started the process,
the import also sets HOROVOD_RANK and similar variables, except those that are set already.
"""

from __future__ import annotations

import os

from dualtrain.backends.factory import choose_for_horovod_api

if choose_for_horovod_api(os.environ) == "horovod":
    from dualtrain.backends.factory import replace_by_horovod

    replace_by_horovod(__name__)
else:
    from dualtrain.horovod_variables import set_rank_variables
    from dualtrain.hvd import elastic
    from dualtrain.hvd.compression import Compression
    from dualtrain.hvd.functions import (
        allgather_object,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
    )
    from dualtrain.hvd.mpi_ops import *  # noqa: F403
    from dualtrain.hvd.mpi_ops import __all__ as _operations
    from dualtrain.hvd.optimizer import DistributedOptimizer
    from dualtrain.hvd.sync_batch_norm import SyncBatchNorm
    from dualtrain.launchers import detect_world

    __all__ = [
        *_operations,
        "Compression",
        "DistributedOptimizer",
        "SyncBatchNorm",
        "allgather_object",
        "broadcast_object",
        "broadcast_optimizer_state",
        "broadcast_parameters",
        "elastic",
    ]
    if detect_world().launcher != "none":
        set_rank_variables()
