"""Batch normalization with the statistics of all ranks' samples, on any device.

In training, each layer needs two collective operations: forward gathers every rank's statistics, and backward, if the
input needs a gradient, sums two numbers per channel over the ranks to compute it. Ranks may have different numbers of
samples.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

# Private in torch 2.5 to 2.15: the base class of BatchNorm1d, 2d and 3d, which has no public name.
from torch.nn.modules.batchnorm import _BatchNorm

from dualtrain.backends import Backend
from dualtrain.backends.collectives import check_backend
from dualtrain.backends.compilation import not_compiled
from dualtrain.backends.sum_order import SumOrder
from dualtrain.gradients.parameters import check_module

log = logging.getLogger("dualtrain")
_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_ABSTRACT = "this layer has no backend: convert the model with dualtrain.batchnorm.synchronize_norms(model, backend)"

Exchange = Callable[[torch.Tensor], torch.Tensor]


class SynchronizedNorm(torch.autograd.Function):
    """Normalization of ``input`` (N, C, …) per channel by the mean and variance over all ranks' samples."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: Any, bias: Any, eps: float, gather: Exchange, total: Exchange
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the normalized input, and mean (C,), variance (C,) and number of values per channel () over all ranks.

        Raises:
            ValueError: on all ranks, if all ranks together have fewer than two values per channel.
        """
        x, dims = _wide(input), [0, *range(2, input.dim())]
        count = x.numel() / max(x.shape[1], 1)
        mean = x.mean(dims) if count else x.new_zeros(x.shape[1])
        spread = (x - _channels(mean, x)).square().sum(dims)
        rows = gather(torch.cat([mean.new_tensor([count]), mean, spread]).double())
        counts, means, spreads = rows[:, :1], *rows[:, 1:].chunk(2, 1)
        n = counts.sum()
        if n < 2:  # on all ranks, after the same collective operation
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {input.shape} and {n:.0f} over all "
                "ranks: use larger batches"
            )
        # Combine the ranks' variances without cancellation of digits (Chan, Golub and LeVeque, 1983).
        mean_all = (counts * means).sum(0) / n
        var = ((spreads + counts * (means - mean_all).square()).sum(0) / n).to(x.dtype)
        mean_all = mean_all.to(x.dtype)
        invstd = torch.rsqrt(var + eps)
        ctx.save_for_backward(input, weight, mean_all, invstd, n)
        ctx.total = total
        out = (x - _channels(mean_all, x)) * _channels(invstd if weight is None else invstd * weight, x)
        out = out if bias is None else out + _channels(bias, x)
        ctx.mark_non_differentiable(mean_all, var, n)
        return out.to(input.dtype), mean_all, var, n

    @staticmethod
    @not_compiled
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> Any:
        """Return the gradients of the input (from all ranks' samples), weight and bias (from this rank's samples only).

        These gradients cannot be differentiated again (RuntimeError), as in torch.nn.SyncBatchNorm: ``_gradients`` uses
        ``mean`` and ``invstd`` as constants, although they depend on the input.
        """
        saved = ctx.saved_tensors  # torch.utils.checkpoint refuses to return them twice
        with torch.no_grad():
            gradients = SynchronizedNorm._gradients(ctx, grad, saved)
        input, weight, *_ = saved
        return *_NotDifferentiable.apply(gradients, grad, input, weight), None, None, None

    @staticmethod
    def _gradients(ctx: Any, grad: torch.Tensor, saved: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, invstd, n = saved
        dy, dims = _wide(grad), [0, *range(2, input.dim())]
        normal = (_wide(input) - _channels(mean, dy)) * _channels(invstd, dy)
        sum_dy, sum_dy_normal = dy.sum(dims), (dy * normal).sum(dims)
        grad_input = None
        if ctx.needs_input_grad[0]:
            all_dy, all_dy_normal = (ctx.total(torch.cat([sum_dy, sum_dy_normal])) / n.to(dy.dtype)).chunk(2)
            scale = invstd if weight is None else invstd * weight
            grad_input = (dy - _channels(all_dy, dy) - normal * _channels(all_dy_normal, dy)) * _channels(scale, dy)
            grad_input = grad_input.to(input.dtype)
        grad_weight = sum_dy_normal if ctx.needs_input_grad[1] else None
        return grad_input, grad_weight, sum_dy if ctx.needs_input_grad[2] else None


class _NotDifferentiable(torch.autograd.Function):
    """Return gradients whose own gradients raise RuntimeError.

    Unlike with torch's ``once_differentiable``, the gradients' graph is connected to the ``sources``. Otherwise
    ``torch.autograd.grad`` would not run the node that raises, and would leave out this path without an error.
    """

    @staticmethod
    def forward(ctx: Any, gradients: tuple[torch.Tensor | None, ...], *sources: torch.Tensor | None) -> Any:
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError("trying to differentiate twice a function that was marked with @once_differentiable")


class SyncBatchNorm(_BatchNorm):
    """Base class of BatchNorm layers that train with the statistics of all ranks' samples.

    To convert a model, call :func:`synchronize_norms`. The constructor's arguments and the state are those of torch's
    BatchNorm layers. In evaluation with running statistics, the results are the same too.
    """

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``row`` (n,), as (size, n)."""
        raise NotImplementedError(_ABSTRACT)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's ``values``."""
        raise NotImplementedError(_ABSTRACT)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        # Without this check, one channel would be broadcast to the layer's channels, or the other way round.
        for values in (self.running_mean, self.weight):
            if values is not None and values.numel() != input.shape[1]:
                raise ValueError(f"expected {values.numel()} channels (got input of shape {tuple(input.shape)})")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input`` (N, C, …) normalized.

        Collective in training, and in evaluation if the layer has no running statistics. A collective call blocks.

        Raises:
            ValueError: on this rank, if ``input`` has fewer than two dimensions or not the layer's number of channels. In a
                collective call also on all ranks, if all ranks together have fewer than two values per channel.
        """
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        return self._over_ranks(input)

    @not_compiled
    def _over_ranks(self, input: torch.Tensor) -> torch.Tensor:
        exchanges = self.gather, self.total
        result = SynchronizedNorm.apply(input, self.weight, self.bias, self.eps, *exchanges)
        out: torch.Tensor = result[0]
        if self.training and self.running_mean is not None:
            self._update_statistics(result[1], result[2], float(result[3]))
        return out

    @torch.no_grad()
    def _update_statistics(self, mean: torch.Tensor, var: torch.Tensor, n: float) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((var * (n / max(n - 1, 1))).to(self.running_var.dtype), share)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module) -> torch.nn.Module:
        """Replace each BatchNorm in ``module`` that is not of this class by one that is, with its parameters and state.

        A BatchNorm that has several names is replaced by one layer in all these places.
        Return ``module``, or the new layer if ``module`` itself is a BatchNorm.
        """
        layers = [
            (name, layer)
            for name, layer in module.named_modules(remove_duplicate=False)
            if isinstance(layer, _BatchNorm) and not isinstance(layer, cls)
        ]
        if layers and layers[0][1] is module:
            return cls._with_state_of(layers[0][1])
        _replace_layers(module, layers, lambda _, layer: cls._with_state_of(layer))
        return module

    @classmethod
    def _with_state_of(cls, layer: _BatchNorm) -> SyncBatchNorm:
        made = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        made.weight, made.bias, made.training = layer.weight, layer.bias, layer.training
        made.running_mean, made.running_var = layer.running_mean, layer.running_var
        made.num_batches_tracked = layer.num_batches_tracked
        return made


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


def _channels(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def is_synchronized(layer: nn.Module) -> bool:
    """Return whether ``layer`` is a BatchNorm layer of dualtrain or torch that trains with all ranks' statistics."""
    return isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm)


