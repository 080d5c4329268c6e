"""Imported once by the server that worker processes are forked from, so that each of them starts at once."""

from dualtrain.data import files
from dualtrain.data.transforms import v2

__all__ = ["files"]

v2()
