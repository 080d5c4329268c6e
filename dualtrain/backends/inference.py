"""Access to tensors that were made in ``torch.inference_mode()``."""

from __future__ import annotations

import torch


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or an ordinary tensor with the same memory if ``tensor`` was made in inference mode.

    A tensor that was made in inference mode can be changed only in inference mode. But the mode belongs to a thread, and
    libraries write results in their own threads.
    """
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        alias = tensor.new_empty(0).set_(tensor.untyped_storage(), *place)
        if tensor.is_conj():
            alias = alias.conj()
        # torch 2.5 to 2.15 have no public function for a view that negates the values in memory.
        return torch._neg_view(alias) if tensor.is_neg() else alias
