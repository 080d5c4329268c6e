"""One PyTorch training loop over two communication backends: torch.distributed and Horovod."""

from dualtrain.backends import Backend, ReduceOp, Work, connect
from dualtrain.errors import BackendError, UserError
from dualtrain.version import __version__

__all__ = ["Backend", "BackendError", "ReduceOp", "UserError", "Work", "__version__", "connect"]
