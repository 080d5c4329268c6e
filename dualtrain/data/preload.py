"""Imports for worker processes: the fork server loads this module once, so that each worker starts quickly."""

from dualtrain.data import image_folder
from dualtrain.data.transforms import v2

__all__ = ["image_folder"]

v2()
