"""Execution order of a script's statements, as far as its source shows it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.nodes import last_name
from dualtrain.horovodize.source import Function, Scope, Source

#: Full names of modules, functions and classes by which one process, the driver, runs a function on all ranks.
_STARTERS = re.compile(r"(horovod|dualtrain)\.((run|ray|spark)\b|runner\.run$)")
#: Other libraries by which a driver may run a function on all ranks.
_DRIVERS = re.compile(r"(pyspark|sparkdl|ray|dask)(\.|$)")

#: Functions that a launcher may call on all ranks, if the script does not call them.
ENTRY_POINTS = ("main", "train", "run", "train_fn", "main_worker", "train_func", "train_hvd", "train_loop_per_worker")


_LOOPS = ast.For | ast.While


def starts_ranks(source: Source) -> bool:
    """Return whether the script itself starts its ranks, by horovod.run, Spark or Ray, and so needs no launcher."""
    return any(map(_STARTERS.match, (*source.imported_names, *(source.name(call.func) for call in source.calls))))


def runs_on_driver(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` perhaps runs only in the driver.

    For this, the script must start ranks, or import a library that may start them. In addition, the function or
    module that contains ``node`` must not itself call Horovod.
    """
    if not (source.once(starts_ranks) or any(map(_DRIVERS.match, source.imported_names))):
        return False
    nodes = source.scopes[source.scope(node)]
    return not any(isinstance(part, ast.Call) and source.hvd(part.func) for part in nodes)


def nodes_after(source: Source, first: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run after ``first``.

    These include the nodes of functions that are called later, and of the code after calls of the function that contains
    ``first``. Nodes above ``first`` in a loop, which run after it in the next iteration, are left out.
    """
    seen: set[Scope] = set()
    for node in _following_with_callers(source, first, depth=0):
        yield node
        if isinstance(node, ast.Call):
            yield from _inside_called(source, node, seen)


def nodes_after_or_repeated(source: Source, first: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that may run after ``first``, including those that run after it in the next iteration of a loop.

    The loop may be around ``first``, or around a call that leads to ``first`` through one or more functions.
    """
    yield from nodes_after(source, first)
    leading, scopes, seen = [first], set[Scope](), set[Scope]()
    for each in leading:  # this list grows by the calls of the function around ``each``
        scope = source.scope(each)
        loops = [above for above in source.above(each) if isinstance(above, _LOOPS) and source.scope(above) is scope]
        for loop in loops[-1:]:
            for node in _own_nodes(loop):
                yield node
                if isinstance(node, ast.Call):
                    yield from _inside_called(source, node, seen)
        if scope not in scopes:
            scopes.add(scope)
            leading += calls_of(source, scope)


def nodes_certainly_after(source: Source, first: ast.AST, depth: int = 0) -> Iterator[ast.AST]:
    """Yield the nodes after ``first`` that a run with Horovod reaches only if it has reached ``first``.

    It is assumed that the run enters all loops.
    """
    guards, scope, seen = Guards.of(source), source.scope(first), set[Scope]()
    for node in _following(source, first):
        if guards.runs_whenever(first, node):
            yield node
            if isinstance(node, ast.Call):
                yield from _inside_called(source, node, seen)
    if depth < 3 and guards.runs_whenever(first, scope):
        for call in calls_of(source, scope):
            yield from nodes_certainly_after(source, call, depth + 1)


def called(source: Source, call: ast.Call) -> Function | None:
    """Return the script's function or method that ``call`` calls, or None; ``__init__`` for a class of the script.

    ``model.train()`` does not call a function ``train`` of the script.
    """
    function = source.functions.get(last_name(call.func))
    if function is None:
        classes = [one for one in source.classes if isinstance(call.func, ast.Name) and one.name == call.func.id]
        parts = (part for one in classes for part in one.body if isinstance(part, Function))
        return next((part for part in parts if part.name == "__init__"), None)
    method = isinstance(source.parents[function], ast.ClassDef)
    if isinstance(call.func, ast.Attribute):
        owner = call.func.value
        on_self = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
        return function if method and (on_self or source.is_instance(owner, source.parents[function])) else None
    return None if method else function


def calls_of(source: Source, function: Scope) -> Iterator[ast.Call]:
    """Yield the calls of ``function`` in the script; for ``__init__``, the calls of its class. A module has none."""
    parent = source.parents.get(function)
    if isinstance(parent, ast.ClassDef) and getattr(function, "name", "") == "__init__":
        yield from (call for call in source.calls if source.constructs(call, parent))
    elif isinstance(function, Function):
        named = (call for call in source.calls if last_name(call.func) == function.name)
        yield from (call for call in named if called(source, call) is function)


def arguments(source: Source, function: Function, call: ast.Call, parameter: str) -> list[ast.expr]:
    """Return what ``call`` may pass for ``parameter`` of ``function``: the argument, or else what ``call`` unpacks."""
    given = source.argument(function, call, parameter)
    unpacked = [one.value for one in call.args if isinstance(one, ast.Starred)]
    unpacked += [word.value for word in call.keywords if word.arg is None]
    return unpacked if given is None else [given]


def _following_with_callers(source: Source, first: ast.AST, depth: int) -> Iterator[ast.AST]:
    yield from _following(source, first)
    if depth < 3:
        for call in calls_of(source, source.scope(first)):
            yield from _following_with_callers(source, call, depth + 1)


def _following(source: Source, first: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes after ``first`` in the same function, until a block ends with a return, an exception or an exit."""
    guards, scope = Guards.of(source), source.scope(first)
    statement: ast.AST = source.statement(first)
    while statement is not scope:
        if isinstance(statement, ast.stmt) and not isinstance(statement, ast.Module):
            block = source.block(statement)
            for later in block[block.index(statement) + 1 :]:
                yield from _own_nodes(later)
            if isinstance(block[-1], ast.Break):  # the rest of the loop does not run
                statement = next(above for above in source.above(statement) if isinstance(above, _LOOPS | Scope))
                continue
            if guards.leaves(block) and not isinstance(block[-1], ast.Continue):
                return
        statement = source.parents[statement]


def _inside_called(source: Source, call: ast.Call, seen: set[Scope]) -> Iterator[ast.AST]:
    function = called(source, call)
    if function is None or function in seen:
        return
    seen.add(function)
    for statement in function.body:
        for node in _own_nodes(statement):
            yield node
            if isinstance(node, ast.Call):
                yield from _inside_called(source, node, seen)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield ``node`` and the nodes in it, except those inside functions and lambdas."""
    yield node
    if isinstance(node, Function | ast.Lambda):
        return
    for child in ast.iter_child_nodes(node):
        yield from _own_nodes(child)
