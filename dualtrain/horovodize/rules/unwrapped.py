"""Rules on steps of an optimizer beside its wrapper."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.source import Finding, Source, keyword, last_name


def lost_wrapper(source: Source) -> Iterator[Finding]:
    """A call of DistributedOptimizer whose result is discarded, if the script steps the optimizer inside."""
    for call in source.hvd_calls("DistributedOptimizer"):
        inner = call.args[0] if call.args else keyword(call, "optimizer")
        step = f"{ast.unparse(inner)}.step" if inner is not None else ""
        expected = any(isinstance(above, ast.Try | ast.With) for above in source.above(call))  # a test of an error
        stepped = any(ast.unparse(other.func) == step for other in source.calls)
        if isinstance(source.parents[call], ast.Expr) and stepped and not expected:
            message = "the wrapped optimizer is lost, and the other one does not wait for averaged gradients; assign it"
            yield Finding(call.lineno, "trap", message)


def inner_step(source: Source) -> Iterator[Finding]:
    """A step of the optimizer that was wrapped, in place of the wrapper's step."""
    guards = Guards(source)
    for name, wrap in source.wraps:
        inner = wrap.args[0] if wrap.args else keyword(wrap, "optimizer")
        if not isinstance(inner, ast.Name | ast.Attribute) or last_name(inner) == name or guards.is_conditional(wrap):
            continue
        text = ast.unparse(inner)
        if _is_used(source, name) or text in source.parameters(wrap) or _holds_wrapper(source, text, wrap):
            continue
        for call in source.calls:
            func = call.func
            if not isinstance(func, ast.Attribute) or func.attr != "step" or ast.unparse(func.value) != text:
                continue
            same = source.scope(call) is source.scope(wrap) and call.lineno > wrap.lineno
            visible = source.scope(wrap) is source.tree and text not in source.parameters(call)
            if (same or visible or text.startswith("self.")) and not guards.is_without_horovod(call):
                message = f"{text}.step() does not wait for averaged gradients, as {name}.step() does; call {name}.step()"
                yield Finding(call.lineno, "trap", message)


def _is_used(source: Source, wrapper: str) -> bool:
    """Return whether anything uses the wrapped optimizer, except for zero_grad, a schedule, and calls of Horovod."""
    for file in {id(one): one for one in (source, *source.program)}.values():
        for node in file.nodes:
            if last_name(node) != wrapper or isinstance(getattr(node, "ctx", None), ast.Store):
                continue
            parent = file.parents[node]
            if isinstance(parent, ast.Attribute) and parent.attr in ("zero_grad", "param_groups", "state_dict"):
                continue
            name = file.hvd(parent.func) if isinstance(parent, ast.Call) else ""
            library = file.name(parent.func) if isinstance(parent, ast.Call) else ""
            if name != "broadcast_optimizer_state" and not library.startswith("torch.optim.lr_scheduler."):
                return True
    return False


def _holds_wrapper(source: Source, optimizer: str, wrap: ast.Call) -> bool:
    """Return whether the variable ``optimizer`` may hold the wrapped optimizer too."""
    values = source.values.get(optimizer, ())
    own = isinstance(values, list) and all(isinstance(value, ast.Call) and value is not wrap for value in values)
    wrapped = any(source.hvd(value.func) == "DistributedOptimizer" for value in values if isinstance(value, ast.Call))
    return not values or not own or wrapped
