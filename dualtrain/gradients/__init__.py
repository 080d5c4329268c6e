"""Average gradients over the ranks while backward runs: layout, schedule, and the reducer that uses both."""

from dualtrain.gradients.buckets import AVERAGE, Transfer
from dualtrain.gradients.reducer import GradientReducer, Unused

__all__ = ["AVERAGE", "GradientReducer", "Transfer", "Unused"]
