"""Rules on optimizers that take steps without the wrapper that DistributedOptimizer returns, or are wrapped twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.averaging import may_average
from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.nodes import calls_in, first_argument, given_values, is_stored, last_name
from dualtrain.horovodize.order import calls_of, nodes_after
from dualtrain.horovodize.rules.sent_models import owner_of, sent_models
from dualtrain.horovodize.source import Finding, Function, Source


def lost_wrapper(source: Source) -> Iterator[Finding]:
    """A call of DistributedOptimizer whose result is discarded, if the script steps the original optimizer."""
    for call in source.hvd_calls("DistributedOptimizer"):
        inner = first_argument(call, "optimizer")
        name = ast.unparse(inner) if inner is not None else ""
        # In a ``try`` statement or ``with raises():``, the script may expect that the call fails.
        items = map(ast.unparse, source.with_items(call))
        expected = any(source.around(call, ast.Try)) or any(re.search(_EXPECTS, item) for item in items)
        steps = [other for other in source.calls if isinstance(other.func, ast.Attribute) and other.func.attr == "step"]
        # optimizer.step() or scaler.step(optimizer)
        stepped = any(name in map(ast.unparse, (other.func.value, *other.args)) for other in steps)  # type: ignore[attr-defined]
        if isinstance(source.parents[call], ast.Expr) and stepped and not expected:
            message = (
                "the wrapper is lost, and a step of the original optimizer does not wait for averaged gradients; assign "
                "the wrapper"
            )
            yield Finding(call.lineno, "trap", message)


#: Words in the context managers of code that is expected to fail.
_EXPECTS = "(?i)raises|suppress|expect|error|fail|except"


def lost_by_function(source: Source) -> Iterator[Finding]:
    """A function wraps its argument, but the caller discards the result, and the script steps the argument."""
    for function in source.functions.values():
        parameter = _wrapped_parameter(source, function)
        if not parameter or source.is_ambiguous(function.name):
            continue
        for call in calls_of(source, function):
            given = _given(source, function, call, parameter)
            if given is None or not isinstance(source.parents[call], ast.Expr):
                continue
            if _holds_wrapper(source, given, call, local_to=function):
                continue
            later = (
                other
                for other in source.calls
                if other.lineno > call.lineno or source.scope(other) is not source.scope(call)
            )
            if any(ast.unparse(other.func) == f"{given}.step" for other in later):
                message = (
                    f"{given} is not wrapped by this call, so {given}.step() does not wait for averaged gradients; return "
                    f"the wrapped optimizer from {function.name}(), and assign it"
                )
                yield Finding(call.lineno, "trap", message)


def not_returned(source: Source) -> Iterator[Finding]:
    """A function that returns its argument in one branch, but wraps it in another branch and returns nothing there."""
    for function in source.functions.values():
        parameter = _wrapped_parameter(source, function)
        ends = [node for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
        for wrap in calls_in(function) if parameter else ():
            if source.hvd(wrap.func) != "DistributedOptimizer" or isinstance(source.parents[wrap], ast.Return):
                continue
            others = [end for end in ends if source.exclusive(end, wrap) and ast.unparse(end.value or end) == parameter]
            if others and all(source.exclusive(end, wrap) for end in ends):
                message = (
                    f"the wrapper is lost: {function.name}() returns None in this branch, and the optimizer itself in line "
                    f"{others[0].lineno}; return the wrapped optimizer here"
                )
                yield Finding(wrap.lineno, "trap", message)


def _wrapped_parameter(source: Source, function: Function) -> str:
    """Return the parameter that ``function`` wraps; "" if there is none.

    Also return "" if the function wraps several optimizers, has a ``global`` or ``nonlocal`` statement, or may use the
    wrapper in other ways than returning it or broadcasting its state.
    """
    inside = list(ast.walk(function))
    wraps = [call for call in calls_in(function) if source.hvd(call.func) == "DistributedOptimizer"]
    inner = first_argument(wraps[0], "optimizer") if len(wraps) == 1 else None
    if not isinstance(inner, ast.Name):
        return ""
    wrap, parent, name = wraps[0], source.parents[wraps[0]], inner.id
    if name not in source.parameters(wrap) or any(isinstance(node, ast.Global | ast.Nonlocal) for node in inside):
        return ""
    if isinstance(parent, ast.Return):
        return name
    target = parent.targets[0] if isinstance(parent, ast.Assign) and len(parent.targets) == 1 else None
    if not isinstance(target, ast.Name):
        return ""
    loads = [
        node for node in inside if isinstance(node, ast.Name) and node.id == target.id and isinstance(node.ctx, ast.Load)
    ]
    uses = (_user(source, node) for node in loads if node.lineno > (wrap.end_lineno or wrap.lineno))
    only = all(isinstance(use, ast.Return) or _is_broadcast(source, use) for use in uses)
    return name if only else ""


def _user(source: Source, node: ast.AST) -> ast.AST:
    """Return the parent of ``node``; for the value of a keyword argument, the call."""
    parent = source.parents[node]
    return source.parents[parent] if isinstance(parent, ast.keyword) else parent


def _is_broadcast(source: Source, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and source.hvd(node.func) == "broadcast_optimizer_state"


def _given(source: Source, function: Function, call: ast.Call, parameter: str) -> str | None:
    """Return the variable that ``call`` passes for ``parameter``, as text; None if it is unknown or not a variable."""
    given = source.argument(function, call, parameter)
    return ast.unparse(given) if isinstance(given, ast.Name | ast.Attribute) else None


def _is_certain(source: Source, wrap: ast.Call) -> bool:
    """Return whether the function around ``wrap`` always makes this call exactly once, in runs with Horovod."""
    repeated = any(isinstance(above, ast.For | ast.While | ast.Try | ast.TryStar) for above in source.above(wrap))
    return not repeated and Guards.of(source).runs_whenever(wrap, source.scope(wrap))


def _unused_wrappers(source: Source) -> Iterator[tuple[str, str, ast.Call]]:
    """Yield the wrappers that nothing uses, each as (name, original optimizer as text, call that wraps it).

    Leave out:

    - wrappers that their function perhaps makes several times, or not at all (:func:`_is_certain`);
    - wrappers that get the name of the original optimizer;
    - wrappers whose original optimizer is not in a variable, is an argument of the function around the call, or is in a
      variable that may hold the wrapper too (:func:`_holds_wrapper`);
    - wrappers in a list or dictionary, because any use of the list or dictionary may step them.
    """
    for name, wrap in source.wraps:
        if not name.isidentifier():
            continue
        inner = first_argument(wrap, "optimizer")
        if not isinstance(inner, ast.Name | ast.Attribute) or last_name(inner) == name or not _is_certain(source, wrap):
            continue
        text = ast.unparse(inner)
        if _is_used(source, name) or text in source.parameters(wrap) or _holds_wrapper(source, text, wrap):
            continue
        yield name, text, wrap


def inner_step(source: Source) -> Iterator[Finding]:
    """A step of the original optimizer instead of its wrapper."""
    guards = Guards.of(source)
    for name, text, wrap in _unused_wrappers(source):
        for call in source.calls:
            func = call.func
            if not isinstance(func, ast.Attribute) or func.attr != "step" or ast.unparse(func.value) != text:
                continue
            same = source.scope(call) is source.scope(wrap) and call.lineno > wrap.lineno
            visible = source.scope(wrap) is source.tree and text not in source.parameters(call)
            if (same or visible or text.startswith("self.")) and not guards.is_without_horovod(call):
                message = f"{text}.step() does not wait for averaged gradients, unlike {name}.step(); call {name}.step()"
                yield Finding(call.lineno, "trap", message)


def inner_given(source: Source) -> Iterator[Finding]:
    """The original optimizer as an argument, as in ``scaler.step(base)``, if nothing uses its wrapper."""
    for name, text, wrap in _unused_wrappers(source):
        for call in source.calls:
            given = [ast.unparse(value) for value in given_values(call)]
            same = source.scope(call) is source.scope(wrap) and call.lineno > wrap.lineno
            if text in given and same and not source.hvd(call.func) and not _reads_only(source, call):
                message = (
                    f"{last_name(call.func)}() gets {text}, whose step() does not wait for averaged gradients, and nothing "
                    f"uses its wrapper {name}; pass {name}"
                )
                yield Finding(call.lineno, "trap", message)


def _reads_only(source: Source, call: ast.Call) -> bool:
    """Return whether the called function's name shows that it makes a learning-rate schedule, or takes no step."""
    return source.makes_schedule(call) or re.search(_READS, last_name(call.func)) is not None


