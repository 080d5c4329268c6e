"""Datasets: their names, the sources of samples, and the order in which samples are taken."""

from dualtrain.data.catalog import load_data
from dualtrain.data.sources import Batch, Source, Task

__all__ = ["Batch", "Source", "Task", "load_data"]
