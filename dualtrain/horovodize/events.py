"""The calls of a training step (backward, clip, synchronize, step) in source order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from dualtrain.horovodize.gradient_changes import CLIPS, changing_functions, is_change, is_update
from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.nodes import calls_in, first_argument, last_name
from dualtrain.horovodize.source import Source

Kind = Literal["backward", "change", "clip", "scaled step", "step", "synchronize", "unscale", "update", "zero_grad"]
STEP_KINDS = ("step", "scaled step")


class Event(NamedTuple):
    """A call in a training step. If it uses a wrapped optimizer, ``optimizer`` is its name, and ``owner`` its expression.

    An event of the kind "change" or "update" may also be an assignment to a gradient or a parameter.
    """

    kind: Kind
    node: ast.Call
    optimizer: str = ""
    owner: ast.expr | None = None


def events_by_scope(source: Source) -> Iterator[list[Event]]:
    """Yield one list of events, in source order, for the module and for each function.

    Leave out events that run only without Horovod or with one rank.
    """
    guards, backwards, changes = Guards.of(source), _backward_functions(source), changing_functions(source)
    for nodes in source.scopes.values():
        found = [event for node in nodes if isinstance(node, ast.Call) and (event := _event(source, node, backwards))]
        changed = (node for node in nodes if is_change(source, node) or _is_call_of(node, changes))
        found += [Event("change", node) for node in changed]  # type: ignore[arg-type]  # the node may be an assignment
        found += [Event("update", node) for node in nodes if is_update(source, node)]  # type: ignore[arg-type]
        events = [event for event in found if not guards.is_without_horovod(event.node)]
        # Sort by the end of a call: `scaler.scale(loss).backward()` calls backward last.
        yield sorted(events, key=lambda event: (event.node.end_lineno or 0, event.node.end_col_offset or 0))


def _is_call_of(node: ast.AST, functions: set[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions


def _backward_functions(source: Source) -> set[str]:
    """Return the names of functions that call ``backward``, but not ``step``, ``synchronize`` or ``zero_grad``.

    Leave out methods.
    """
    found = set()
    for name, function in source.functions.items():
        calls = {last_name(call.func) for call in calls_in(function)}
        method = isinstance(source.parents[function], ast.ClassDef)
        if not method and "backward" in calls and not {"step", "synchronize", "zero_grad"} & calls:
            found.add(name)
    return found


def _event(source: Source, call: ast.Call, backward_functions: set[str]) -> Event | None:
    called = last_name(call.func)
    if called in CLIPS:
        return Event("clip", call)
    if isinstance(call.func, ast.Name) and called in backward_functions:
        return Event("backward", call)
    if not isinstance(call.func, ast.Attribute):
        return None
    if called == "backward":
        return Event("backward", call)
    receiver, given = last_name(call.func.value), first_argument(call, "optimizer")
    argument = "" if given is None else last_name(given)
    if (
        given is not None
        and argument in source.wrapped
        and called in ("step", "unscale_")
        and _is_scaler(source, call.func.value)
    ):
        plain = source.is_plain(given)
        return None if plain else Event("scaled step" if called == "step" else "unscale", call, argument, given)
    if receiver in source.wrapped and not source.is_plain(call.func.value):
        for kind in ("step", "synchronize", "zero_grad"):
            if called == kind:
                return Event(kind, call, receiver, call.func.value)
    return None


def _is_scaler(source: Source, receiver: ast.expr) -> bool:
    """Return whether ``receiver`` is a GradScaler, by its name or by a value that is assigned to it."""
    return any(re.search(r"scal|amp\b", ast.unparse(value), re.IGNORECASE) for value in source.possible_values(receiver))


def since_backward(source: Source, events: list[Event], number: int, *, ignore_steps: bool = False) -> list[Event] | None:
    """Return the events that come after the last backward pass or step, and before event ``number``, latest first.

    If event ``number`` has an optimizer, only steps of this optimizer count. If there is no earlier backward pass or step,
    return all events before ``number``. With ``ignore_steps``, no step counts: return all events since the last backward
    pass, or None if there is no earlier backward pass. Leave out events that are in a different branch of an ``if`` than
    event ``number``.
    """
    found: list[Event] = []
    this = events[number]
    for event in reversed(events[:number]):
        if source.exclusive(event.node, this.node):
            continue
        stepped = event.kind in STEP_KINDS and this.optimizer in ("", event.optimizer)
        if event.kind == "backward" or (stepped and not ignore_steps):
            return found
        found.append(event)
    return None if ignore_steps else found


def until_backward(events: list[Event], number: int) -> Iterator[Event]:
    """Yield the events between event ``number`` and the next backward pass."""
    for event in events[number + 1 :]:
        if event.kind == "backward":
            return
        yield event


def has(events: list[Event] | None, kind: Kind, optimizer: str = "") -> bool:
    """Return whether there is an event of this kind; with ``optimizer``, only events of this optimizer count."""
    return any(event.kind == kind and optimizer in ("", event.optimizer) for event in events or ())


def skips(source: Source, event: Event) -> bool:
    """Return whether the event is inside ``with optimizer.skip_synchronize()``."""
    return any("skip_synchronize" in ast.unparse(item) for item in source.with_items(event.node))
