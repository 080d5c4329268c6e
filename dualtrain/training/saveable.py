"""Refuse a model's state that a checkpoint cannot hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parameter import is_lazy

from dualtrain.errors import UserError
from dualtrain.run_folder.structure import check
from dualtrain.user_code import user_code


def check_state(model: nn.Module, name: str) -> None:
    """Raise UserError if the model's state cannot be saved, or cannot be restored."""
    with user_code(f"state_dict() of --model {name}"):
        state = model.state_dict()
    # Also check buffers that are not persistent: a checkpoint has them in each rank's own state (local_state).
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with saveable(f"the state of --model {name}"):
        check({**tensors, **state})
    for tensor_name, tensor in tensors.items():
        if not is_lazy(tensor) and any(
            not stride and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            raise UserError(
                f"--model {name} has {tensor_name!r}, whose elements share memory, as after expand(), so that it cannot be "
                "restored: clone() it"
            )


@contextmanager
def saveable(what: str) -> Iterator[None]:
    """Convert a TypeError of the block to a UserError, which says that a checkpoint cannot hold ``what``."""
    try:
        yield
    except TypeError as error:
        raise UserError(
            f"{what} cannot be saved: {error}; use numbers, text, dense tensors, and lists or dicts of them"
        ) from error
