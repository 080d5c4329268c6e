"""Rules on the order of calls between backward and step. The docstring of a rule describes the code that it reports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.averaging import (
    LIBRARIES,
    averages_in_step,
    averaging_functions,
    has_gradient_hooks,
    is_collective,
    synchronizing_functions,
)
from dualtrain.horovodize.events import STEP_KINDS, Event, events_by_scope, has, since_backward, skips, until_backward
from dualtrain.horovodize.nodes import argument_at, calls_in, first_argument, given_values, keyword, last_name
from dualtrain.horovodize.rules.losses import models_of_optimizer
from dualtrain.horovodize.rules.sent_models import are_related, is_new_model, owner_of
from dualtrain.horovodize.rules.step_repairs import (
    may_synchronize_elsewhere,
    skip_around,
    synchronize_before,
    synchronize_outside,
)
from dualtrain.horovodize.source import Finding, Scope, Source

_CURE = "call optimizer.synchronize() after backward, and step inside `with optimizer.skip_synchronize():`"


def clip_before_synchronize(source: Source) -> Iterator[Finding]:
    """Gradients are clipped, changed, or added to parameters before they are averaged."""
    for events in events_by_scope(source):
        for number, event in enumerate(events):
            before = since_backward(source, events, number)
            if event.kind not in ("clip", "change", "update") or has(before, "synchronize") or has(before, "unscale"):
                continue  # scaler_before_synchronize reports the line with unscale_
            if _may_be_synchronized(source, events, number) or _is_of_another_optimizer(source, event):
                continue
            if _is_for_one_process(source, events, event) or _is_of_unwrapped_model(source, event):
                continue
            if event.kind == "update" and _may_be_undone(source, events, number):
                continue
            later = [one for one in until_backward(events, number) if not source.exclusive(event.node, one.node)]
            if any(one.kind in STEP_KINDS for one in later) and not _may_be_averaged(source, events, number):
                message = f"{_mistake(event)}; {_CURE}"
                yield Finding(event.node.lineno, "trap", message, tuple(synchronize_before(source, events, number)))


def _mistake(event: Event) -> str:
    """Describe the mistake: ``event`` comes before the gradients are averaged."""
    if event.kind == "change":
        return "gradients are changed before they are averaged: the change may be lost, because param.grad is overwritten"
    if event.kind == "update":
        return "parameters are changed by gradients before these are averaged, so that weights differ between ranks"
    own = "values" if last_name(event.node.func) == "clip_grad_value_" else "norm"
    return f"gradients are clipped before they are averaged: each rank clips by its own {own}"


def scaler_before_synchronize(source: Source) -> Iterator[Finding]:
    """A GradScaler checks gradients for infinities before they are averaged."""
    for events in events_by_scope(source):
        for number, event in enumerate(events):
            if event.kind not in ("unscale", "scaled step"):
                continue
            before = since_backward(source, events, number)
            if has(before, "synchronize", event.optimizer) or has(before, "unscale", event.optimizer):
                continue
            if _may_be_synchronized(source, events, number) or _is_none(source, event.node.func):
                continue
            if _is_for_one_process(source, events, event):
                continue
            cure = _CURE.replace("step inside", "scaler.step(…) inside")
            message = "the GradScaler checks gradients before they are averaged: one rank may skip a step that others take"
            edits = tuple(synchronize_before(source, events, number))
            yield Finding(event.node.lineno, "trap", f"{message}; {cure}", edits)


def _is_none(source: Source, method: ast.expr) -> bool:
    """Return whether ``None`` is the only value that is assigned to the object of ``method``."""
    values = source.values.get(ast.unparse(method.value), []) if isinstance(method, ast.Attribute) else []
    return bool(values) and all(isinstance(value, ast.Constant) and value.value is None for value in values)


def apex_before_synchronize(source: Source) -> Iterator[Finding]:
    """Apex unscales gradients while they are averaged: ``amp.scale_loss`` without synchronize() in its block."""
    for node in source.nodes:
        if not isinstance(node, ast.With):
            continue
        for call in (item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)):
            if source.name(call.func) != "apex.amp.scale_loss" or not _unscales(call):
                continue
            called = {last_name(one.func) for one in calls_in(node)}
            wrapped = any(last_name(one) in source.wrapped for one in _optimizers(call))
            if wrapped and "backward" in called and not any("sync" in name for name in called):
                message = (
                    "apex unscales the gradients at the end of this block, while they are still being averaged; call "
                    "optimizer.synchronize() in the block, and step inside `with optimizer.skip_synchronize():`"
                )
                yield Finding(call.lineno, "trap", message)


def _unscales(call: ast.Call) -> bool:
    """Return whether ``amp.scale_loss`` certainly unscales gradients at the end of its block."""
    delay = argument_at(call, 4, "delay_unscale")
    return delay is None or (isinstance(delay, ast.Constant) and not delay.value)


def _optimizers(call: ast.Call) -> list[ast.expr]:
    """Return the optimizers that ``amp.scale_loss`` gets: one, or a list of them."""
    given = argument_at(call, 1, "optimizers")
    return given.elts if isinstance(given, ast.List | ast.Tuple) else [given] if given is not None else []


def _may_be_synchronized(source: Source, events: list[Event], number: int) -> bool:
    """Return whether another function may have averaged the gradients before event ``number``.

    True after a call of a function that averages gradients, judging by its name or by the names that it calls. Also True if
    no backward pass precedes the event in its function, and the program calls ``synchronize`` anywhere.
    """
    passes, between = _since_last_pass(source, events, number)
    named = {last_name(call.func) for call in between if not source.name(call.func).startswith(LIBRARIES)}
    if any(averages_in_step(name) and not name.endswith("synchronize") for name in named):
        return True
    if any(not named.isdisjoint(file.once(synchronizing_functions)) for file in source.files):
        return True
    calls = (call for file in source.files for call in file.calls if not file.name(call.func))
    return not passes and any(last_name(call.func) == "synchronize" for call in calls)


#: Words in conditions that are true if there are several processes.
_SEVERAL = re.compile(r"dist|multi|parallel|world", re.IGNORECASE)


def _is_for_one_process(source: Source, events: list[Event], event: Event) -> bool:
    """Return whether ``event`` is in the ``else`` of an ``if`` such as ``if multi_gpu:`` whose body calls synchronize()."""
    synchronized = [one.node for one in events if one.kind == "synchronize"]
    for branch in source.around(event.node, ast.If):
        inside = {node for statement in branch.body for node in ast.walk(statement)}
        averages = event.node not in inside and any(node in inside for node in synchronized)
        if averages and _SEVERAL.search(ast.unparse(branch.test)):
            return True
    return False


def _since_last_pass(source: Source, events: list[Event], number: int) -> tuple[list[ast.Call], list[ast.Call]]:
    """Return the backward passes before event ``number``, and its function's calls between the last pass and the event.

    If there is no pass, return all calls of the function before the event.
    """
    event, earlier = events[number], events[:number]
    passes = [one.node for one in earlier if one.kind == "backward" and not source.exclusive(one.node, event.node)]
    first = passes[-1].lineno if passes else 0
    scope = source.scope(event.node)
    return passes, [
        call for call in source.calls if first <= call.lineno <= event.node.lineno and source.scope(call) is scope
    ]


def _may_be_averaged(source: Source, events: list[Event], number: int) -> bool:
    """Return whether the script may have averaged the gradients by other calls than synchronize() before event ``number``.

    True if it calls a collective, a function that calls one, an inherited method, or an imported function that may get the
    model, its parameters or its gradients. Also True if it has hooks on gradients.
    """
    if has_gradient_hooks(source):
        return True
    averaging = averaging_functions(source)
    loop = next(source.around(events[number].node, ast.For), None)
    inside = list(calls_in(loop)) if loop is not None else []
    # A loop that contains backward is the training loop. Any other may be a loop over parameters that averages gradients.
    averages = [] if any(last_name(call.func) == "backward" for call in inside) else inside
    for call in (*averages, *_since_last_pass(source, events, number)[1]):
        name, full = last_name(call.func), source.name(call.func)
        method = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self"
        inherited = method and name not in source.functions and ast.unparse(call.func) not in source.values
        values = (one for one in given_values(call) if isinstance(one, ast.Attribute | ast.Call | ast.Name))
        given = " ".join(map(ast.unparse, values))
        unknown = full and not full.startswith(LIBRARIES) and re.search(r"param|model|net|grad", given, re.IGNORECASE)
        if is_collective(name) or name in averaging or inherited or unknown:
            return True
    return False


def _is_of_another_optimizer(source: Source, event: Event) -> bool:
    """Return whether the first step after ``event``, in its block or an outer one, is of an unwrapped optimizer."""
    statement: ast.AST = source.statement(event.node)
    while not isinstance(statement, Scope) and isinstance(statement, ast.stmt):
        block = source.block(statement)
        later = block[block.index(statement) + 1 :]
        for call in calls_in(*later):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "step":
                given = first_argument(call, "optimizer")
                owner = last_name(given if isinstance(given, ast.Name | ast.Attribute) else call.func.value)
                return owner not in source.wrapped and owner in source.plain_optimizers
        statement = source.parents[statement]
    return False


def _is_of_unwrapped_model(source: Source, event: Event) -> bool:
    """Return whether ``event`` is in a loop over the parameters of a model that surely has no wrapped optimizer."""
    known = [models_of_optimizer(source, wrap) for _, wrap in source.wraps]
    if event.kind == "clip" or not known or not all(known) or any(file.wraps for file in source.files[1:]):
        return False
    here = (source.tree, source.scope(event.node))
    if any(source.scope(wrap) not in here for _, wrap in source.wraps):
        return False
    for loop in source.around(event.node, ast.For):
        owner = owner_of(loop.iter, "parameters", "named_parameters")
        if owner is not None and is_new_model(source, owner):
            return not any(are_related(source, ast.unparse(owner), model) for models in known for model in models)
    return False


#: Methods by which a script may set parameters to their earlier values.
_RESTORES = ("add_", "copy_", "load_state_dict", "sub_")


def _may_be_undone(source: Source, events: list[Event], number: int) -> bool:
    """Return whether the script may change parameters temporarily, for a second loss, as in sharpness-aware minimization.

    True if the parameters are changed again between the same two backward passes; or if, before the next step, the script
    assigns to ``data``, calls a method in ``_RESTORES``, or calls one of its functions that runs a backward pass.
    """
    event = events[number]
    later = [one for one in until_backward(events, number) if not source.exclusive(event.node, one.node)]
    if any(one.kind == "update" for one in (*(since_backward(source, events, number) or ()), *later)):
        return True
    step = next((one.node for one in later if one.kind in STEP_KINDS), event.node)
    loops = [loop for loop in source.around(event.node, ast.For) if loop not in source.above(step)]
    first, scope = (loops[-1] if loops else event.node).end_lineno or 0, source.scope(event.node)
    passes = {name for file in source.files for name, names in file.called_names if "backward" in names}
    for node in source.nodes:
        if isinstance(node, ast.Assign | ast.Call) and first < node.lineno < step.lineno and source.scope(node) is scope:
            name = last_name(node.targets[0] if isinstance(node, ast.Assign) else node.func)
            if name in passes or name in (("data",) if isinstance(node, ast.Assign) else _RESTORES):
                return True
    return False


def second_reduction(source: Source) -> Iterator[Finding]:
    """After synchronize(), a step outside skip_synchronize() reduces the gradients again."""
    for events in events_by_scope(source):
        for number, event in enumerate(events):
            if event.kind not in STEP_KINDS or skips(source, event) or keyword(event.node, "synchronize") is not None:
                continue  # old versions of Horovod have step(synchronize=False) instead of skip_synchronize()
            before = since_backward(source, events, number)
            if has(before, "synchronize", event.optimizer) and not _is_alternative(source, events, event):
                message = "this step reduces the gradients again; with op=Sum this multiplies them by the number of ranks"
                cure = "step inside `with optimizer.skip_synchronize():`"
                yield Finding(event.node.lineno, "trap", f"{message}; {cure}", tuple(skip_around(source, event)))


def skipped_reduction(source: Source) -> Iterator[Finding]:
    """A step in skip_synchronize() without synchronize() may use gradients that have not been averaged."""
    for events in events_by_scope(source):
        for number, event in enumerate(events):
            before = since_backward(source, events, number, ignore_steps=True)
            if event.kind != "step" or before is None or not skips(source, event) or has(before, "synchronize"):
                continue
            # clip_before_synchronize reports a clip, change or update. Of several steps, only the first is reported.
            early = any(one.kind in ("clip", "change", "update", *STEP_KINDS) for one in before)
            averaged = _may_be_synchronized(source, events, number) or _may_be_averaged(source, events, number)
            if not early and not averaged and not may_synchronize_elsewhere(source, event):
                message = (
                    "skip_synchronize() without synchronize(): this step does not wait for averaged gradients, so that "
                    "weights may differ between ranks; call optimizer.synchronize() after backward"
                )
                yield Finding(event.node.lineno, "trap", message, tuple(synchronize_outside(source, event)))


def _is_alternative(source: Source, events: list[Event], step: Event) -> bool:
    """Return whether the script chooses between ``step`` and a step in skip_synchronize().

    Each synchronize() of the optimizer must be under an ``if`` that does not contain ``step``. The script then most likely
    calls both synchronize() and the step in skip_synchronize(), or neither of them.
    """
    others = [event for event in events if event.kind in STEP_KINDS and source.exclusive(event.node, step.node)]
    if not any(skips(source, other) and other.optimizer == step.optimizer for other in others):
        return False
    around = list(source.above(step.node))
    synchronized = [event for event in events if event.kind == "synchronize" and event.optimizer == step.optimizer]
    conditions = [list(source.around(one.node, ast.If)) for one in synchronized]
    return all(any(condition not in around for condition in found) for found in conditions)


def zero_grad_before_step(source: Source) -> Iterator[Finding]:
    """Gradients are zeroed during their reduction: Horovod raises AssertionError."""
    for events in events_by_scope(source):
        for number, event in enumerate(events):
            if event.kind != "zero_grad":
                continue
            before = since_backward(source, events, number, ignore_steps=True)
            used = any(has(before, kind, event.optimizer) for kind in ("step", "scaled step", "synchronize"))
            stepped = any(
                later.kind in STEP_KINDS and later.optimizer == event.optimizer for later in until_backward(events, number)
            )
            if before is not None and stepped and not used:
                message = "zero_grad() between backward and step raises AssertionError; call it before backward"
                yield Finding(event.node.lineno, "trap", message)
