"""Names, variables and arguments in the nodes of a syntax tree. Imports are not resolved."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator


def last_name(node: ast.AST) -> str:
    """Return "optimizer" for ``optimizer`` and ``self.optimizer``, and "" for nodes that are not names."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def variables_in(node: ast.AST) -> set[str]:
    """Return the names of the variables in ``node``, without attributes."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def names_of_target(target: str) -> list[str]:
    """Return the variables and attributes in ``target``, the text of an assignment's target, which may be a tuple."""
    return re.split(r",\s*", target.strip("()")) if target.startswith("(") else [target]


def names_in(node: ast.AST) -> set[str]:
    """Return the variables and attributes in ``node`` as text: "self" and "self.rate" for ``self.rate``."""
    return {ast.unparse(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)}


def arms(value: ast.expr) -> list[ast.expr]:
    """Return ``a`` and ``b`` for the conditional expression ``a if test else b``; ``value`` itself for any other."""
    return [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]


def calls_in(*nodes: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in each of ``nodes``, including those in arguments of other calls."""
    return (part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Call))


def is_stored(node: ast.AST) -> bool:
    """Return whether ``node`` is a variable, attribute or element to which a statement assigns a value."""
    return isinstance(getattr(node, "ctx", None), ast.Store)


def is_bool(value: ast.expr | None, constant: bool) -> bool:
    """Return whether ``value`` is the given ``constant``, True or False, as in ``shuffle=True``."""
    return isinstance(value, ast.Constant) and value.value is constant


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return the keyword argument ``name`` of ``call``, or None."""
    return next((word.value for word in call.keywords if word.arg == name), None)


def first_argument(call: ast.Call, name: str) -> ast.expr | None:
    """Return the first positional argument of ``call``, or else its keyword argument ``name``, or None."""
    return argument_at(call, 0, name)


def argument_at(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """Return the positional argument of ``call`` at ``position``, or else its keyword argument ``name``, or None."""
    return call.args[position] if position < len(call.args) else keyword(call, name)


def sampler_of(call: ast.Call) -> ast.expr | None:
    """Return the argument ``sampler`` of ``call``, a DataLoader or any other call; None if it is missing or ``None``."""
    sampler = argument_at(call, 3, "sampler") if last_name(call.func) == "DataLoader" else keyword(call, "sampler")
    return None if isinstance(sampler, ast.Constant) and sampler.value is None else sampler


def is_unconditional(loop: ast.For | ast.While) -> bool:
    """Return whether ``loop`` is a ``for`` loop, or a ``while`` loop whose condition is a constant that is true."""
    return isinstance(loop, ast.For) or (isinstance(loop.test, ast.Constant) and bool(loop.test.value))


def given_values(call: ast.Call) -> list[ast.expr]:
    """Return the values of all arguments of ``call``, positional ones first."""
    return [*call.args, *(word.value for word in call.keywords)]


def loaded_module(value: ast.AST) -> str:
    """Return the full name of the module that a call such as ``import_module("horovod.torch")`` loads, or ""."""
    if isinstance(value, ast.Call) and last_name(value.func) == "import_module" and len(value.args) == 1:
        name = value.args[0]
        return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""
    return ""
