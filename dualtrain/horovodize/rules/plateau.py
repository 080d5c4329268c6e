"""The rule on learning rates that follow the loss of one rank."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.names import COLLECTIVES
from dualtrain.horovodize.nodes import calls_in, given_values, is_stored, last_name, names_of_target
from dualtrain.horovodize.order import called
from dualtrain.horovodize.rules.own_loss import COMMON, loop_around, may_be_common, without_conversions, without_scaler
from dualtrain.horovodize.rules.ranks import RATE, Collectives, sends_rate
from dualtrain.horovodize.rules.sampling import distributed_samplers
from dualtrain.horovodize.source import Finding, Scope, Source

_PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"
#: Functions and methods whose result is a loss of the same rank if their argument is one.
_ARITHMETIC = ("abs", "mean", "round", "sum")
#: Functions and methods that do not change their arguments in place.
_READS = re.compile(r"print|log|write|add_scalar|append|save|info|debug|^step$|^backward$|^len$", re.IGNORECASE)
#: Words in a condition that has the same value on all ranks.
_PROGRESS = re.compile(r"epoch|step|iter|warm|sched", re.IGNORECASE)

_Operands = Callable[[Iterable[object]], bool]


class _Assigned(NamedTuple):
    """One variable of an assignment, with its value and statement, and its position if it is an element of a tuple."""

    name: str
    value: ast.expr
    statement: ast.stmt
    position: int | None


def schedule_by_own_loss(source: Source) -> Iterator[Finding]:
    """A ReduceLROnPlateau that gets the training loss of this rank, although each rank has its own samples."""
    steps = [call for call in source.calls if given_values(call) and _steps_plateau(source, call)]
    sampled = any(map(distributed_samplers, source.files))
    if not steps or not sampled or any(map(_may_combine, source.files)):
        return
    for call in steps:
        alone = not any(ast.unparse(other.func) == ast.unparse(call.func) for other in steps if other is not call)
        if not alone or not _is_unconditional(source, call) or sends_rate(source, call):
            continue
        if _is_own(Collectives(source), given_values(call)[0], call):
            message = (
                "the schedule gets the loss of this rank only, so that learning rates, and then weights, differ between "
                "ranks; average the loss over all ranks first, for example by hvd.allreduce(torch.tensor(loss))"
            )
            yield Finding(call.lineno, "trap", message)


def _steps_plateau(source: Source, call: ast.Call) -> bool:
    """Return whether ``call`` steps a ReduceLROnPlateau of a wrapped optimizer.

    Return False if the program passes the schedule to an unknown function, which may change the rate. Variables are
    compared by name: a function's parameter counts as the variable of the same name.
    """
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return False
    made = [(file, value) for file in source.files for value in file.values.get(ast.unparse(call.func.value), ())]
    wraps = [wrap for file in source.files for _, wrap in file.wraps]
    wrapped = source.wrapped.union(*(file.wrapped for file in source.files), *(_arguments(wrap) for wrap in wraps))
    schedule = last_name(call.func.value)
    functions = {name for file in source.files for name in file.functions}
    given = [other for file in source.files for other in file.calls if schedule in _arguments(other)]
    known = all(_READS.search(last_name(other.func)) or last_name(other.func) in functions for other in given)
    return bool(made) and known and all(_is_plateau_of(file, value, wrapped) for file, value in made)


def _is_plateau_of(source: Source, value: ast.expr, optimizers: set[str]) -> bool:
    return isinstance(value, ast.Call) and source.name(value.func) == _PLATEAU and bool(_arguments(value) & optimizers)


def _arguments(call: ast.Call) -> set[str]:
    """Return the names of the variables that ``call`` passes directly."""
    return {*map(last_name, given_values(call))} - {""}


def _may_combine(source: Source) -> bool:
    """Return whether the script may combine learning rates of all ranks, or a model's ``forward`` may combine losses."""
    for call in source.calls:
        name = source.called(call)
        combines = name in COLLECTIVES or (COMMON.search(name) and source.name(call.func) != _PLATEAU)
        if combines and (
            getattr(source.scope(call), "name", "") == "forward" or re.search(RATE, ast.unparse(call), re.IGNORECASE)
        ):
            return True
    return False


def _is_unconditional(source: Source, call: ast.Call) -> bool:
    """Return whether ``call`` depends on no condition, except on ``__name__`` or the progress of training."""
    tests = [above.test for above in source.around(call, ast.If)]
    return all("__name__" in (text := ast.unparse(test)) or _PROGRESS.search(text) for test in tests)


def _is_own(collectives: Collectives, value: ast.expr, place: ast.AST, position: int | None = None, depth: int = 0) -> bool:
    """Return whether ``value`` is a training loss of this rank, or the result of a function that returns one.

    If ``position`` is given, only this element of the function's result counts.
    """
    source, value = collectives.source, without_conversions(value)
    function = called(source, value) if isinstance(value, ast.Call) else None
    if function is not None and (function.decorator_list or not source.is_only(function.name)):
        return False  # the name may refer to another function, or a decorator may combine the result over ranks
    if function is None:
        return position is None and _is_made_of(value, _own_losses(collectives, source.scope(place), depth))
    ends = [end for end in ast.walk(function) if isinstance(end, ast.Return) and source.scope(end) is function]
    found = [(_element(end.value, position), end) for end in ends]
    return (
        bool(found)
        and depth < 3
        and all(one is not None and _is_own(collectives, one, end, None, depth + 1) for one, end in found)
    )


