"""Models from which a loss is computed, as far as the source shows them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.nodes import calls_in, first_argument, names_of_target
from dualtrain.horovodize.source import Source

#: A variable counts as a model if the script calls one of these methods on it.
_OF_MODELS = {"eval", "load_state_dict", "named_parameters", "parameters", "requires_grad_", "train", "zero_grad"}


def models_of_loss(source: Source, backward: ast.Call) -> set[str]:
    """Return the models that the script calls, with gradients enabled, to compute the loss of ``backward``."""
    known = _models(source)
    found = set()
    for call in (call for origin in _origins(source, backward) for call in _calls_with_gradients(origin)):
        text = ast.unparse(call.func)
        owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        found |= {text, owner, text.removesuffix(".module")} & known
    return found


def models_of_optimizer(source: Source, wrap: ast.Call) -> set[str]:
    """Return the models whose parameters the wrapped optimizer has; an empty set if the source does not show them."""
    values = source.possible_values(first_argument(wrap, "optimizer"))
    given = [*(value for value in values if value is not wrap), *wrap.args[1:], *(word.value for word in wrap.keywords)]
    return {
        ast.unparse(call.func.value)
        for call in calls_in(*given)
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("named_parameters", "parameters")
    }


def _models(source: Source) -> set[str]:
    return {
        ast.unparse(call.func.value)
        for file in source.files
        for call in file.calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in _OF_MODELS
    }


def _origins(source: Source, backward: ast.Call) -> list[ast.expr]:
    """Return the expressions in the function around ``backward`` from which its loss is computed with gradients enabled."""
    scope = source.scope(backward)
    own = [
        (target, value)
        for target, value, statement in source.assignments
        if source.scope(statement) is scope and value.lineno < backward.lineno and not _without_gradients(source, statement)
    ]
    found: list[ast.expr] = [backward]
    seen: set[str] = set()
    for value in found:
        names = set(_variables(value)) - seen
        seen |= names
        found += [given for target, given in own if names.intersection(names_of_target(target))]
    return found


def _calls_with_gradients(value: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in ``value``, except in ``x.detach()`` and ``x.item()``."""
    if _is_detached(value):
        return
    if isinstance(value, ast.Call):
        yield value
    for child in ast.iter_child_nodes(value):
        yield from _calls_with_gradients(child)


def _variables(value: ast.expr) -> Iterator[str]:
    """Yield the variables and attributes in ``value`` as text, except in ``x.detach()`` and ``x.item()``."""
    if _is_detached(value):
        return
    if isinstance(value, ast.Name | ast.Attribute):
        yield ast.unparse(value)
    for child in ast.iter_child_nodes(value):
        if isinstance(child, ast.expr | ast.keyword):
            yield from _variables(child.value if isinstance(child, ast.keyword) else child)


def _is_detached(value: ast.AST) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in ("detach", "item")


def _without_gradients(source: Source, statement: ast.AST) -> bool:
    return any(re.search("no_grad|inference_mode", ast.unparse(item)) for item in source.with_items(statement))
