"""Repairs for the order of calls between backward and step."""

from __future__ import annotations

import ast

from dualtrain.horovodize.edits import Edit
from dualtrain.horovodize.events import STEP_KINDS, Event, has, since_backward, skips, until_backward
from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.nodes import last_name
from dualtrain.horovodize.source import Function, Source


def synchronize_before(source: Source, events: list[Event], number: int) -> list[Edit]:
    """Return edits that insert synchronize() before event ``number`` and put the next step into skip_synchronize().

    A step that is in skip_synchronize() already stays there. An event without an optimizer, such as clipping, concerns
    all optimizers that step before the next backward pass. Return no edits in these cases:

    - No step follows, or a step does not certainly follow.
    - synchronize() follows, or the GradScaler has unscaled the gradients before.
    - A step has a closure, its optimizer is perhaps not wrapped, or the script uses Adasum.
    - Other code may synchronize before a step in skip_synchronize().
    - The code around the calls prevents an edit.
    """
    event = events[number]
    later = [event, *until_backward(events, number)]
    reached = [step for step in later if step.kind in STEP_KINDS and not source.exclusive(step.node, event.node)]
    firsts = {step.optimizer: step for step in reversed(reached)}
    if event.optimizer:
        firsts = {name: step for name, step in firsts.items() if name == event.optimizer}
    before = since_backward(source, events, number)
    if not firsts or any(has(before, "unscale", name) for name in firsts):
        return []
    edits: list[Edit] = []
    guards = Guards.of(source)
    for step in firsts.values():
        owner = _repairable_owner(source, step)
        if not owner or has(later, "synchronize", step.optimizer):
            return []
        if not guards.runs_whenever(step.node, event.node):
            return []  # in a pass without a step, synchronize() would be too early: later passes add to the gradients
        place = _statement_in_common_block(source, event.node, step.node)
        skipped = any(ast.unparse(item) == f"{owner}.skip_synchronize()" for item in source.with_items(step.node))
        if skipped and may_synchronize_elsewhere(source, step):
            return []
        skip = [] if skips(source, step) else skip_around(source, step)
        inserted = source.layout.insert_before(place, f"{owner}.synchronize()") if place else []
        if not (skip or skipped) or not inserted:
            return []
        edits += [*inserted, *skip]
    return _merged(edits)


def skip_around(source: Source, step: Event) -> list[Edit]:
    """Return edits that put the statement of a step into ``with optimizer.skip_synchronize():``.

    Return no edits if the step has a closure or is part of a longer statement, if the optimizer is perhaps not wrapped, or
    if the script uses Adasum.
    """
    owner, statement = _repairable_owner(source, step), source.statement(step.node)
    simple = isinstance(statement, ast.Expr | ast.Assign)
    return source.layout.wrap(statement, f"with {owner}.skip_synchronize():") if owner and simple else []


def synchronize_outside(source: Source, step: Event) -> list[Edit]:
    """Return edits that insert synchronize() before the ``with optimizer.skip_synchronize():`` that contains only ``step``.

    Return no edits if there is no such block, if the step has a closure, if the optimizer is perhaps not wrapped, or if the
    script uses Adasum.
    """
    block = source.parents[source.statement(step.node)]
    if not isinstance(block, ast.With) or len(block.body) > 1 or "skip_synchronize" not in ast.unparse(block.items[0]):
        return []
    owner = _repairable_owner(source, step)
    return source.layout.insert_before(block, f"{owner}.synchronize()") if owner else []


def may_synchronize_elsewhere(source: Source, step: Event) -> bool:
    """Return whether other code, which gets the optimizer or has its own variable for it, may call synchronize()."""
    scope, owner = source.scope(step.node), ast.unparse(step.owner) if step.owner is not None else ""
    for file in source.files:
        for call in file.calls:
            if last_name(call.func) != "synchronize" or file.name(call.func):
                continue
            known = isinstance(call.func, ast.Attribute) and last_name(call.func.value) in source.wrapped
            if not known or file is not source or source.scope(call) is not scope:
                return True
    given = (
        value for call in source.calls if source.scope(call) is scope and not source.name(call.func) for value in call.args
    )
    return any(ast.unparse(value) == owner for value in given)


def _repairable_owner(source: Source, step: Event) -> str:
    """Return the expression for the optimizer of ``step``.

    Return "" if it may be unwrapped, if the step has a closure, or if the script uses Adasum.
    """
    has_closure = step.kind == "step" and (step.node.args or step.node.keywords)
    return "" if step.owner is None or has_closure or not _can_synchronize(source, step) else ast.unparse(step.owner)


def _can_synchronize(source: Source, step: Event) -> bool:
    """Return whether the optimizer of ``step`` is certainly a wrapped one, and the script does not use Adasum.

    With Adasum, skip_synchronize() raises AssertionError.
    """
    wraps = [wrap for name, wrap in source.wraps if name == step.optimizer]
    if not wraps or any(source.hvd(node) == "Adasum" for node in source.nodes):
        return False
    guards = Guards.of(source)
    return not any(guards.is_conditional(wrap) for wrap in wraps) and all(
        last_name(value) in source.wrapped for value in _passed_optimizers(source, step)
    )


def _passed_optimizers(source: Source, step: Event) -> list[ast.expr]:
    """Return what callers pass for the optimizer of ``step`` if it is a parameter of a function; else an empty list."""
    function = source.scope(step.node)
    if not isinstance(function, Function) or not isinstance(step.owner, ast.Name):
        return []
    calls = (call for file in source.files for call in file.calls if last_name(call.func) == function.name)
    values = (source.argument(function, call, step.optimizer) for call in calls)
    return [value for value in values if value is not None]


def _statement_in_common_block(source: Source, first: ast.AST, step: ast.AST) -> ast.stmt | None:
    """Return the statement around ``first`` in the innermost block that also contains ``step``, or None."""
    around = [step, *source.above(step)]
    for above in (first, *source.above(first)):
        if isinstance(above, ast.stmt) and source.parents[above] in around:
            block = source.block(above)
            return above if any(part in block for part in around if isinstance(part, ast.stmt)) else None
    return None


def _merged(edits: list[Edit]) -> list[Edit]:
    """Return the edits without duplicates, and with one edit per place."""
    merged: dict[tuple[int, int], list[str]] = {}
    for start, end, new in edits:
        texts = merged.setdefault((start, end), [])
        if new not in texts:
            texts.append(new)
    return [Edit(start, end, "".join(texts)) for (start, end), texts in merged.items()]