def _element(value: ast.expr | None, position: int | None) -> ast.expr | None:
    if position is None:
        return value
    return value.elts[position] if isinstance(value, ast.Tuple) and position < len(value.elts) else None


def _own_losses(collectives: Collectives, scope: Scope, depth: int) -> set[str]:
    """Return the variables of ``scope`` that hold only training losses of this rank, apart from constants such as 0.

    Attributes, and variables that are declared ``global`` or ``nonlocal``, do not count, because other functions may change
    them. Nor do variables that a call may change in place. The set is empty if one of the losses may be equal on all ranks.
    """
    source = collectives.source
    own = [one for one in _assigned(source) if source.scope(one.statement) is scope]
    passes = [call for call in source.calls if source.scope(call) is scope and _is_training(source, call)]
    loops = {loop_around(source, call) for call in passes}
    losses = {ast.unparse(without_scaler(call.func.value)) for call in passes if isinstance(call.func, ast.Attribute)}
    results = [one for one in own if isinstance(one.value, ast.Call) and called(source, one.value)]
    values = [one for one in own if one not in results and one.position is None]
    last = {name: max((call.lineno for call in passes if name in ast.unparse(call.func)), default=0) for name in losses}

    def is_replaced(name: str) -> bool:
        later = [one for one in own if one.name == name and one.statement.lineno > last[name]]
        return any(
            loop_around(source, one.statement) in loops and ast.unparse(without_conversions(one.value)) != name
            for one in later
        )

    losses = {name for name in losses if not is_replaced(name)}
    certain = {
        name for name in losses if all(loop_around(source, one.statement) in loops for one in own if one.name == name)
    }
    mine = [one for one in results if _is_own(collectives, one.value, one.statement, one.position, depth + 1)]
    found = certain | {one.name for one in mine}

    def is_made(one: _Assigned, operands: _Operands) -> bool:
        known = found | losses if loop_around(source, one.statement) in loops else found
        return one in mine or (one in values and _is_made_of(one.value, known, operands))

    for _ in range(4):  # values that are computed from other values
        found |= {one.name for one in own if is_made(one, any)}
    kept = [one for one in own if not isinstance(one.value, ast.Constant) and not _scales(one.statement)]
    while wrong := {one.name for one in kept if one.name in found - certain and not is_made(one, all)}:
        found -= wrong
    found = {name for name in found if _is_known(source, scope, name, sum(one.name == name for one in own))}
    return (
        set()
        if found and may_be_common(collectives, own[0].statement, found, [(one.name, one.value) for one in values])
        else found
    )


def _is_known(source: Source, scope: Scope, name: str, assignments: int) -> bool:
    """Return whether a local variable has ``assignments`` assignments, at least one, and changes in no other way."""
    stores = [
        node
        for node in source.mentions.get(name, ())
        if isinstance(node, ast.Name) and is_stored(node) and source.scope(node) is scope
    ]
    shared = any(isinstance(node, ast.Global | ast.Nonlocal) and name in node.names for node in source.nodes)
    changed = any(
        source.scope(call) is scope
        and isinstance(source.parents[call], ast.Expr)
        and (name in _arguments(call) or ast.unparse(getattr(call.func, "value", call)) == name)
        and not _READS.search(last_name(call.func))
        for call in source.calls
    )
    return 0 < len(stores) == assignments and not shared and not changed


def _assigned(source: Source) -> Iterator[_Assigned]:
    for target, value, at in source.assignments:
        for position, name in enumerate(names_of_target(target)):
            yield _Assigned(name, value, at, None if name == target else position)


def _is_training(source: Source, call: ast.Call) -> bool:
    """Return whether ``call`` is a backward pass in a loop whose iterations are all for training.

    Every iteration must have a backward pass, and the loop must contain an optimizer's step.
    """
    if last_name(call.func) != "backward":
        return False
    loop = loop_around(source, call)
    inside = set(ast.walk(loop))
    branches = [above for above in source.above(call) if above in inside and isinstance(above, ast.If)]
    exits = inside.intersection(Guards.of(source).tests(call)) - {branch.test for branch in branches}
    steps = any(last_name(one.func) == "step" for one in calls_in(loop))
    return steps and not exits and all(map(_has_backward_in_both_arms, branches))


def _has_backward_in_both_arms(branch: ast.If) -> bool:
    return all(any(last_name(call.func) == "backward" for call in calls_in(*arm)) for arm in (branch.body, branch.orelse))


def _scales(assignment: ast.AST) -> bool:
    """Return whether ``assignment`` multiplies or divides a variable, as in ``total /= len(loader)``."""
    return isinstance(assignment, ast.AugAssign) and isinstance(assignment.op, ast.Mult | ast.Div)


def _is_made_of(value: ast.expr, losses: set[str], operands: _Operands = all) -> bool:
    """Return whether ``value`` is computed from ``losses`` by arithmetic and conversions.

    ``operands`` is ``any`` or ``all``: it says how many operands of a sum must be losses.
    """
    value = without_conversions(value)
    if isinstance(value, ast.BinOp):
        made = [_is_made_of(one, losses, operands) for one in (value.left, value.right)]
        return operands(made) if isinstance(value.op, ast.Add | ast.Sub) else any(made)
    if isinstance(value, ast.Attribute) and value.attr == "data":
        return _is_made_of(value.value, losses, operands)
    if isinstance(value, ast.Call) and last_name(value.func) in _ARITHMETIC:
        given = [*value.args, *([value.func.value] if isinstance(value.func, ast.Attribute) else [])]
        return any(_is_made_of(one, losses, operands) for one in given)
    return ast.unparse(value) in losses
