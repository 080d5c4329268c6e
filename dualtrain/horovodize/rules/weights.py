"""Rules on weights that differ between ranks when training starts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.nodes import (
    argument_at,
    first_argument,
    given_values,
    is_bool,
    keyword,
    last_name,
    names_in,
    variables_in,
)
from dualtrain.horovodize.order import calls_of, nodes_after
from dualtrain.horovodize.rules.rank_values import may_send
from dualtrain.horovodize.rules.seeds import seeds_ranks_alike
from dualtrain.horovodize.rules.sent_models import are_related, is_new_model, owner_of, sent_models
from dualtrain.horovodize.source import Finding, Function, Source

#: Code that may give all ranks the same weights, besides broadcast_parameters. Copies of other models' weights don't count.
_START_ALIKE = re.compile(
    r"load_state_dict(?!\([\w.]+\.state_dict\(\)\))|pretrained|broadcast(?!_optimizer_state|_parameters\b)|\.load\(|"
    r"load_?(model|weights|checkpoint|ckpt|state)|restore|resume|sync(hroni[sz]e)?_?(model|param|weight|state|net|all|init)|"
    r"bcast"
)


def never_broadcast(source: Source) -> Iterator[Finding]:
    """Initial weights that differ between ranks: one finding for each model."""
    if any(file.uses_elastic or seeds_ranks_alike(file) or _START_ALIKE.search(file.code) for file in source.files):
        return
    seen: set[str] = set()
    for _, wrap in source.wraps:
        model = _model_of(wrap)
        if model is None or ast.unparse(model) in seen:
            continue
        sent = [one and ast.unparse(one) for one in sent_models(source, wrap, model)]
        if None in sent:
            continue  # an unknown model is broadcast, which may be this one
        if source.scope(wrap) is not source.tree and not source.hvd_calls("init"):
            continue  # other files may call this function, then broadcast
        text = ast.unparse(model)
        seen.add(text)
        if _is_set_to_constants(source, text):
            continue
        made = any(isinstance(value, ast.Call) for value in source.values.get(text, ()))
        if sent and not (is_new_model(source, model) and not any(are_related(source, text, str(one)) for one in sent)):
            continue  # it may share weights with a model that is broadcast
        yield _finding(source, wrap, text, is_certain=made)


_CONSTANTS = re.compile(r"torch\.nn\.init\.(constant|eye|ones|zeros)_$")


def _is_set_to_constants(source: Source, model: str) -> bool:
    """Return whether the script sets all parameters of ``model`` to constants, in a loop or by name (weight and bias)."""
    found = set()
    for call in source.calls:
        tensor = _set_to_constant(source, call)
        loop = source.parents[source.statement(call)]
        loop = source.parents[loop] if isinstance(loop, ast.With) else loop
        if isinstance(tensor, ast.Name) and isinstance(loop, ast.For):
            names = variables_in(loop.target)
            owner = owner_of(loop.iter, "parameters", "named_parameters")
            if tensor.id in names and owner is not None and ast.unparse(owner) == model:
                return True
        found |= {ast.unparse(tensor)} if tensor is not None else set()
    made = source.values.get(model, [])
    unbiased = bool(made) and all(isinstance(one, ast.Call) and is_bool(keyword(one, "bias"), False) for one in made)
    return f"{model}.weight" in found and (unbiased or f"{model}.bias" in found)


def _set_to_constant(source: Source, call: ast.Call) -> ast.expr | None:
    """Return the tensor that ``call`` sets to a constant, without ``.data``; None if it sets no tensor to a constant."""
    tensor: ast.expr | None = None
    values: list[ast.expr] = []
    if given_values(call) and _CONSTANTS.match(source.name(call.func)):
        tensor, values = first_argument(call, "tensor"), given_values(call)[1:]
    elif isinstance(call.func, ast.Attribute) and call.func.attr in ("fill_", "zero_"):
        tensor, values = call.func.value, call.args
    if isinstance(tensor, ast.Attribute) and tensor.attr == "data":
        tensor = tensor.value
    return tensor if all(isinstance(value, ast.Constant) for value in values) else None


def loaded_on_some_ranks(source: Source) -> Iterator[Finding]:
    """State of a model or optimizer that only some ranks load before training, and that is not broadcast afterwards."""
    if may_send(source):
        return
    guards, models = Guards.of(source), {ast.unparse(model) for _, wrap in source.wraps if (model := _model_of(wrap))}
    loads = [call for call in source.calls if isinstance(call.func, ast.Attribute) and call.func.attr == "load_state_dict"]
    for load in loads:
        owner, place = _loaded(source, guards, load)
        text = ast.unparse(owner)
        if text not in models and not _is_wrapped_before(source, owner, place):
            continue
        sender = "broadcast_parameters" if text in models else "broadcast_optimizer_state"
        others = any(ast.unparse(other.func) == ast.unparse(load.func) for other in loads if other is not load)
        if others or not guards.is_on_some_ranks(place) or _is_sent_later(source, place, text, sender):
            continue
        given = f"{text}.state_dict()" if text in models else text
        message = (
            "only some ranks load this state, and no broadcast follows, so that the ranks' weights differ; call "
            f"hvd.{sender}({given}, root_rank=0) afterwards on all ranks"
        )
        yield Finding(load.lineno, "trap", message)


def _loaded(source: Source, guards: Guards, load: ast.Call) -> tuple[ast.expr, ast.Call]:
    """Return the object into which ``load`` loads state, and ``load``.

    If the object is a parameter of a function that is called once, and that always runs ``load``, return the argument and
    the call of that function instead.
    """
    owner: ast.expr = load.func.value  # type: ignore[attr-defined]
    function = source.scope(load)
    if isinstance(function, Function) and isinstance(owner, ast.Name) and owner.id in source.parameters(load):
        calls = list(calls_of(source, function))
        given = source.argument(function, calls[0], owner.id) if len(calls) == 1 else None
        if given is not None and guards.runs_whenever(load, function) and source.is_only(function.name):
            return given, calls[0]
    return owner, load


#: In-place allreduces. Their sum acts as a broadcast of one rank's tensor if the tensors of all other ranks are zero.
_SUMS = ("allreduce_", "allreduce_async_", "grouped_allreduce_", "grouped_allreduce_async_")


def _may_sum_parts(source: Source, call: ast.Call, model: str) -> bool:
    """Return whether ``call`` may sum parts of ``model``.

    It may if its arguments, or the iterable of a ``for`` loop around it, contain the name ``model``. A call with a gradient
    in its arguments does not count.
    """
    given = given_values(call)
    if any(last_name(part) == "grad" for value in given for part in ast.walk(value)):
        return False
    return any(model in names_in(value) for value in (*given, *(loop.iter for loop in source.around(call, ast.For))))


def _is_sent_later(source: Source, load: ast.Call, text: str, sender: str) -> bool:
    """Return whether a call of ``sender``, or a sum over the tensors of the object ``text``, may follow ``load``.

    Also True if no training follows ``load``, as after the last epoch: the state need not be sent then.
    """
    sends = [(file, call) for file in source.files for call in file.calls if file.called(call) == sender]
    sends += [(source, call) for call in source.hvd_calls(*_SUMS) if _may_sum_parts(source, call, text)]
    if any(file is not source or source.scope(call) is not source.scope(load) for file, call in sends):
        return True
    trains = any(isinstance(node, ast.Call) and last_name(node.func) == "backward" for node in nodes_after(source, load))
    return not trains or any(call.lineno > load.lineno for _, call in sends)


def _is_wrapped_before(source: Source, optimizer: ast.expr, load: ast.Call) -> bool:
    """Return whether an earlier line of the function that contains ``load`` has wrapped ``optimizer``."""
    wraps = [wrap for name, wrap in source.wraps if name == last_name(optimizer)]
    return any(source.scope(wrap) is source.scope(load) and wrap.lineno < load.lineno for wrap in wraps)


def _finding(source: Source, wrap: ast.Call, model: str, *, is_certain: bool) -> Finding:
    unless = "" if is_certain else ", unless the code that makes the model gives all ranks the same weights"
    message = (
        f"each rank starts with its own weights, so that the ranks train different models{unless}; call "
        f"hvd.broadcast_parameters({model}.state_dict(), root_rank=0) after wrapping"
    )
    spelled, statement = source.spell("broadcast_parameters", wrap), source.statement(wrap)
    code = f"{spelled}({model}.state_dict(), root_rank=0)"
    possible = spelled and not Guards.of(source).is_conditional(wrap) and isinstance(statement, ast.Assign)
    return Finding(wrap.lineno, "trap", message, tuple(source.layout.insert_after(statement, code)) if possible else ())


def _model_of(wrap: ast.Call) -> ast.Name | ast.Attribute | None:
    """Return the model of ``DistributedOptimizer(optimizer, named_parameters=model.named_parameters())``, or None."""
    return owner_of(argument_at(wrap, 1, "named_parameters"), "named_parameters")
