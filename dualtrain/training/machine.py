"""What a machine contributes to the bits of a result: intra-op threads."""

from __future__ import annotations

import os

import torch

from dualtrain.backends import Backend
from dualtrain.config import MOST_THREADS
from dualtrain.console import show
from dualtrain.cores import share_of, usable_cores


def threads(backend: Backend) -> int:
    """Return the default of ``--threads``: each rank's share of its host's cores, the least of all ranks. Collective."""
    mine = min(MOST_THREADS, share_of(usable_cores(), backend.local_size))
    return int(min(backend.allgather_object(mine, name="default number of intra-op threads")))


def use_threads(number: int, backend: Backend) -> None:
    """Set the number of intra-op threads of this process, and print a line on rank 0 if OMP_NUM_THREADS is another one."""
    torch.set_num_threads(number)
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    # torchrun sets it to 1 where the user has set nothing, and a rank cannot tell which: the line is true in both cases.
    if backend.rank == 0 and text and text.partition(",")[0].strip() != str(number):
        show(
            f"OMP_NUM_THREADS={text} has no influence: the number of intra-op threads of a rank is {number}, "
            "and --threads sets it when a run starts"
        )
