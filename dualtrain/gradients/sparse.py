"""Sparse gradients: their indices and values are gathered, or they are sent as dense gradients and made sparse again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from dualtrain.backends import Backend
from dualtrain.gradients.layout import Transfer
from dualtrain.gradients.slots import Slot


class SparseGradients:
    """Set of the parameters with sparse gradients, the same on every rank.

    Attributes:
        dims: slot index → number of sparse dimensions, for gradients that are gathered.
        dims_as_dense: the same for gradients that are sent as dense ones.
        trained_elsewhere: the first slot that, in the last :meth:`reduce`, was frozen on this rank and had gradient values
            on another rank; ``None`` if there was none.
    """

    def __init__(self) -> None:
        self.dims: dict[int, int] = {}
        self.dims_as_dense: dict[int, int] = {}
        self.trained_elsewhere: Slot | None = None

    def add(self, dims: Mapping[int, int] | Iterable[tuple[int, int]], transfer: Transfer) -> None:
        """Add sparse gradients that a rank has: ``dims`` is slot index → number of sparse dimensions."""
        (self.dims_as_dense if transfer.sparse_as_dense else self.dims).update(dims)

    def restore(self, slots: Sequence[Slot]) -> None:
        """Convert gradients that were sent as dense gradients back to sparse ones.

        All dimensions become sparse, as with Horovod's sparse_as_dense. If only the first dimension were sparse, an
        optimizer would round differently than on Horovod.
        """
        for number in self.dims_as_dense:
            slot = slots[number]
            if slot.param.grad is not None:
                slot.param.grad = slot.view.to_sparse()

    @torch.no_grad()
    def reduce(self, slots: Sequence[Slot], backend: Backend, transfer: Transfer, *, drop_empty: bool) -> None:
        """Replace the gradients of ``dims`` by their sums over the ranks, scaled as ``transfer`` says. Collective; blocks.

        A frozen parameter without a gradient gets none. Also sets :attr:`trained_elsewhere`.

        Args:
            slots: the reducer's slots.
            backend: communicates with the other ranks.
            transfer: the factors, and whether entries with equal indices are added.
            drop_empty: whether a gradient becomes ``None`` if no rank has values for it.
        """
        self.trained_elsewhere = None
        for number, dims in sorted(self.dims.items()):
            slot = slots[number]
            p = slot.param
            # A parameter that was frozen after the layout was made contributes no values and gets no gradient.
            frozen = p.grad is None and not p.requires_grad
            if p.grad is None:
                grad = _sparse(torch.empty(dims, 0, dtype=torch.int64, device=p.device), p.new_empty(0, *p.shape[dims:]), p)
            else:
                grad = p.grad if p.grad.is_sparse else p.grad.to_sparse(dims)
            grad = grad.coalesce() if transfer.coalesce else grad
            # torch 2.5 to 2.15 has no public names for the parts of an uncoalesced tensor.
            indices = backend.allgather(grad._indices().t(), name=f"{slot.name}.indices")
            mine = grad._values()
            if transfer.coalesce and transfer.before != 1:
                mine = mine * transfer.before  # before the exchange: each rank may have a different factor
            values = backend.allgather(mine, name=f"{slot.name}.values")
            if frozen:
                self.trained_elsewhere = self.trained_elsewhere or (slot if len(indices) else None)
            elif not len(indices) and drop_empty:
                p.grad = None
            elif transfer.coalesce:
                p.grad = _sparse(indices.t(), values, p).coalesce()
                p.grad.values().mul_(transfer.factor_after(backend.size))
            else:
                # Divide as Horovod does: a multiplication by 1/size would give other bits. Horovod also ignores the factor
                # before the sum here.
                p.grad = _sparse(indices.t(), values if transfer.sums else values.div_(backend.size), p)


def sparse_dims(slots: Sequence[Slot]) -> dict[int, int]:
    """Return slot index → number of sparse dimensions, for the gradients that are sparse on this rank."""
    grads = [slot.param.grad for slot in slots]
    return {number: grad.sparse_dim() for number, grad in enumerate(grads) if grad is not None and grad.is_sparse}


def has_values(grad: torch.Tensor | None) -> bool:
    """Return whether a dense gradient has a nonzero element, or a sparse gradient stores any element."""
    if grad is None:
        return False
    # torch 2.5 to 2.15 has no public name for the number of stored elements of an uncoalesced tensor.
    return bool(grad._nnz()) if grad.is_sparse else bool(grad.any())


def _sparse(indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    # Without ``check_invariants=False``, torch warns that it does not check the indices.
    return torch.sparse_coo_tensor(indices, values, like.shape, device=like.device, check_invariants=False)
