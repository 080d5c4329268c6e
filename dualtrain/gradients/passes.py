"""The end of a backward pass, as autograd reports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class EndOfPass:
    """A callback for the end of a backward pass; of the outermost one, if it runs inside of others.

    Reentrant checkpointing runs a backward pass of its own for every segment. Finishing the reduction at the end of each
    would send the extra scalars, which are sums by then, once more.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        """Called by autograd at the end of the pass it was queued in."""
        # Private in torch 2.5 to 2.15: no public name tells whether a backward pass runs inside of another.
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
