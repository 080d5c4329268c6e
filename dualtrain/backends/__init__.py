"""How tensors travel between processes: the contract, what is derived from it, and one file for each library."""

from dualtrain.backends.base import ReduceOp, Work
from dualtrain.backends.collectives import Backend
from dualtrain.backends.factory import connect

__all__ = ["Backend", "ReduceOp", "Work", "connect"]
