"""The form of a syntax tree that the rules of ``--check`` expect: one spelling for constructs that mean the same."""

from __future__ import annotations

import ast
from copy import deepcopy

#: For each comparison operator, the one that means the same after the operands are swapped.
_SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}
_SWAPPED |= {each: each for each in (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)}
#: A longer ``match`` stays: each case becomes one more nested ``if``, and Python limits the depth of recursive functions.
_MOST_CASES = 100


def normalized(tree: ast.Module) -> ast.Module:
    """Change ``0 == rank`` to ``rank == 0``, ``x: int = 1`` to ``x = 1``, and ``match`` on constants to ``if``.

    Also change ``async for`` to ``for``, and ``async with`` to ``with``. Return ``tree``.
    """
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, name, None), list):
                block[:] = map(_normal_statement, block)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.left, ast.Constant):
            swapped = _SWAPPED.get(type(node.ops[0]))
            if swapped is not None:
                node.left, node.ops, node.comparators = node.comparators[0], [swapped()], [node.left]
    return tree


def _normal_statement(statement: ast.stmt) -> ast.stmt:
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return ast.copy_location(ast.Assign([statement.target], statement.value), statement)
    if isinstance(statement, ast.AsyncFor):
        return ast.copy_location(ast.For(statement.target, statement.iter, statement.body, statement.orelse), statement)
    if isinstance(statement, ast.AsyncWith):
        return ast.copy_location(ast.With(statement.items, statement.body), statement)
    return _without_constant_cases(statement) if isinstance(statement, ast.Match) else statement


def _without_constant_cases(match: ast.Match) -> ast.stmt:
    """Replace the first cases of ``match``, as far as their patterns are constants, by nested ``if subject == 0:``.

    The remaining cases become a ``match`` in the innermost ``else``. But if the next case is ``case _:``, its body becomes
    the body of this ``else``. Return ``match`` unchanged if its first pattern is not a constant, if it has too many cases,
    or if its subject should not be evaluated repeatedly.
    """
    first, *rest = match.cases
    test = _test(match.subject, first) if _may_be_repeated(match.subject) and len(rest) < _MOST_CASES else None
    if test is None:
        return match
    other: list[ast.stmt] = []
    if rest and isinstance(rest[0].pattern, ast.MatchAs) and rest[0].pattern.name is None and rest[0].guard is None:
        other = rest[0].body
    elif rest:
        left = ast.copy_location(ast.Match(deepcopy(match.subject), rest), rest[0].pattern)
        left.end_lineno, left.end_col_offset = match.end_lineno, match.end_col_offset
        other = [_without_constant_cases(left)]
    return ast.copy_location(ast.If(test, first.body, other), match)


def _may_be_repeated(subject: ast.expr) -> bool:
    """Return whether ``subject`` is a variable, attribute or element, or calls one of them without arguments."""
    if isinstance(subject, ast.Call) and not subject.args and not subject.keywords:
        subject = subject.func
    return isinstance(subject, ast.Name | ast.Attribute | ast.Subscript)


def _test(subject: ast.expr, case: ast.match_case) -> ast.expr | None:
    """Return the condition under which ``case`` applies; None if its pattern does not consist of constants."""
    whole: ast.pattern = case.pattern
    if isinstance(whole, ast.MatchAs) and whole.pattern is not None and whole.name is not None:  # case 0 as rank
        subject = ast.NamedExpr(ast.Name(whole.name, ast.Store()), subject)
        whole = whole.pattern
    patterns = whole.patterns if isinstance(whole, ast.MatchOr) else [whole]
    values = [value for pattern in patterns if (value := _constant(pattern))]
    if len(values) < len(patterns):
        return None
    several = isinstance(whole, ast.MatchOr)
    operator = ast.In() if several else ast.Is() if isinstance(whole, ast.MatchSingleton) else ast.Eq()
    test: ast.expr = ast.Compare(subject, [operator], [ast.Tuple(values, ast.Load()) if several else values[0]])
    if case.guard is not None:
        test = ast.BoolOp(ast.And(), [test, case.guard])
    for node in ast.walk(test):
        if isinstance(node, ast.expr) and not hasattr(node, "lineno"):
            ast.copy_location(node, case.pattern)
    return test


def _constant(pattern: ast.pattern) -> ast.expr | None:
    """Return the value of ``case 0``, ``case None`` and ``case Mode.TRAIN``; None for other patterns."""
    if isinstance(pattern, ast.MatchSingleton):
        return ast.copy_location(ast.Constant(pattern.value), pattern)
    return pattern.value if isinstance(pattern, ast.MatchValue) else None
