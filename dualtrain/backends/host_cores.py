"""The number of cores that the ranks of a host may use together, by their CPU affinities."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import reduce
from operator import or_

from dualtrain.backends.agreement import Exchange

_NUMBERS = 64  # how many 62-bit integers encode a set of cores


def cores_of_host(exchange: Exchange, hosts: Sequence[int], rank: int) -> int:
    """Return how many cores the ranks on the host of ``rank`` may use together. Collective; blocks.

    Args:
        exchange: gathers integers over all ranks.
        hosts: the index of each rank's host, in rank order.
        rank: this process's rank.
    """
    mine = sum(1 << cpu for cpu in os.sched_getaffinity(0))
    gathered = exchange([mine >> 62 * n & (1 << 62) - 1 for n in range(_NUMBERS)])
    here = [mask for mask, host in zip(gathered, hosts, strict=True) if host == hosts[rank]]
    return sum(reduce(or_, masks).bit_count() for masks in zip(*here, strict=True))
