"""One PyTorch training loop over two communication backends: torch.distributed and Horovod."""

from dualtrain.backends import Backend, ReduceOp, Work, connect
from dualtrain.errors import BackendError, UserError
from dualtrain.optimizer import DistributedOptimizer
from dualtrain.state import average_buffers, broadcast_optimizer_state, broadcast_parameters, weights_sha256
from dualtrain.version import __version__

__all__ = [
    "Backend",
    "BackendError",
    "DistributedOptimizer",
    "ReduceOp",
    "UserError",
    "Work",
    "__version__",
    "average_buffers",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "connect",
    "weights_sha256",
]
