"""The end of a backward pass, as autograd reports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dualtrain.backends.compilation import not_compiled


class EndOfPass:
    """Callback for the end of the outermost backward pass that is running.

    Reentrant checkpointing runs an inner backward pass for every segment. If each inner pass ended the reduction, the
    caller's extra scalars, which the last bucket holds, would be summed several times.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    @not_compiled
    def __call__(self) -> None:
        """Call the function if the outermost pass has ended; after an inner pass, register for the enclosing pass."""
        # Private in torch 2.5 to 2.15: there is no public way to find out whether a backward pass runs inside of another.
        node = torch._C._current_autograd_node()
        if node is None:
            self._call()
        else:
            _after_node(node, self)


def at_end_of_pass(call: Callable[[], None]) -> None:
    """Call ``call`` at the end of the backward pass that is running."""
    # Private in torch 2.5 to 2.15. DDP and FSDP use it for the same purpose; no public hook runs at a pass's end.
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _after_node(node: Any, call: Callable[[], None]) -> None:
    """Call ``call`` at the end of the backward pass that ``node`` belongs to."""
    calls = [call]

    def once(*_: object) -> None:
        if calls:  # a retained graph runs its hooks again
            at_end_of_pass(calls.pop())

    node.register_hook(once)