class RankNorm(SyncBatchNorm):
    """BatchNorm over the samples of all ranks of ``backend``.

    ``backend`` is a class attribute, so copies of a layer share it. It is a :meth:`~dualtrain.Backend.channel`, because the
    ranks may exchange statistics and send buckets of gradients in different orders. For example, a rank without gradients
    for some parameters sends its buckets later in backward.
    """

    backend: Backend
    layer_name: str  # its first name in the model
    plain: type[_BatchNorm]  # the class of the layer that this layer has replaced
    #: The order in which the ranks' values are summed; ``None`` for the backend's own order.
    order: SumOrder | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """See the base class.

        In evaluation without running statistics, use the statistics of this rank's batch, without communication: a rank may
        have fewer batches than the others.
        """
        return super().forward(input) if self.training else _BatchNorm.forward(self, input)

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return self.backend.allgather(row[None], name=f"{self.layer_name}.statistics")

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        name = f"{self.layer_name}.gradient"
        if self.order is None:
            return self.backend.allreduce(values, "sum", name=name)
        return self.order.total(self.backend.allgather(values[None], name=name))

    def __copy__(self) -> RankNorm:
        """Copy the layer, but not its parameters and buffers; copies share the backend."""
        made = type(self).__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> RankNorm:
        """Copy the layer; copies share the backend."""
        made = memo[id(self)] = type(self).__new__(type(self))
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle this layer as the layer of torch's class that it has replaced, because a backend cannot be pickled."""
        # For a parametrized layer, which torch does not pickle, this raises torch's error.
        parts: Any = super().__reduce_ex__(protocol)
        state = {key: value for key, value in parts[2].items() if key not in ("layer_name", "plain", "order")}
        return self.plain, (self.num_features, self.eps, self.momentum, self.affine, self.track_running_stats), state