_READS = r"(?i)print|log|info|save|sched|lr|rate|^(getattr|hasattr|id|isinstance|len|repr|str|type)$"


def wrapped_twice(source: Source) -> Iterator[Finding]:
    """A wrapper that is wrapped again, which raises TypeError. Often the script names the wrong optimizer by mistake."""
    wraps = [(target, made, at) for target, made, at in source.assignments if made in [wrap for _, wrap in source.wraps]]
    for _, wrap, _ in wraps:
        inner = first_argument(wrap, "optimizer")
        text = ast.unparse(inner) if inner is not None else ""
        before = [(made, at) for target, made, at in source.assignments if target == text and made.lineno < wrap.lineno]
        last, statement = before[-1] if before else (wrap, wrap)
        earlier = text not in source.parameters(wrap) and any(last is other for _, other, _ in wraps if other is not wrap)
        if earlier and _follows(source, statement, wrap) and not _is_assigned_between(source, text, statement, wrap):
            message = (
                f"{text} is a DistributedOptimizer already, so that this call raises TypeError, on Horovod too; wrap each "
                "optimizer once"
            )
            yield Finding(wrap.lineno, "trap", message)


def _follows(source: Source, statement: ast.AST, wrap: ast.Call) -> bool:
    """Return whether ``wrap`` is in the same block as ``statement``, or in a nested block, and runs after it."""
    block = source.block(source.statement(statement))
    later = any(above in block for above in source.above(wrap) if isinstance(above, ast.stmt))
    return later and not source.exclusive(statement, wrap)


