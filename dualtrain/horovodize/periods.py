"""Conditions that are true once in N iterations of a loop, such as ``i % N == 0``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from dualtrain.horovodize.nodes import arms, is_bool, is_stored, last_name, names_in
from dualtrain.horovodize.source import Source

_REMAINDERS = re.compile(r"divmod|(math|numpy|operator|torch)\.(divmod|fmod|mod|remainder)")


class Period(NamedTuple):
    """A condition that is true once in ``length`` iterations, such as ``i % N == 0``.

    ``node`` is ``i % N``, or the comparison of a counter that is reset.
    """

    node: ast.expr
    counter: ast.expr
    length: ast.expr


def changes_in(loop: ast.For | ast.While, value: ast.expr) -> bool:
    """Return whether a variable in ``value`` changes in ``loop``, as a counter of batches does."""
    names = names_in(value)
    return any(ast.unparse(node) in names for node in filter(is_stored, ast.walk(loop)))


def modulo_in(source: Source, test: ast.expr) -> Period | None:
    """Return ``i % N`` in ``test``, in its value if it is a variable, or among its operands (see :func:`_operands`).

    A call such as ``divmod(i, N)`` counts too.

    Indices are not searched. The arguments of a call other than ``bool()`` and ``int()`` are searched only if the call is
    in ``test`` or its value, and variables in them are not replaced by their values: the loss in ``if isfinite(loss)`` may
    be computed from ``data[i % N]``.
    """
    whole = (node for value in (test, *source.local_values(test)) for node in _walk(value))
    for node in (*whole, *_operands(source, test, set())):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not isinstance(node.left, ast.Constant):
            return Period(node, node.left, node.right)
        name = (source.name(node.func) or last_name(node.func)) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and _REMAINDERS.fullmatch(name) and len(node.args) == 2:
            return Period(node, *node.args)
    return None


def reset_counter(loop: ast.For | ast.While, branch: ast.If, lines: range, truth: bool) -> Period | None:
    """Return the period of ``n += 1; if n == N: step(); n = 0``, where ``n`` is counted outside of ``lines``; else None.

    The step runs if the test of ``branch`` has the value ``truth``.
    """
    test = branch.test
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq | ast.GtE if truth else ast.NotEq | ast.Lt):
        return None
    name = ast.unparse(test.left)
    counted = reset = False
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and ast.unparse(node.target) == name:
            counted = counted or (ast.unparse(node.value) == "1" and node.lineno not in lines)
        elif isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets) and node.lineno in lines:
            reset = reset or ast.unparse(node.value) == "0"
    return Period(test, test.left, test.comparators[0]) if counted and reset else None


def holds_once(source: Source, test: ast.expr, node: ast.expr, depth: int = 0) -> bool | None:
    """Return the value of ``test`` in the one of N iterations in which the condition is true; None if unknown.

    ``node`` and the condition are those of a :class:`Period`. The value is True for ``i % N == 0``, False for ``i % N``.
    """
    if test is node:
        return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq | ast.GtE)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = holds_once(source, test.operand, node, depth)
        return None if inner is None else not inner
    if isinstance(test, ast.Compare):
        operator = type(test.ops[0])
        differs = operator is ast.NotEq or (operator is ast.Gt and ast.unparse(test.comparators[0]) == "0")
        known = node in (test.left, getattr(test.left, "value", None)) and (differs or operator is ast.Eq)
        return not differs if known else None
    inside = [test.value] if isinstance(test, ast.NamedExpr) else []
    if isinstance(test, ast.BoolOp):
        inside = test.values
    elif isinstance(test, ast.Call) and last_name(test.func) in ("bool", "int"):
        inside = test.args
    elif isinstance(test, ast.Name | ast.Attribute) and depth < 4:
        inside = source.local_values(test)
    found = (holds_once(source, one, node, depth + 1) for one in inside)
    return next((value for value in found if value is not None), None)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield ``node`` and the nodes in it that may decide on it as a condition (see ``_parts``)."""
    yield node
    for part in _parts(node):
        yield from _walk(part)


def _parts(node: ast.AST) -> list[ast.AST]:
    """Return the children of ``node``, except indices (``data[i]``), and calls that are arguments of another call.

    Leave out the test in ``a if test else b``, unless ``a`` or ``b`` is True or False.
    """
    if isinstance(node, ast.Subscript):
        return [node.value]
    if isinstance(node, ast.IfExp) and not any(is_bool(arm, constant) for arm in arms(node) for constant in (True, False)):
        return [*arms(node)]
    children = ast.iter_child_nodes(node)
    return [part for part in children if not (isinstance(node, ast.Call) and isinstance(part, ast.Call))]


def _operands(source: Source, condition: ast.expr, seen: set[str]) -> Iterator[ast.expr]:
    """Yield ``condition``, and the operands of its ``not``, ``and``, ``or``, comparisons, ``bool()`` and ``int()``.

    Yield the values of variables among them, too, and the operands of these values. The variables in ``seen`` are left out;
    those that are found are added to it.
    """
    yield condition
    inside: list[ast.AST] = []
    if isinstance(condition, ast.BoolOp | ast.UnaryOp | ast.Compare | ast.IfExp | ast.NamedExpr):
        inside = _parts(condition)
    elif isinstance(condition, ast.Call) and last_name(condition.func) in ("bool", "int"):
        inside = [*condition.args]
    elif (text := ast.unparse(condition)) not in seen:
        seen.add(text)
        inside = [*source.local_values(condition)]
    for operand in inside:
        if isinstance(operand, ast.expr):
            yield from _operands(source, operand, seen)
