"""The rule on initial weights that differ between ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.rules.seeds import seeds_ranks_alike
from dualtrain.horovodize.source import Finding, Source, first_argument, keyword

#: Code that may give all ranks the same weights, besides broadcast_parameters. A copy of another model's weights does not.
_START_ALIKE = re.compile(
    r"load_state_dict(?!\([\w.]+\.state_dict\(\)\))|pretrained|broadcast(?!_optimizer_state|_parameters\b)|\.load\(|"
    r"load_?(model|weights|checkpoint|ckpt|state)|restore|resume|sync(hroni[sz]e)?_?(model|param|weight|state|net|all|init)|"
    r"bcast"
)


def never_broadcast(source: Source) -> Iterator[Finding]:
    """Initial weights that differ between ranks: one finding for each model."""
    files = {id(file): file for file in (source, *source.program)}.values()
    if any(file.uses_elastic or seeds_ranks_alike(file) or _START_ALIKE.search(file.code) for file in files):
        return
    sent = [model for file in files for model in _sent_models(file)]
    seen: set[str] = set()
    for _, wrap in source.wraps:
        model = _model_of(wrap)
        if model is None or ast.unparse(model) in seen or None in sent:
            continue
        if source.scope(wrap) is not source.tree and not any(True for _ in source.hvd_calls("init")):
            continue  # other files may call this function, then broadcast
        text = ast.unparse(model)
        seen.add(text)
        made = any(isinstance(value, ast.Call) for value in source.values.get(text, ()))
        if sent and (not made or any(_are_related(source, text, one) for one in sent if one is not None)):
            continue  # an unknown model may be a part of a model that is broadcast
        yield _finding(source, wrap, text, certain=made)


def _finding(source: Source, wrap: ast.Call, model: str, *, certain: bool) -> Finding:
    unless = "" if certain else ", unless the code that makes the model gives all ranks the same weights"
    message = (
        f"each rank starts with its own weights, so that the ranks train different models{unless}; call "
        f"hvd.broadcast_parameters({model}.state_dict(), root_rank=0) after wrapping"
    )
    spelled, statement = source.spell("broadcast_parameters", wrap), source.statement(wrap)
    code = f"{spelled}({model}.state_dict(), root_rank=0)"
    possible = spelled and not Guards(source).is_conditional(wrap) and isinstance(statement, ast.Assign)
    return Finding(wrap.lineno, "trap", message, tuple(source.layout.insert_after(statement, code)) if possible else ())


def _model_of(wrap: ast.Call) -> ast.Name | ast.Attribute | None:
    """Return the model of ``DistributedOptimizer(optimizer, named_parameters=model.named_parameters())``, or None."""
    named = keyword(wrap, "named_parameters") or (wrap.args[1] if len(wrap.args) > 1 else None)
    return _owner(named, "named_parameters") if named is not None else None


def _owner(value: ast.expr, *methods: str) -> ast.Name | ast.Attribute | None:
    """Return the variable ``x`` of ``x.method()``, or None if ``value`` is something else."""
    func = value.func if isinstance(value, ast.Call) else None
    known = isinstance(func, ast.Attribute) and func.attr in methods
    return func.value if known and isinstance(func.value, ast.Name | ast.Attribute) else None  # type: ignore[union-attr]


def _sent_models(source: Source) -> Iterator[str | None]:
    """Yield the models that the script gives to broadcast_parameters; None for each use that may send any model."""
    for node in source.mentions.get("broadcast_parameters", ()):
        if isinstance(node, ast.alias):
            if node.asname:
                yield None
            continue
        call = source.parents[node]
        known = isinstance(call, ast.Call) and call.func is node and source.hvd(node) == "broadcast_parameters"
        given = first_argument(call, "params") if isinstance(call, ast.Call) and known else None
        model = _owner(given, "state_dict", "named_parameters") if given is not None else None
        text = ast.unparse(model) if model is not None else ""
        local = isinstance(model, ast.Name) and (text in source.parameters(node) or text not in source.values)
        yield None if model is None or local else text


def _are_related(source: Source, one: str, other: str) -> bool:
    """Return whether one of the models is the other, may contain the other, or is made from it."""
    return any(
        first == second or first.startswith(f"{second}.") or _uses(source, first, second)
        for first, second in ((one, other), (other, one))
    )


def _uses(source: Source, model: str, other: str, depth: int = 0) -> bool:
    """Return whether ``model``, or an attribute of it, is assigned a value with ``other``, or gets it by a method."""
    values = [value for target, value, _ in source.assignments if f"{target}.".startswith(f"{model}.")]
    values += [call for call in source.calls if ast.unparse(call.func).startswith(f"{model}.")]
    names = {
        ast.unparse(node) for value in values for node in ast.walk(value) if isinstance(node, ast.Name | ast.Attribute)
    }
    return other in names or (
        depth < 2 and any(_uses(source, name, other, depth + 1) for name in names & set(source.values))
    )
