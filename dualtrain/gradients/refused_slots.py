"""The slots of a bucket that make this rank refuse to average gradients."""

from __future__ import annotations

from dataclasses import dataclass

from dualtrain.gradients.parameters import SHARDED
from dualtrain.gradients.slots import Slot


@dataclass
class RefusedSlots:
    """For each reason to refuse, the first slot of the bucket to which it applies.

    Attributes:
        misplaced: its gradient lies in the memory of another gradient. Found by ``Bucket.pack``.
        sparse: its gradient is sparse, although a fixed order of the sum needs dense ones. Found by ``Bucket.pack``.
        reshaped: its gradient or parameter has a new shape. Found by ``Bucket.pack``, which packs zeros for it.
        trained_elsewhere: it is frozen on this rank, and has a gradient on other ranks. Found by ``Bucket.unpack``. For
            the last bucket, this may also be the slot of a sparse gradient, which is in no bucket: found by
            ``SparseGradients.reduce``.
        stepped: its parameter was changed and its gradient dropped in backward. Found by
            ``Bucket.refuse_changed_parameters``.
        sharded: ``fully_shard`` has replaced its parameter. Found by ``Bucket.refuse_changed_parameters``.
    """

    misplaced: Slot | None = None
    sparse: Slot | None = None
    reshaped: Slot | None = None
    trained_elsewhere: Slot | None = None
    stepped: Slot | None = None
    sharded: Slot | None = None

    def reason(self) -> str | None:
        """Return the first reason to refuse, for an error message; ``None`` if there is none."""
        if self.misplaced is not None:
            name = self.misplaced.name
            return f"the gradient of {name!r} lies in the memory of another gradient: assign a copy of it (clone())"
        if self.sparse is not None:
            return (
                f"the gradient of {self.sparse.name!r} is sparse, and only dense ones have sums in a fixed order: "
                "give its module sparse=False, or leave sum_order (virtual_ranks) out"
            )
        if self.reshaped is not None:
            return (
                f"parameter {self.reshaped.name!r} or its gradient no longer has the shape {tuple(self.reshaped.shape)}: "
                "change it back, or make a new optimizer after the change"
            )
        if self.trained_elsewhere is not None:
            return (
                f"parameter {self.trained_elsewhere.name!r} was frozen on this rank and trained on others, so that "
                "weights differ: freeze the same parameters on every rank (if drawn at random, from the same seed)"
            )
        if self.sharded is not None:
            return f"parameter {self.sharded.name!r} {SHARDED}: leave fully_shard out, or do not wrap the optimizer"
        if self.stepped is not None:
            return (
                f"parameter {self.stepped.name!r} was changed in backward, and its gradient was dropped before it was "
                "averaged (by step() and zero_grad() of an optimizer in a hook), so that weights of ranks would differ: "
                "call both after backward"
            )
        return None