def _is_assigned_between(source: Source, text: str, statement: ast.AST, wrap: ast.Call) -> bool:
    """Return whether the variable ``text`` may get another value after ``statement`` and before ``wrap``.

    A statement in between, or a ``for`` loop around ``wrap``, may assign the variable. Another function may assign an
    attribute, or a variable that is declared ``global`` or ``nonlocal``.
    """
    end, scope = source.statement(statement).end_lineno or 0, source.scope(wrap)
    for node in source.mentions.get(text.rpartition(".")[2], ()):
        stored = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del) and ast.unparse(node) == text
        between = end < node.lineno < wrap.lineno  # type: ignore[attr-defined]
        loop = isinstance(source.statement(node), ast.For) and source.statement(node) in source.above(wrap)
        if stored and (between or loop or ("." in text and source.scope(node) is not scope)):
            return True
    declared = (name for node in source.nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names)
    return text in declared


def never_wrapped(source: Source) -> Iterator[Finding]:
    """An optimizer that is not wrapped, although its model is broadcast and the script wraps another optimizer."""
    if not source.wraps:
        return
    guards = Guards.of(source)
    for target, made, _ in source.assignments:
        if not isinstance(made, ast.Call) or not source.makes_optimizer(made):
            continue
        if len(source.values[target]) != 1 or guards.is_conditional(made):
            continue
        steps = [call for call in source.calls if ast.unparse(call.func) == f"{target}.step"]
        if not any(_is_on_all_ranks(guards, step) for step in steps) or not _is_broadcast_before(source, made, steps):
            continue
        if not _is_passed(source, last_name(steps[0].func.value)) and not may_average(source):  # type: ignore[attr-defined]
            message = (
                f"{target} is not wrapped, so that {target}.step() uses gradients that are not averaged, and the ranks' "
                "weights differ; pass it to hvd.DistributedOptimizer"
            )
            yield Finding(made.lineno, "trap", message)


