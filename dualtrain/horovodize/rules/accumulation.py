"""The rule on several backward passes before a step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dualtrain.horovodize.averaging import with_callers
from dualtrain.horovodize.edits import Edit
from dualtrain.horovodize.events import STEP_KINDS, Event, events_by_scope
from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.nodes import calls_in, last_name, variables_in
from dualtrain.horovodize.periods import Period, changes_in, holds_once, modulo_in, reset_counter
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
    """Return ``(N,)`` for ``backward(); if i % N == 0: step()``, or with ``if i % N: continue``; else None.

    Return ``(None,)`` if the step may not run in one of N iterations, as with ``if i % N: step()``.
    """
    ends = _LOOP | Function | ast.ExceptHandler  # a step after an exception is not one of every N
    loop = next((above for above in source.above(step.node) if isinstance(above, ends)), None)
    if not isinstance(loop, _LOOP):
        return None
    in_loop = [event for event in events if loop in source.above(event.node)]
    for branch, lines in _branches(source, step.node, loop):
        truth = any(part in branch.body for part in source.above(step.node))
        period = modulo_in(source, branch.test) or reset_counter(loop, branch, lines, truth)
        passes = None if period is None else source.constant(period.length)
        if period is None or not changes_in(loop, period.counter) or (passes is not None and passes.value == 1):
            continue
        if any(event.kind == "backward" and event.node.lineno in lines for event in in_loop):
            continue
        skips = range(branch.lineno, lines.start)  # the body of `if i % N: continue`
        if _calls(source, [loop], lines, {"backward"}) or _calls(source, [loop], skips, {"step", "synchronize"}):
            continue
        steps = [event for event in in_loop if event.kind in _STEPS and event.optimizer == step.optimizer]
        if all(any(_is_in(source, event, arm) for event in steps) for arm in (branch.body, branch.orelse)):
            continue
        around = [event for event in in_loop if event.node.lineno not in lines]
        around = [event for event in around if not _depends_on(source, event, period, branch.test, loop)]
        kinds = {event.kind for event in around if event.optimizer in ("", step.optimizer)}
        others = [event for event in in_loop if event.kind in STEP_KINDS and event.optimizer != step.optimizer]
        # Optimizers that take turns do not accumulate: each iteration's backward pass is for one of them. All may share one
        # call of backward(), after `model = one if i % 2 else two`.
        alternate = any(source.exclusive(one.node, step.node) or _is_left_out(branch, lines, one) for one in others)
        once = holds_once(source, branch.test, period.node) is truth or (passes is not None and passes.value == 2)
        length = period.length if once else None
        return (length,) if "backward" in kinds and not alternate and not kinds & _STEPS else None
    return None


_STEPS = {*STEP_KINDS, "synchronize"}


def _branches(source: Source, node: ast.AST, loop: ast.For | ast.While) -> Iterator[tuple[ast.If, range]]:
    """Yield each ``if`` around ``node`` in its innermost ``loop``, with the numbers of its lines.

    Also yield each ``if …: continue`` before ``node``, in the same block or one around it, with the lines of ``loop`` after
    ``continue``: they include the ``else`` of the ``if``.
    """
    below = node
    for above in source.above(node):
        if isinstance(below, ast.stmt):
            block = source.block(below)
            for earlier in block[: block.index(below)]:
                if isinstance(earlier, ast.If) and isinstance(end := earlier.body[-1], ast.Continue):
                    yield earlier, range(end.lineno + 1, (loop.end_lineno or 0) + 1)
        if above is loop:
            return
        if isinstance(above, ast.If):
            yield above, range(above.lineno, (above.end_lineno or 0) + 1)
        below = above


def _is_in(source: Source, event: Event, block: list[ast.stmt]) -> bool:
    """Return whether ``event`` is in ``block``, outside of any other ``if``."""
    ifs = {above for above in block if isinstance(above, ast.If)}
    return any(above in block for above in source.above(event.node)) and not ifs.intersection(source.above(event.node))


def _is_left_out(branch: ast.If, lines: range, event: Event) -> bool:
    """Return whether ``branch`` ends with ``continue``, and ``event`` is in or after it, but not in ``lines``."""
    line = event.node.lineno
    return isinstance(branch.body[-1], ast.Continue) and line >= branch.lineno and line not in lines


def _calls(source: Source, block: list[ast.stmt], lines: range, methods: set[str]) -> bool:
    """Return whether a function that ``block`` calls in ``lines`` calls one of ``methods``, perhaps through others."""
    names = with_callers(methods, source.called_names) - methods
    return any(call.lineno in lines and last_name(call.func) in names for call in calls_in(*block))


def _depends_on(source: Source, event: Event, period: Period, condition: ast.expr, loop: ast.AST) -> bool:
    """Return whether, in ``loop``, the backward pass ``event`` is in an ``if`` that also decides on steps.

    The test of such an ``if`` contains ``i % N``, or the counter that is reset; or ``N``; or ``condition`` (the test before
    the step) without ``not``. A constant ``N`` does not count, because equal constants may be a coincidence.
    """
    if event.kind != "backward":
        return False
    while isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        condition = condition.operand
    counter = period.counter if isinstance(period.node, ast.Compare) else period.node
    same = {ast.unparse(one) for one in (counter, condition, period.length) if not isinstance(one, ast.Constant)}
    tests = [above.test for above in source.around(event.node, ast.If) if loop in source.above(above)]
    return any(ast.unparse(node) in same for test in tests for node in ast.walk(test))


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
    statement: ast.stmt = source.statement(step.node)
    while isinstance(around := source.parents[statement], ast.With) and not _has_backward(around):
        statement = around  # with optimizer.skip_synchronize():
    block = source.block(statement)
    backwards: list[ast.Call] = []
    for event in reversed(events[: events.index(step)]):
        if event.kind in STEP_KINDS or (event.kind == "synchronize" and backwards):
            break
        if event.kind == "backward" and source.statement(event.node) in block:
            backwards.append(event.node)
    between = range(backwards[-1].lineno, backwards[0].lineno) if backwards else range(0)
    waits = any(last_name(call.func) == "synchronize" and call.lineno in between for call in calls_in(*block))
    if waits or _calls(source, block, between, {"synchronize"}):
        return None
    after = block[block.index(statement) :]
    many = len(backwards) > max(1, _steps_until_backward(after))
    return (None,) if many and _share_parameters(source, backwards, step) else None


def _has_backward(block: ast.With) -> bool:
    return any(last_name(call.func) == "backward" for call in calls_in(block))


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
    step_scope, wrap_scope = source.scope(step), source.scope(wrap)
    is_parameter = _has_parameter(step_scope, root.id) and _has_parameter(wrap_scope, root.id)
    scopes = {step_scope, wrap_scope} if is_parameter else {step_scope, wrap_scope, source.tree}
    assigned = [
        statement
        for target, _, statement in source.assignments
        if target == ast.unparse(value) or (target == root.id and source.scope(statement) in scopes)
    ]
    early = [one for one in assigned if one.lineno < wrap.lineno]
    if len(assigned) != len(early):
        return False  # the name is assigned again later
    if step_scope is wrap_scope:
        assigned_in = {source.scope(one) for one in assigned}
        return _has_parameter(wrap_scope, root.id) or bool(assigned_in & {wrap_scope, source.tree})
    local = [one for one in assigned if source.scope(one) is not source.tree]
    if is_parameter:
        return True
    at_top = [one for one in early if source.parents[one] is source.tree]
    return bool(at_top) and not local and not (_has_parameter(step_scope, root.id) or _has_parameter(wrap_scope, root.id))


def _has_parameter(scope: ast.AST, name: str) -> bool:
    return isinstance(scope, Function) and name in {word.arg for word in (*scope.args.args, *scope.args.kwonlyargs)}
