"""The functions of ``horovod.common.util`` that scripts and Horovod's tests use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from dualtrain.backends.reductions import split_sizes
from dualtrain.hvd import basics
from dualtrain.rendezvous import hosts

T = TypeVar("T")
#: Decorator that caches results of a function. Horovod's tests import it by this name.
_cache = cache


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables within this context. A variable that is given as None keeps its value."""
    with hosts.variables({name: value for name, value in variables.items() if value is not None}):
        yield


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Split ``items`` into ``parts`` consecutive parts of nearly equal length; the first parts are the longer ones."""
    ends = list(accumulate(split_sizes(len(items), parts), initial=0))
    return [items[start:end] for start, end in pairwise(ends)]


def num_rank_is_power_2(ranks: int) -> bool:
    """Return whether ``ranks`` is a power of two."""
    return ranks > 0 and ranks & (ranks - 1) == 0


def is_iterable(value: Any) -> bool:
    """Return whether ``value`` is iterable."""
    return isinstance(value, Iterable)


def extension_available(framework: str, verbose: bool = False) -> bool:
    """Return whether ``horovod.FRAMEWORK`` can be imported: torch is the only framework that dualtrain supports."""
    return framework == "torch"


def gpu_available(framework: str = "torch", verbose: bool = False) -> bool:
    """Return whether torch can use a GPU."""
    import torch

    return torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    """Return False: torch.distributed sends the tensors."""
    return False


def gloo_built(verbose: bool = False) -> bool:
    """Return True: Gloo sends CPU tensors."""
    return True


def nccl_built(verbose: bool = False) -> int:
    """Return the version of torch's NCCL, such as 22703; 0 if torch was built without CUDA."""
    return basics.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """Return False: IBM's DDL is not used."""
    return basics.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """Return False: Intel's oneCCL is not used."""
    return basics.ccl_built()
