"""The rule on training steps that a rank skips because of its own loss."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.rules.ranks import Collectives
from dualtrain.horovodize.source import Finding, Scope, Source, last_name

#: Words in expressions whose value may be equal on all ranks.
_COMMON = re.compile(r"reduce|average|avg|gather|bcast|broadcast|sync|hvd|horovod", re.IGNORECASE)
_FINITE = ("isnan", "isinf", "isfinite")
#: Functions and methods that only convert a loss.
_CONVERSIONS = ("item", "float", "detach", "cpu")


def step_skipped_by_own_loss(source: Source) -> Iterator[Finding]:
    """A step that a rank skips because its own loss is NaN, zero or too large."""
    if any(True for _ in source.hvd_calls("join")):
        return
    look, backwards = Collectives(source), [call for call in source.calls if last_name(call.func) == "backward"]
    for branch in source.nodes if backwards else ():
        if isinstance(branch, ast.If) and _tests_own_loss(source, branch, backwards) and (name := look.in_one_arm(branch)):
            message = (
                f"a rank whose own loss meets this condition takes another path than the other ranks, whose {name}() then "
                "hangs, or gets the gradients of another step; decide on all ranks at once, as by "
                "`if hvd.allreduce(torch.tensor(float(bad)), op=hvd.Max) > 0:`"
            )
            yield Finding(branch.lineno, "trap", message)


def _tests_own_loss(source: Source, branch: ast.If, backwards: list[ast.Call]) -> bool:
    """Return whether the condition of ``branch`` compares the loss of this rank, or asks whether it is finite."""
    losses = _losses(source, branch, backwards)
    for node in ast.walk(branch.test) if losses else ():
        tested: list[ast.expr] = []
        if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot | ast.In | ast.NotIn):
            tested = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and last_name(node.func) in _FINITE:
            tested = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
        if any(ast.unparse(_converted(value)) in losses for value in tested):
            return not _COMMON.search(ast.unparse(branch.test))
    return False


def _losses(source: Source, branch: ast.If, backwards: list[ast.Call]) -> set[str]:
    """Return the variables that hold the loss of a backward pass of this rank, in the loop around ``branch``."""
    calls = [call for call in backwards if _loop(source, call) is _loop(source, branch)]
    owners = [call.func.value for call in calls if isinstance(call.func, ast.Attribute)]
    scaled = [owner.args[0] if isinstance(owner, ast.Call) and owner.args else owner for owner in owners]
    found = {ast.unparse(value) for value in scaled if isinstance(value, ast.Name | ast.Attribute | ast.Subscript)}
    if not found:
        return set()
    scope = source.scope(branch)
    own = [(target, value) for target, value, at in source.assignments if source.scope(at) is scope]
    found |= {target for target, value in own if ast.unparse(_converted(value)) in found}
    common = any(target in found and _COMMON.search(ast.unparse(value)) for target, value in own)
    return set() if common else found


def _loop(source: Source, node: ast.AST) -> ast.AST:
    """Return the innermost loop or function around ``node``, or the module."""
    return next(above for above in source.above(node) if isinstance(above, ast.For | ast.While | Scope))


def _converted(value: ast.expr) -> ast.expr:
    """Return ``loss`` for ``loss.item()``, ``float(loss)`` and similar calls."""
    while isinstance(value, ast.Call) and last_name(value.func) in _CONVERSIONS:
        value = value.func.value if isinstance(value.func, ast.Attribute) else value.args[0] if value.args else value.func
    return value
