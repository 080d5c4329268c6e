"""Unused functions of a script: mistakes in them have no effect."""

from __future__ import annotations

import ast

from dualtrain.horovodize.nodes import last_name
from dualtrain.horovodize.order import ENTRY_POINTS
from dualtrain.horovodize.source import Function, Source


def lines_of_unused(source: Source) -> set[int]:
    """Return the lines of functions that nothing in the program uses; no lines if the file may be a library.

    A use inside of an unused function, or inside of the function itself, does not count. These functions count as used:

    - functions with a decorator, which may register them;
    - methods of a class with a base class, a metaclass or a decorator, which may call them;
    - methods whose names begin with ``__``, such as special methods;
    - functions that a launcher may call (``ENTRY_POINTS``).
    """
    functions = [node for node in source.nodes if isinstance(node, Function) and _may_be_unused(source, node)]
    if not functions or not _is_started(source):
        return set()
    uses = {function: _uses(source, function) for function in functions}
    unused: set[ast.AST] = set()
    while True:
        found = {
            function
            for function, places in uses.items()
            if all(set(enclosing) & (unused | {function}) for enclosing in places)
        }
        if found <= unused:
            break
        unused |= found
    return {line for one in functions if one in unused for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}


def _may_be_unused(source: Source, function: Function) -> bool:
    home = source.parents[function]
    if isinstance(home, ast.ClassDef) and (home.bases or home.keywords or home.decorator_list or function.name[:2] == "__"):
        return False
    return not function.decorator_list and function.name not in ENTRY_POINTS


def _is_started(source: Source) -> bool:
    """Return whether the file is a script: it has a main guard, or it trains or calls its own functions at top level.

    A call of ``hvd.init`` does not suffice, because a module that other files import may call it.
    """
    for node in source.scopes[source.tree]:
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            return True
        if isinstance(node, ast.Call) and (last_name(node.func) == "backward" or _calls_own(source, node)):
            return True
    return False


def _calls_own(source: Source, call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in source.functions


def _uses(source: Source, function: Function) -> list[list[ast.AST]]:
    """Return, for each place that may refer to ``function`` by its name, the nodes that contain this place."""
    return [list(file.above(node)) for file in source.files for node in file.mentions.get(function.name, ())]
