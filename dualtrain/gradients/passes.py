"""The end of a backward pass, as autograd reports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class EndOfPass:
    """What runs at the end of a backward pass; of the outermost one, if it runs inside of others.

    Reentrant checkpointing has a pass of its own for every segment. To finish the reduction at the end of each would
    send the caller's numbers, which are sums by then, once more.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        """Called by autograd at the end of the pass it was queued in."""
        node = torch._C._current_autograd_node()
        if node is None:
            self._call()
        else:
            _after_node(node, self)


def at_end_of_pass(call: Callable[[], None]) -> None:
    """Has the backward pass that goes on end with ``call``: what DDP and FSDP use for the same purpose."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _after_node(node: Any, call: Callable[[], None]) -> None:
    """Has the backward pass that ``node`` belongs to end with ``call``."""
    calls = [call]

    def once(*_: object) -> None:
        if calls:  # a retained graph runs its hooks again
            at_end_of_pass(calls.pop())

    node.register_hook(once)
