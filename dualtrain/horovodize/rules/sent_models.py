"""Models that a script gives to broadcast_parameters, and the models that may share their weights."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.nodes import first_argument, given_values, is_stored, last_name, names_in
from dualtrain.horovodize.source import Source

#: Functions that may copy weights from one of their arguments to another.
_COPIES = re.compile(r"copy|clone|share|tie|transfer|init|update|assign|same|set_|vector_to", re.IGNORECASE)
#: Values that models may have in common although they share no weights.
_SHARED = re.compile(r"torch\.(cuda\.)?device$")


def owner_of(value: ast.expr | None, *methods: str) -> ast.Name | ast.Attribute | None:
    """Return the variable ``x`` if ``value`` is ``x.method()`` with one of ``methods``, else None."""
    func = value.func if isinstance(value, ast.Call) else None
    if isinstance(func, ast.Attribute) and func.attr in methods and isinstance(func.value, ast.Name | ast.Attribute):
        return func.value
    return None


def sent_models(source: Source, user: ast.AST, model: ast.expr) -> Iterator[ast.expr | None]:
    """Yield the models that the program gives to broadcast_parameters, or None for each use whose model is unknown.

    The caller compares the names of these models with the name of ``model``, which the node ``user`` uses. So the model of
    a call is known only if its name means the same variable in the call and in the node ``user``: the call is in the same
    function or at module level of ``source``, or both models are attributes of ``self`` in one class. It is also unknown if
    it is not certainly a new model (:func:`is_new_model`).
    """
    for file in source.files:
        for node in file.mentions.get("broadcast_parameters", ()):
            if isinstance(node, ast.alias):
                if node.asname:
                    yield None
                continue
            call = file.parents[node]
            known = isinstance(call, ast.Call) and call.func is node and file.hvd(node) == "broadcast_parameters"
            given = first_argument(call, "params") if isinstance(call, ast.Call) and known else None
            sent = owner_of(given, "state_dict", "named_parameters")
            certain = sent is not None and file is source and _are_comparable(source, sent, model, user)
            yield sent if certain and sent is not None and is_new_model(source, sent) else None


def _are_comparable(source: Source, sent: ast.expr, model: ast.expr, user: ast.AST) -> bool:
    """Return whether a comparison of names shows if ``sent`` and ``model``, which ``user`` uses, are the same variable."""
    if isinstance(sent, ast.Name) and isinstance(model, ast.Name):
        scope = source.scope(sent)
        local = any(isinstance(above, ast.Lambda) for above in source.above(sent))
        return scope in (source.tree, source.scope(user)) and not local
    both = all(isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self" for one in (sent, model))
    classes = [next(source.around(node, ast.ClassDef), None) for node in (sent, user)]
    return both and classes[0] is classes[1] is not None


def is_new_model(source: Source, model: ast.expr) -> bool:
    """Return whether ``model`` is certainly a new model, and not one that other code has made and may have broadcast.

    Only calls may be assigned to it. These calls, and the values of the variables in them, must not use parameters of a
    function (except ``self`` and ``args``), and must not call functions that are defined in the file.
    """
    text = ast.unparse(model)
    values = source.values.get(text, [])
    mentions = source.mentions.get(last_name(model), ())
    stores = [node for node in mentions if is_stored(node) and ast.unparse(node) == text]
    if not values or len(values) != len(stores) or not all(isinstance(value, ast.Call) for value in values):
        return False
    return not any(
        (isinstance(node, ast.Name) and node.id in source.parameters(node) - {"self", "args"})
        or (isinstance(node, ast.Call) and last_name(node.func) in source.functions)
        for name in {text, *_reachable(source, text)}
        for value in source.values.get(name, ())
        for node in ast.walk(value)
    )


def are_related(source: Source, one: str, other: str) -> bool:
    """Return whether two models may share weights: one may contain or copy the other, or both may contain a third one."""
    if one == other or f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}."):
        return True
    first, second = {one, *_reachable(source, one)}, {other, *_reachable(source, other)}
    if any(_is_model(source, name) for name in first & second):
        return True
    return any({one, other} <= names_in(node) for node in source.nodes if _may_copy(node))


def _may_copy(node: ast.AST) -> bool:
    """Return whether ``node`` may copy weights, as in ``for p, q in zip(a.parameters(), b.parameters())``."""
    if isinstance(node, ast.For):
        return "zip" in ast.unparse(node.iter)
    return isinstance(node, ast.Call) and _COPIES.search(last_name(node.func)) is not None


def _is_model(source: Source, name: str) -> bool:
    """Return whether ``name`` may hold a model, because a call is assigned to it.

    Calls that make a device or parsed options, and calls of Horovod, do not count.
    """
    calls = (value for value in source.values.get(name, ()) if isinstance(value, ast.Call))
    return any(
        not _SHARED.match(source.name(call.func)) and not source.hvd(call.func) and last_name(call.func) != "parse_args"
        for call in calls
    )


def _reachable(source: Source, model: str) -> set[str]:
    """Return the names in the values of ``model`` and of its attributes, and in arguments of its methods, recursively."""
    found, left = set[str](), [model]
    while left:
        name = left.pop()
        values = [value for target, value, _ in source.assignments if target == name or _is_part(target, name)]
        methods = (call for call in source.calls if _is_part(ast.unparse(call.func), name))
        values += [given for call in methods for given in given_values(call)]
        names = {one for value in values for one in names_in(value)} - found
        found |= names
        left += [one for one in names if one in source.values]
    return found


def _is_part(text: str, name: str) -> bool:
    return text.startswith((f"{name}.", f"{name}["))
