"""The rule on several backward passes before a step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dualtrain.horovodize.edits import Edit
from dualtrain.horovodize.events import STEP_KINDS, Event, events_by_scope
from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.nodes import calls_in, is_stored, last_name, names_in, variables_in
from dualtrain.horovodize.rules.losses import models_of_loss, models_of_optimizer
from dualtrain.horovodize.source import Finding, Function, Source

_LOOP = ast.For | ast.While


def accumulation_without_passes(source: Source) -> Iterator[Finding]:
    """Several backward passes before a step, without backward_passes_per_step: an AssertionError."""
    if any(getattr(node, "attr", "") == "set_backward_passes_per_step" for node in source.nodes):
        return
    for events in events_by_scope(source):
        for event in events:
            wraps = [wrap for name, wrap in source.wraps if name == event.optimizer]
            known = wraps or ([wrap for file in source.files for _, wrap in file.wraps] if event.optimizer else [])
            if event.kind not in STEP_KINDS or not known or any(_may_have_passes(wrap) for wrap in known):
                continue
            found = (
                _every_nth(source, events, event) or _inner_loop(source, events, event) or _in_a_row(source, events, event)
            )
            if found is not None:
                message = (
                    "several backward passes before a step raise AssertionError if they reach the same parameters, on "
                    "Horovod too; pass backward_passes_per_step to DistributedOptimizer"
                )
                yield Finding(event.node.lineno, "trap", message, tuple(_with_passes(source, wraps, event, found[0])))


def _may_have_passes(wrap: ast.Call) -> bool:
    """Return whether ``wrap`` passes backward_passes_per_step, or ``**options``, which may contain it."""
    return len(wrap.args) > 3 or any(word.arg in ("backward_passes_per_step", None) for word in wrap.keywords)


def _every_nth(source: Source, events: list[Event], step: Event) -> tuple[ast.expr | None] | None:
    """Return ``(N,)`` for ``backward(); if i % N == 0: step()``, or with ``if i % N: continue``; else None."""
    loop = next((above for above in source.above(step.node) if isinstance(above, _LOOP | Function)), None)
    if not isinstance(loop, _LOOP):
        return None
    for test, inside in _branches(source, step.node):
        if (modulo := _modulo(source, test)) is not None:
            if any(event.kind == "backward" and event.node in inside for event in events):
                return None
            passes = source.constant(modulo.right)
            if not _changes_in(loop, modulo.left) or (passes is not None and passes.value == 1):
                return None
            around = [event for event in events if loop in source.above(event.node) and event.node not in inside]
            around = [event for event in around if not _depends_on(source, event, modulo.right, loop)]
            kinds = {event.kind for event in around if event.optimizer in ("", step.optimizer)}
            steps_elsewhere = kinds & {"step", "scaled step", "synchronize"}
            return (modulo.right,) if "backward" in kinds and not steps_elsewhere else None
    return None


def _branches(source: Source, node: ast.AST) -> Iterator[tuple[ast.expr, set[ast.AST]]]:
    """Yield the condition and nodes of each ``if`` around ``node`` in its innermost loop.

    For ``if …: continue`` before ``node``, in the same block or one around it, yield the nodes after it in this block.
    """
    below = node
    for above in source.above(node):
        if isinstance(below, ast.stmt):
            block = source.block(below)
            for place, earlier in enumerate(block[: block.index(below)]):
                if isinstance(earlier, ast.If) and isinstance(earlier.body[-1], ast.Continue):
                    yield earlier.test, {part for later in block[place + 1 :] for part in ast.walk(later)}
        if isinstance(above, _LOOP):
            return
        if isinstance(above, ast.If):
            yield above.test, set(ast.walk(above))
        below = above


def _depends_on(source: Source, event: Event, passes: ast.expr, loop: ast.AST) -> bool:
    """Return whether, inside ``loop``, the backward pass ``event`` is in an ``if`` whose condition contains ``passes``.

    ``passes`` is the N of ``i % N``. Return ``False`` if it is a constant: another condition may contain the same number by
    chance.
    """
    if event.kind != "backward" or isinstance(passes, ast.Constant):
        return False
    tests = [above.test for above in source.around(event.node, ast.If) if loop in source.above(above)]
    return any(ast.unparse(passes) == ast.unparse(node) for test in tests for node in ast.walk(test))


def _changes_in(loop: ast.For | ast.While, value: ast.expr) -> bool:
    """Return whether a variable in ``value`` changes in ``loop``, as a counter of batches does."""
    names = names_in(value)
    return any(ast.unparse(node) in names for node in filter(is_stored, ast.walk(loop)))


def _modulo(source: Source, test: ast.expr) -> ast.BinOp | None:
    """Return ``i % N`` in ``test``, in the value of ``test``, or in a condition whose variables decide on ``test``.

    An index does not count, nor does a call (other than ``bool()`` and ``int()``) in the value of an operand: the loss in
    ``if isfinite(loss)`` may be computed from ``data[i % N]``.
    """
    whole = (node for value in source.possible_values(test) for node in _without_indices(value))
    for node in (*whole, *_operands(source, test, set())):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not isinstance(node.left, ast.Constant):
            return node
    return None


def _without_indices(node: ast.AST) -> Iterator[ast.AST]:
    """Yield ``node`` and the nodes in it, except those inside the index of ``data[i]``."""
    yield node
    for child in [node.value] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node):
        yield from _without_indices(child)


def _operands(source: Source, condition: ast.expr, seen: set[str]) -> Iterator[ast.expr]:
    """Yield ``condition``, and the operands of its ``not``, ``and``, ``or``, comparisons, ``bool()`` and ``int()``.

    Yield the values of variables among them, too, and the operands of these values. The variables in ``seen`` are left out;
    those that are found are added to it.
    """
    yield condition
    inside: list[ast.AST] = []
    if isinstance(condition, ast.BoolOp | ast.UnaryOp | ast.Compare | ast.IfExp | ast.NamedExpr):
        inside = list(ast.iter_child_nodes(condition))
    elif isinstance(condition, ast.Call) and last_name(condition.func) in ("bool", "int"):
        inside = [*condition.args]
    elif (text := ast.unparse(condition)) not in seen:
        seen.add(text)
        inside = [*source.values.get(text, ())]
    for operand in inside:
        if isinstance(operand, ast.expr):
            yield from _operands(source, operand, seen)


def _inner_loop(source: Source, events: list[Event], step: Event) -> tuple[ast.expr | None] | None:
    """Return ``(N,)`` for ``for … in range(N): backward()`` before a step, ``(None,)`` for other loops, else None."""
    around_step = list(source.above(step.node))
    before = events[: events.index(step)]
    last = next((event for event in reversed(before) if event.kind == "backward"), None)
    if last is None or source.exclusive(last.node, step.node):
        return None
    loops = [above for above in source.above(last.node) if isinstance(above, _LOOP) and above not in around_step]
    if not loops or any(isinstance(above, Function) and above not in around_step for above in source.above(last.node)):
        return None
    loop = loops[-1]
    methods = {call.func.attr for call in calls_in(loop) if isinstance(call.func, ast.Attribute)}
    if methods & {"step", "synchronize", "minimize"}:
        return None
    if isinstance(loop, ast.For) and _loops_over_models(source, loop, last.node):
        return None
    return (_range_of(loop),)


def _loops_over_models(source: Source, loop: ast.For, backward: ast.Call) -> bool:
    """Return whether each iteration may use a different model, because the loop variable is called to compute the loss."""
    names = variables_in(loop.target)
    roots = {model.partition(".")[0].partition("[")[0] for model in models_of_loss(source, backward)}
    calls = (call for call in calls_in(loop) if last_name(call.func) not in _OF_DATA)
    called = {ast.unparse(call.func).partition(".")[0] for call in calls}
    return bool(names & called) and not roots - names


#: Methods of tensors and dictionaries. A call of such a method does not show that the object is a model.
_OF_DATA = ("cpu", "cuda", "float", "half", "items", "keys", "long", "reshape", "size", "to", "unsqueeze", "view")


def _in_a_row(source: Source, events: list[Event], step: Event) -> tuple[ast.expr | None] | None:
    """Return ``(None,)`` for ``real.backward(); fake.backward(); step()`` in one block, else None.

    There must be more backward passes than steps: ``one.backward(); two.backward(); first.step(); second.step()`` is
    correct if the two losses reach different parameters.
    """
    block = source.block(source.statement(step.node))
    backwards = []
    for event in reversed(events[: events.index(step)]):
        if event.kind in (*STEP_KINDS, "synchronize"):
            break
        if event.kind == "backward" and source.statement(event.node) in block:
            backwards.append(event.node)
    after = block[block.index(source.statement(step.node)) :]
    many = len(backwards) > max(1, _steps_until_backward(after))
    return (None,) if many and _share_parameters(source, backwards, step) else None


def _share_parameters(source: Source, backwards: list[ast.Call], step: Event) -> bool:
    """Return whether two backward passes certainly reach the same model.

    If any backward pass reaches a model of the optimizer, only models of the optimizer count.
    """
    wraps = [(file, wrap) for file in source.files for name, wrap in file.wraps if name == step.optimizer]
    own = {model for file, wrap in wraps for model in models_of_optimizer(file, wrap)}
    reached = [models_of_loss(source, backward) for backward in backwards]
    shared = {model for number, one in enumerate(reached) for other in reached[:number] for model in one & other}
    return bool(shared & own if any(own & one for one in reached) else shared)


def _steps_until_backward(block: list[ast.stmt]) -> int:
    """Return the number of steps of all optimizers, wrapped or not, before the next backward pass in ``block``."""
    found = 0
    for call in calls_in(*block):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
            break
        if isinstance(call.func, ast.Attribute) and call.func.attr == "step":
            found += "sched" not in ast.unparse(call.func.value).lower()
    return found


def _range_of(loop: ast.For | ast.While) -> ast.expr | None:
    if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "range":
        return loop.iter.args[0] if len(loop.iter.args) == 1 else None
    return None


def _with_passes(source: Source, wraps: list[ast.Call], step: Event, passes: ast.expr | None) -> list[Edit]:
    if passes is None or len(wraps) != 1 or Guards.of(source).is_conditional(wraps[0]):
        return []
    if not _is_known_at(source, passes, wraps[0], step.node):
        return []
    return source.layout.add_keywords(wraps[0], [f"backward_passes_per_step={ast.unparse(passes)}"])


def _is_known_at(source: Source, value: ast.expr, wrap: ast.Call, step: ast.Call) -> bool:
    """Return whether ``value`` certainly has the same value at ``wrap`` as at ``step``. A constant must be an integer."""
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int)
    root = value
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name) or root.id == "self":
        return False
    here, there = source.scope(step), source.scope(wrap)
    is_parameter = _has_parameter(here, root.id) and _has_parameter(there, root.id)
    scopes = {here, there} if is_parameter else {here, there, source.tree}
    assigned = [
        statement
        for target, _, statement in source.assignments
        if target == ast.unparse(value) or (target == root.id and source.scope(statement) in scopes)
    ]
    early = [one for one in assigned if one.lineno < wrap.lineno]
    if len(assigned) != len(early):
        return False  # the name is assigned again later
    if here is there:
        assigned_in = {source.scope(one) for one in assigned}
        return _has_parameter(there, root.id) or bool(assigned_in & {there, source.tree})
    local = [one for one in assigned if source.scope(one) is not source.tree]
    if is_parameter:
        return True
    at_top = [one for one in early if source.parents[one] is source.tree]
    return bool(at_top) and not local and not (_has_parameter(here, root.id) or _has_parameter(there, root.id))


def _has_parameter(scope: ast.AST, name: str) -> bool:
    return isinstance(scope, Function) and name in {word.arg for word in (*scope.args.args, *scope.args.kwonlyargs)}
