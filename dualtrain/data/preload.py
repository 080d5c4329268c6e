"""Imports for worker processes: the fork server loads this module once, so that each worker starts quickly."""

from dualtrain.data import image_folder
from dualtrain.data.transforms import v2
from dualtrain.processes import hide_lost_starts

__all__ = ["image_folder"]

hide_lost_starts()
v2()
