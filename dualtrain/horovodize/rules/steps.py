"""Rules on the order of calls between backward and step."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Literal, NamedTuple

from dualtrain.horovodize.source import Finding, Source, last_name

Kind = Literal["backward", "clip", "scaled step", "step", "synchronize", "unscale", "zero_grad"]
_CLIPS = {"clip_grad_norm", "clip_grad_norm_", "clip_grad_value_"}
_CURE = "call optimizer.synchronize() after backward, and step inside `with optimizer.skip_synchronize():`"


class Event(NamedTuple):
    """A call in a training step, and the name of its wrapped optimizer."""

    kind: Kind
    node: ast.Call
    optimizer: str = ""


def clip_before_synchronize(source: Source) -> Iterator[Finding]:
    """Gradients are clipped before they are averaged."""
    for events in _steps(source):
        for number, event in enumerate(events):
            if event.kind != "clip" or _has(_since_backward(source, events, number), "synchronize"):
                continue
            if any(later.kind in ("step", "scaled step") for later in _until_backward(events, number)):
                message = f"gradients are clipped before they are averaged, on each rank by its own norm; {_CURE}"
                yield Finding(event.node.lineno, "trap", message)


def scaler_before_synchronize(source: Source) -> Iterator[Finding]:
    """A GradScaler checks gradients for infinities before they are averaged."""
    for events in _steps(source):
        for number, event in enumerate(events):
            if event.kind not in ("unscale", "scaled step"):
                continue
            before = _since_backward(source, events, number)
            if _has(before, "synchronize", event.optimizer) or _has(before, "unscale", event.optimizer):
                continue
            message = "the GradScaler checks gradients before they are averaged: one rank may skip a step that others take"
            yield Finding(event.node.lineno, "trap", f"{message}; {_CURE.replace('step inside', 'scaler.step(…) inside')}")


def second_reduction(source: Source) -> Iterator[Finding]:
    """After synchronize(), a step outside skip_synchronize() reduces the gradients again."""
    for events in _steps(source):
        for number, event in enumerate(events):
            if event.kind not in ("step", "scaled step") or _skips(source, event):
                continue
            if _has(_since_backward(source, events, number), "synchronize", event.optimizer):
                message = "gradients are reduced a second time here, at the same cost; with op=Sum they grow by the size"
                yield Finding(event.node.lineno, "trap", f"{message}; step inside `with optimizer.skip_synchronize():`")


def zero_grad_before_step(source: Source) -> Iterator[Finding]:
    """Gradients are zeroed during their reduction: Horovod raises AssertionError."""
    for events in _steps(source):
        for number, event in enumerate(events):
            if event.kind != "zero_grad":
                continue
            before = _since_backward(source, events, number, strictly=True)
            used = any(_has(before, kind, event.optimizer) for kind in ("step", "scaled step", "synchronize"))
            stepped = any(
                later.kind in ("step", "scaled step") and later.optimizer == event.optimizer
                for later in _until_backward(events, number)
            )
            if before is not None and stepped and not used:
                message = "zero_grad() between backward and step raises AssertionError; call it before backward"
                yield Finding(event.node.lineno, "trap", message)


def _steps(source: Source) -> Iterator[list[Event]]:
    """Yield the events of each function in source order."""
    for _, nodes in source.scopes():
        events = [event for node in nodes if isinstance(node, ast.Call) and (event := _event(source, node))]
        # Sort by the end of a call: `scaler.scale(loss).backward()` calls backward last.
        yield sorted(events, key=lambda event: (event.node.end_lineno or 0, event.node.end_col_offset or 0))


def _event(source: Source, call: ast.Call) -> Event | None:
    called = last_name(call.func)
    if called in _CLIPS:
        return Event("clip", call)
    if not isinstance(call.func, ast.Attribute):
        return None
    if called == "backward":
        return Event("backward", call)
    on, given = last_name(call.func.value), last_name(call.args[0]) if call.args else ""
    if given in source.wrapped and called in ("step", "unscale_"):
        return Event("scaled step" if called == "step" else "unscale", call, given)
    if on in source.wrapped:
        for kind in ("step", "synchronize", "zero_grad"):
            if called == kind:
                return Event(kind, call, on)
    return None


def _since_backward(source: Source, events: list[Event], number: int, *, strictly: bool = False) -> list[Event] | None:
    """Return the events since the last backward. Without one, return all earlier events, or None if ``strictly``."""
    found: list[Event] = []
    this = events[number]
    for event in reversed(events[:number]):
        if source.exclusive(event.node, this.node):
            continue
        stepped = event.kind in ("step", "scaled step") and this.optimizer in ("", event.optimizer)
        if event.kind == "backward" or (stepped and not strictly):
            return found
        found.append(event)
    return None if strictly else found


def _until_backward(events: list[Event], number: int) -> Iterator[Event]:
    for event in events[number + 1 :]:
        if event.kind == "backward":
            return
        yield event


def _has(events: list[Event] | None, kind: Kind, optimizer: str = "") -> bool:
    return any(event.kind == kind and optimizer in ("", event.optimizer) for event in events or ())


def _skips(source: Source, event: Event) -> bool:
    for above in source.above(event.node):
        if isinstance(above, ast.With) and any("skip_synchronize" in ast.unparse(item) for item in above.items):
            return True
    return False
