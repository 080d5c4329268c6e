"""Average gradients over the ranks while backward runs: layout, schedule, exchange, and the reducer that uses them."""

from dualtrain.gradients.exchange import Unused
from dualtrain.gradients.layout import AVERAGE, Transfer
from dualtrain.gradients.reducer import GradientReducer

__all__ = ["AVERAGE", "GradientReducer", "Transfer", "Unused"]
