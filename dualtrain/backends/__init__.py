"""Communication between processes: the backend contract, the collectives derived from it, and one file per library."""

from dualtrain.backends.base import ReduceOp, Work
from dualtrain.backends.collectives import Backend
from dualtrain.backends.factory import connect
from dualtrain.backends.job import job_of

__all__ = ["Backend", "ReduceOp", "Work", "connect", "job_of"]
