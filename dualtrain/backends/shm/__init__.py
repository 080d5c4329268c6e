"""Reductions through memory that the ranks of a host share, on top of a library's backend."""

from dualtrain.backends.shm.backend import SharedMemoryBackend
from dualtrain.backends.shm.reductions import SharedMemory
from dualtrain.backends.shm.segment import UnsharedError

__all__ = ["SharedMemory", "SharedMemoryBackend", "UnsharedError"]
