"""The rule on training steps that a rank skips because of its own loss."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.nodes import last_name, names_of_target, variables_in
from dualtrain.horovodize.rules.ranks import Collectives
from dualtrain.horovodize.source import Finding, Scope, Source

#: Words in expressions whose value may be equal on all ranks.
COMMON = re.compile(r"reduce|average|avg|gather|bcast|broadcast|sync|hvd|horovod", re.IGNORECASE)
#: Functions that return the values of all ranks, unlike the method ``gather`` of tensors.
_GATHER = re.compile(r"all_?gather|gather_|_gather", re.IGNORECASE)
_FINITE = ("isnan", "isinf", "isfinite")
#: Functions and methods that only convert a loss.
_CONVERSIONS = ("item", "float", "detach", "cpu")
#: Functions and methods that do not combine values of different ranks.
_LOCAL = (*_FINITE, *_CONVERSIONS, "any", "all", "bool", "int")


def step_skipped_by_own_loss(source: Source) -> Iterator[Finding]:
    """A step that a rank skips because its own loss is NaN, zero or too large."""
    if source.hvd_calls("join"):
        return  # with join(), ranks may take different numbers of steps
    collectives, backwards = Collectives(source), [call for call in source.calls if last_name(call.func) == "backward"]
    for branch in source.nodes if backwards else ():
        if (
            isinstance(branch, ast.If)
            and _tests_own_loss(collectives, branch, backwards)
            and (name := collectives.in_one_arm(branch))
        ):
            message = (
                f"a rank whose own loss meets this condition takes another path than the other ranks, so that {name}() "
                "hangs, or combines gradients of different steps; decide on all ranks at once, for example by "
                "`if hvd.allreduce(torch.tensor(float(bad)), op=hvd.Max) > 0:`"
            )
            yield Finding(branch.lineno, "trap", message)


def _tests_own_loss(collectives: Collectives, branch: ast.If, backwards: list[ast.Call]) -> bool:
    """Return whether the condition of ``branch`` compares the loss of this rank, or tests whether it is finite."""
    losses = _losses(collectives, branch, backwards)
    for node in ast.walk(branch.test) if losses else ():
        tested: list[ast.expr] = []
        if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot | ast.In | ast.NotIn):
            tested = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and last_name(node.func) in _FINITE:
            tested = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
        if any(ast.unparse(without_conversions(value)) in losses for value in tested):
            # Functions that are not in _LOCAL may combine the values of all ranks.
            local = all(last_name(call.func) in _LOCAL for call in collectives.source.around(node, ast.Call))
            return local and not COMMON.search(ast.unparse(branch.test))
    return False


def _losses(collectives: Collectives, branch: ast.If, backwards: list[ast.Call]) -> set[str]:
    """Return the variables that hold the loss of a backward pass of this rank, in the loop around ``branch``.

    Return an empty set if one of them may be equal on all ranks.
    """
    source = collectives.source
    calls = [call for call in backwards if loop_around(source, call) is loop_around(source, branch)]
    owners = [(without_scaler(call.func.value), call) for call in calls if isinstance(call.func, ast.Attribute)]
    passes = [(ast.unparse(one), call) for one, call in owners if isinstance(one, ast.Name | ast.Attribute | ast.Subscript)]
    names = {text for text, _ in passes}
    if not names:
        return set()
    scope = source.scope(branch)
    assigned = [(target, value) for target, value, at in source.assignments if source.scope(at) is scope]
    assignments = [(name, value) for target, value in assigned for name in names_of_target(target)]
    found = names | {target for target, value in assignments if ast.unparse(without_conversions(value)) in names}
    if may_be_common(collectives, branch, found, assignments):
        return set()
    last = {target: value for target, value in assignments if value.lineno < branch.lineno}
    replaced = {
        name
        for name in found & set(last)
        if ast.unparse(without_conversions(last[name])) not in names
        and all(text != name or call.lineno < last[name].lineno for text, call in passes)
    }
    return found - replaced  # a variable that was assigned again after its last backward pass holds another loss


def may_be_common(
    collectives: Collectives, place: ast.AST, losses: set[str], assignments: list[tuple[str, ast.expr]]
) -> bool:
    """Return whether one of the ``losses`` may be equal on all ranks.

    ``assignments`` are (target, value) pairs of the function that contains ``place``.
    """
    source, names = collectives.source, set(losses)
    for target, value in assignments:
        if (target in losses or target.rpartition(".")[0] in losses) and (
            COMMON.search(ast.unparse(value)) or collectives.first_in([value])
        ):
            return True
    for _ in range(4):  # add the variables from which the losses are computed, through up to four assignments
        values = [value for target, value in assignments if target in names]
        names |= {name for value in values for name in variables_in(value)}
    if any(_GATHER.search(last_name(node)) for value in values for node in ast.walk(value)):
        return True
    for call in source.calls:
        name = last_name(call.func)
        in_place = name.endswith("_") or isinstance(source.parents[call], ast.Expr)
        if in_place and COMMON.search(name) and source.scope(call) is source.scope(place):
            given = (node for value in call.args for node in ast.walk(value) if isinstance(node, ast.expr))
            if any(ast.unparse(node) in losses for node in given):
                return True
    return False


def without_scaler(owner: ast.expr) -> ast.expr:
    """Return the first argument of ``owner`` if it is a call, as in ``scaler.scale(loss)``, and else ``owner`` itself."""
    return owner.args[0] if isinstance(owner, ast.Call) and owner.args else owner


def loop_around(source: Source, node: ast.AST) -> ast.AST:
    """Return the innermost loop or function around ``node``, or the module."""
    return next(above for above in source.above(node) if isinstance(above, ast.For | ast.While | Scope))


def without_conversions(value: ast.expr) -> ast.expr:
    """Return ``loss`` for ``loss.item()``, ``float(loss)`` and similar calls."""
    while isinstance(value, ast.Call) and last_name(value.func) in _CONVERSIONS:
        value = value.func.value if isinstance(value.func, ast.Attribute) else value.args[0] if value.args else value.func
    return value