def _is_broadcast_before(source: Source, optimizer: ast.Call, steps: list[ast.Call]) -> bool:
    """Return whether the model of ``optimizer`` is broadcast in the same function, not in a loop, never after a step."""
    parts = (node for value in given_values(optimizer) for node in ast.walk(value) if isinstance(node, ast.expr))
    models = [model for part in parts if (model := owner_of(part, "parameters", "named_parameters"))]
    sent = [
        one
        for model in models
        for one in sent_models(source, optimizer, model)
        if one is not None and ast.unparse(one) == ast.unparse(model) and source.scope(one) is source.scope(optimizer)
    ]
    later = {node for step in steps for node in nodes_after(source, step)}
    repeated = any(isinstance(above, ast.For | ast.While) for one in sent for above in source.above(one))
    return bool(sent) and not repeated and not later.intersection(sent)


def _is_on_all_ranks(guards: Guards, node: ast.AST, depth: int = 0) -> bool:
    """Return whether ``node`` runs on all ranks, outside of any ``if``, and so does each call of the function around it.

    An ``if`` that tests ``__name__`` does not count.
    """
    source = guards.source
    tests = (above.test for above in source.above(node) if isinstance(above, ast.If | ast.IfExp))
    if any("__name__" not in ast.unparse(test) for test in tests):
        return False
    if guards.looks_like_one_rank(node) or guards.is_without_horovod(node):
        return False
    return depth > 3 or all(_is_on_all_ranks(guards, call, depth + 1) for call in calls_of(source, source.scope(node)))


def _is_passed(source: Source, optimizer: str) -> bool:
    """Return whether other code may wrap ``optimizer``: the script passes, stores or returns it.

    Calls that make schedules do not count.
    """
    for file in source.files:
        for node in file.mentions.get(optimizer, ()):
            parent = _user(file, node)
            if not is_stored(node) and not file.makes_schedule(parent) and not isinstance(parent, ast.Attribute):
                return True
    return False


def _is_used(source: Source, wrapper: str) -> bool:
    """Return whether anything uses the wrapper in a way that may step it.

    These uses do not count: zero_grad, param_groups, state_dict, an lr_scheduler and broadcast_optimizer_state.
    """
    for file in source.files:
        for node in file.nodes:
            if last_name(node) != wrapper or is_stored(node):
                continue
            parent = _user(file, node)
            if isinstance(parent, ast.Attribute) and parent.attr in ("zero_grad", "param_groups", "state_dict"):
                continue
            name = file.hvd(parent.func) if isinstance(parent, ast.Call) else ""
            if name != "broadcast_optimizer_state" and not file.makes_schedule(parent):
                return True
    return False


def _holds_wrapper(source: Source, optimizer: str, wrap: ast.Call, local_to: Function | None = None) -> bool:
    """Return whether the variable of the original optimizer may hold the wrapper too.

    A variable with the same name that is local to the function ``local_to`` is a different variable.
    """
    found = [(value, at) for target, value, at in source.assignments if target == optimizer]
    values = [value for value, at in found if not optimizer.isidentifier() or source.scope(at) is not local_to]
    calls = [value for value in values if isinstance(value, ast.Call) and value is not wrap]
    wrapped = any(source.hvd(call.func) == "DistributedOptimizer" for call in calls)
    return not values or len(calls) < len(values) or wrapped
