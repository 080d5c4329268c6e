"""Access to tensors that were made in ``torch.inference_mode()``."""

from __future__ import annotations

import torch


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or an ordinary tensor with the same memory if ``tensor`` was made in inference mode.

    Only code in inference mode may change a tensor that was made there. But the mode belongs to a thread, and libraries
    write results in their own threads.
    """
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        alias = tensor.new_empty(0).set_(tensor.untyped_storage(), *place)
        if tensor.is_conj():
            alias = alias.conj()
        # There is no public function for a view whose memory has the opposite sign (torch 2.5 to 2.15).
        return torch._neg_view(alias) if tensor.is_neg() else alias
