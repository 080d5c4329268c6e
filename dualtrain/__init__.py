"""One PyTorch training loop over two communication backends: torch.distributed and Horovod.

``connect`` joins the ranks, and returns a ``Backend``, which has the collective operations. ``DistributedOptimizer``
averages gradients over the ranks, for a training loop of your own. ``Trainer`` takes whole training steps: forward,
backward and the optimizer's step. ``run`` calls a function on several ranks of this host.

These modules are public too; import them before you use them: ``dualtrain.hvd`` (Horovod's API), ``dualtrain.functional``
(differentiable collectives), ``dualtrain.batchnorm`` (``synchronize_norms``), ``dualtrain.data`` (``Task``),
``dualtrain.gradients`` (``GradientReducer``), ``dualtrain.spark`` and ``dualtrain.ray``.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from dualtrain.errors import (
    BackendError,
    DivergedError,
    PeerFailedError,
    PeerFailure,
    RankFailedError,
    RanksDifferError,
    UserError,
)
from dualtrain.version import __version__

if TYPE_CHECKING:
    from dualtrain.backends import Backend, ReduceOp, Work, connect
    from dualtrain.functions import run
    from dualtrain.heap import keep_freed_memory
    from dualtrain.launchers import World
    from dualtrain.optimizer import DistributedOptimizer
    from dualtrain.state import average_buffers, broadcast_optimizer_state, broadcast_parameters, weights_sha256
    from dualtrain.trainer.objective import Objective
    from dualtrain.trainer.trainer import Trainer

__all__ = [
    "Backend",
    "BackendError",
    "DistributedOptimizer",
    "DivergedError",
    "Objective",
    "PeerFailedError",
    "PeerFailure",
    "RankFailedError",
    "RanksDifferError",
    "ReduceOp",
    "Trainer",
    "UserError",
    "Work",
    "World",
    "__version__",
    "average_buffers",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "connect",
    "keep_freed_memory",
    "run",
    "weights_sha256",
]

#: Names that are imported at their first use, so that the command line can reject a bad flag without importing torch.
_MODULES = {
    "dualtrain.backends": ("Backend", "ReduceOp", "Work", "connect"),
    "dualtrain.functions": ("run",),
    "dualtrain.heap": ("keep_freed_memory",),
    "dualtrain.launchers": ("World",),
    "dualtrain.optimizer": ("DistributedOptimizer",),
    "dualtrain.state": ("average_buffers", "broadcast_optimizer_state", "broadcast_parameters", "weights_sha256"),
    "dualtrain.trainer.objective": ("Objective",),
    "dualtrain.trainer.trainer": ("Trainer",),
}
#: Not imported at their first use, because importing one of them, ``hvd``, sets environment variables.
_PUBLIC_MODULES = ("batchnorm", "data", "functional", "gradients", "hvd", "ray", "spark")


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    if name in _PUBLIC_MODULES:
        raise AttributeError(f"dualtrain.{name} is a module that is not imported yet: add `import dualtrain.{name}`")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
