"""Rules on the order of calls between backward and step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dualtrain.horovodize.events import STEPS, Event, has, since_backward, skips, steps, until_backward
from dualtrain.horovodize.rules.step_repairs import skip_around, synchronize_before
from dualtrain.horovodize.source import Finding, Source, keyword, last_name

_CURE = "call optimizer.synchronize() after backward, and step inside `with optimizer.skip_synchronize():`"


def clip_before_synchronize(source: Source) -> Iterator[Finding]:
    """Gradients are clipped before they are averaged."""
    for events in steps(source):
        for number, event in enumerate(events):
            if event.kind != "clip" or has(since_backward(source, events, number), "synchronize"):
                continue
            later = [one for one in until_backward(events, number) if not source.exclusive(event.node, one.node)]
            if any(one.kind in STEPS for one in later):
                own = "values" if last_name(event.node.func) == "clip_grad_value_" else "norm"
                message = f"gradients are clipped before they are averaged, on each rank by its own {own}; {_CURE}"
                yield Finding(event.node.lineno, "trap", message, tuple(synchronize_before(source, events, number)))


def scaler_before_synchronize(source: Source) -> Iterator[Finding]:
    """A GradScaler checks gradients for infinities before they are averaged."""
    for events in steps(source):
        for number, event in enumerate(events):
            if event.kind not in ("unscale", "scaled step"):
                continue
            before = since_backward(source, events, number)
            if has(before, "synchronize", event.optimizer) or has(before, "unscale", event.optimizer):
                continue
            cure = _CURE.replace("step inside", "scaler.step(…) inside")
            message = "the GradScaler checks gradients before they are averaged: one rank may skip a step that others take"
            edits = tuple(synchronize_before(source, events, number))
            yield Finding(event.node.lineno, "trap", f"{message}; {cure}", edits)


def second_reduction(source: Source) -> Iterator[Finding]:
    """After synchronize(), a step outside skip_synchronize() reduces the gradients again."""
    for events in steps(source):
        for number, event in enumerate(events):
            if event.kind not in STEPS or skips(source, event) or keyword(event.node, "synchronize") is not None:
                continue  # step(synchronize=False) is the form of old versions of Horovod
            before = since_backward(source, events, number)
            if has(before, "synchronize", event.optimizer) and not _is_alternative(source, events, event):
                message = "this step reduces the gradients again; with op=Sum this multiplies them by the number of ranks"
                cure = "step inside `with optimizer.skip_synchronize():`"
                yield Finding(event.node.lineno, "trap", f"{message}; {cure}", tuple(skip_around(source, event)))


def _is_alternative(source: Source, events: list[Event], step: Event) -> bool:
    """Return whether the script chooses between this step and one in skip_synchronize(), and not always synchronizes.

    The conditions of synchronize() and of the choice are most likely related.
    """
    others = [event for event in events if event.kind in STEPS and source.exclusive(event.node, step.node)]
    if not any(skips(source, other) and other.optimizer == step.optimizer for other in others):
        return False
    around = list(source.above(step.node))
    synchronized = [event for event in events if event.kind == "synchronize" and event.optimizer == step.optimizer]
    conditions = [[above for above in source.above(one.node) if isinstance(above, ast.If)] for one in synchronized]
    return all(any(condition not in around for condition in found) for found in conditions)


def zero_grad_before_step(source: Source) -> Iterator[Finding]:
    """Gradients are zeroed during their reduction: Horovod raises AssertionError."""
    for events in steps(source):
        for number, event in enumerate(events):
            if event.kind != "zero_grad":
                continue
            before = since_backward(source, events, number, strictly=True)
            used = any(has(before, kind, event.optimizer) for kind in ("step", "scaled step", "synchronize"))
            stepped = any(
                later.kind in STEPS and later.optimizer == event.optimizer for later in until_backward(events, number)
            )
            if before is not None and stepped and not used:
                message = "zero_grad() between backward and step raises AssertionError; call it before backward"
                yield Finding(event.node.lineno, "trap", message)