def _replace_layers(
    model: nn.Module, layers: Sequence[tuple[str, _BatchNorm]], make: Callable[[str, _BatchNorm], nn.Module]
) -> None:
    """Replace ``layers`` of ``model`` (pairs of name and layer) by ``make(name, layer)``, in place.

    A layer may have several names. It is replaced by one layer in all these places, and ``make`` gets its first name.
    """
    places = [(model.get_submodule(name.rpartition(".")[0]), name, layer) for name, layer in layers]
    made: dict[int, nn.Module] = {}
    for parent, name, layer in places:
        if id(layer) not in made:
            made[id(layer)] = make(name, layer)
        setattr(parent, name.rpartition(".")[2], made[id(layer)])


def synchronize_norms(model: nn.Module, backend: Backend) -> None:
    """Make torch's BatchNorm layers in ``model`` use the statistics of all ranks' samples. Collective; blocks.

    Each layer is replaced by a new one, in place. The new layers have the parameters and buffers of the old ones, so an
    optimizer of the model stays valid. In training, their forward and backward are collective: every rank must run them.
    ``FrozenNorm`` layers (``models/freezing.py``) and synchronized layers (:func:`is_synchronized`) are not changed. Layers
    of other subclasses of torch's classes are not changed either; rank 0 logs the names of those that are in training mode,
    three at most. ``torch.save`` and ``pickle`` write the new layers as torch's BatchNorm layers.

    Raises:
        TypeError: ``backend`` is not what ``connect()`` returns, or ``model`` is not a module.
        ValueError: ``model`` itself is one of torch's BatchNorm layers.
    """
    check_backend(backend)
    check_module(model)
    layers = [
        (name, layer)
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, _BatchNorm) and not is_synchronized(layer)
    ]
    plain = [(name, layer) for name, layer in layers if type(layer) in _PLAIN]
    others = [
        f"{name!r} ({type(layer).__name__})" for name, layer in layers if type(layer) not in _PLAIN and layer.training
    ]
    if type(model) in _PLAIN:
        raise ValueError(f"a {type(model).__name__} cannot be replaced in place: give a model that contains it")
    if others and backend.rank == 0:
        shown = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        log.warning("only layers of torch's own BatchNorm classes are synchronized, not: %s", shown)
    if plain:
        kind: Any = type("RankNorm", (RankNorm,), {"backend": backend.channel()})

        def synchronized(name: str, layer: _BatchNorm) -> Any:
            made = kind.convert_sync_batchnorm(layer)
            made.layer_name, made.plain = name, type(layer)
            return made

        _replace_layers(model, plain, synchronized)
