"""The rule on objects sent between ranks, which must be plain data without code."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dualtrain.horovodize.names import OBJECTS
from dualtrain.horovodize.nodes import first_argument, given_values, last_name, variables_in
from dualtrain.horovodize.source import Finding, Function, Source

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
    """Return names of classes and variables that ``source`` may pass to ``torch.serialization.add_safe_globals``.

    Instances of these classes can be sent. Classes with a decorator that calls ``add_safe_globals`` count, too.
    """
    calls = [call for call in source.calls if source.name(call.func) in _REGISTER]
    decorators = {above.name for call in calls for above in source.above(call) if isinstance(above, Function)}
    found = {one.name for one in source.classes if not decorators.isdisjoint(map(_decorator, one.decorator_list))}
    values = [value for call in calls for value in given_values(call)]
    for value in values:  # the loop appends the expressions from which variables may get their values
        for node in ast.walk(value):
            if (name := last_name(node)) and name not in found:
                found.add(name)
                values += _origins(source, node)
    return found


_REGISTER = ("torch.serialization.add_safe_globals", "torch.serialization.safe_globals")


def _decorator(expression: ast.expr) -> str:
    """Return the name of the decorator, or of the function that makes it."""
    return last_name(expression.func if isinstance(expression, ast.Call) else expression)


def _origins(source: Source, variable: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions from which ``variable``, or its elements if it is a container, may get their values."""
    name, scope = last_name(variable), source.scope(variable)
    yield from (value for target, value, _ in source.assignments if target.partition("[")[0].rpartition(".")[2] == name)
    yield from (loop.iter for loop in source.nodes if isinstance(loop, ast.For) and name in variables_in(loop.target))
    for call in source.calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr in _ADD and last_name(call.func.value) == name:
            yield from given_values(call)
    if isinstance(scope, Function) and name in {each.arg for each in ast.walk(scope.args) if isinstance(each, ast.arg)}:
        parent = source.parents[scope]
        called = parent.name if isinstance(parent, ast.ClassDef) and scope.name == "__init__" else scope.name
        users = (source.parents[mention] for mention in source.mentions.get(called, ()))
        yield from (value for user in users if isinstance(user, ast.Call) for value in given_values(user))


_ADD = ("add", "append", "extend", "insert", "update")


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
