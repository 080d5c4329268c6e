"""The rule on objects sent between ranks, which must be plain data without code."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dualtrain.horovodize.names import OBJECTS
from dualtrain.horovodize.nodes import first_argument, variables_in
from dualtrain.horovodize.source import Finding, Source

_SCHEDULE = "a learning-rate schedule"


def code_in_objects(source: Source) -> Iterator[Finding]:
    """Functions, schedules and instances of the script's classes, given to broadcast_object or allgather_object."""
    classes = {node.name for node in source.classes} - {name for file in source.files for name in _registered(file)}
    for call in source.hvd_calls(*OBJECTS):
        value = first_argument(call, "obj")
        what = _code_in(source, value, classes) if value is not None else None
        if what is not None:
            cure = (
                "send its state_dict(), and load the result"
                if what == _SCHEDULE
                else "send its __dict__, or register the class with torch.serialization.add_safe_globals"
            )
            message = (
                f"{what} cannot be sent: {source.hvd(call.func)}() sends plain values, containers, tensors and arrays, not "
                f"pickled code; {cure}"
            )
            yield Finding(call.lineno, "unsupported", message)


def _registered(source: Source) -> set[str]:
    """Return the names that ``source`` passes to ``torch.serialization.add_safe_globals``: instances can be sent."""
    calls = (call for call in source.calls if source.name(call.func) == "torch.serialization.add_safe_globals")
    given = (first_argument(call, "safe_globals") for call in calls)
    return {name for value in given for each in source.possible_values(value) for name in variables_in(each)}


def _code_in(source: Source, value: ast.expr, classes: set[str], *, follow: bool = True) -> str | None:
    """Return a description of code in ``value`` or its elements; None if there is none.

    With ``follow``, the values that are assigned to a variable are searched, too.
    """
    if isinstance(value, ast.Lambda):
        return "a lambda"
    if source.makes_schedule(value):
        return _SCHEDULE
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in classes:
        return f"an instance of {value.func.id}"
    if isinstance(value, ast.Name) and _is_function(source, value):
        return f"the function {value.id}"
    inside: list[ast.expr] = []
    if isinstance(value, ast.Name) and follow:
        follow, inside = False, [given for target, given, _ in source.assignments if target == value.id]
    elif isinstance(value, ast.List | ast.Tuple | ast.Set):
        inside = value.elts
    elif isinstance(value, ast.Dict):
        inside = value.values
    elif isinstance(value, ast.IfExp):
        inside = [value.body, value.orelse]
    return next((code for part in inside if (code := _code_in(source, part, classes, follow=follow))), None)


def _is_function(source: Source, name: ast.Name) -> bool:
    """Return whether ``name`` is a function of the script, and not a method or a variable with the name of a function."""
    function = source.functions.get(name.id)
    if function is None or isinstance(source.parents[function], ast.ClassDef):
        return False
    return name.id not in source.values and name.id not in source.parameters(name)
