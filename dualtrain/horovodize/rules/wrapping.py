"""Rules on wrapped optimizers outside the training step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dualtrain.horovodize.source import Finding, Source, last_name


def set_to_none(source: Source) -> Iterator[Finding]:
    """zero_grad with set_to_none: a TypeError on Horovod."""
    for call in _on_wrapped(source, "zero_grad"):
        if call.args or call.keywords:
            message = "zero_grad() takes set_to_none, where Horovod's raises TypeError; nothing to do"
            yield Finding(call.lineno, "differs", message)


def group_after_wrapping(source: Source) -> Iterator[Finding]:
    """Parameter groups that are added to a wrapped optimizer."""
    for call in _on_wrapped(source, "add_param_group"):
        wraps = [wrap for _, wrap in source.wraps if source.scope(wrap) is source.scope(call)]
        if not wraps or call.lineno > wraps[0].lineno:
            message = "the gradients of an added group are averaged too, but not on Horovod; nothing to do"
            yield Finding(call.lineno, "differs", message)


def checkpoint_before_wrapping(source: Source) -> Iterator[Finding]:
    """State that an optimizer has before it is wrapped."""
    for _, wrap in source.wraps:
        inner = last_name(wrap.args[0]) if wrap.args else ""
        for call in _methods(source, "load_state_dict"):
            same = inner and last_name(_owner(call)) == inner and source.scope(call) is source.scope(wrap)
            if same and call.lineno < wrap.lineno:
                message = "the state loaded before wrapping is kept; Horovod drops it; nothing to do"
                yield Finding(call.lineno, "differs", message)


def optimizer_state(source: Source) -> Iterator[Finding]:
    """broadcast_optimizer_state: one finding for all calls."""
    for call in list(source.hvd_calls("broadcast_optimizer_state"))[:1]:
        message = (
            "the state is broadcast without a step; Horovod takes a step if there is no state, so that weight decay "
            "changes the weights, and on resuming from rank 0 ranks may differ; nothing to do"
        )
        yield Finding(call.lineno, "differs", message)


def _methods(source: Source, name: str) -> Iterator[ast.Call]:
    return (call for call in source.calls if isinstance(call.func, ast.Attribute) and call.func.attr == name)


def _on_wrapped(source: Source, name: str) -> Iterator[ast.Call]:
    return (call for call in _methods(source, name) if last_name(_owner(call)) in source.wrapped)


def _owner(call: ast.Call) -> ast.expr:
    assert isinstance(call.func, ast.Attribute)
    return call.func.value
