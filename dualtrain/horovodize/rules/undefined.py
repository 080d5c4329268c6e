"""The rule on names that a file uses but does not define."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator

from dualtrain.horovodize.nodes import last_name
from dualtrain.horovodize.source import Finding, Function, Source

#: Names that every module has, names of other platforms, and names that notebooks and consoles define.
_KNOWN = {"__annotations__", "__builtins__", "__cached__", "__doc__", "__file__", "__name__", "__package__", "__path__"}
_KNOWN |= {"WindowsError", "__module__", "__qualname__", "__spec__", "profile"}
_KNOWN |= {"_", "In", "Out", "dbutils", "display", "displayHTML", "get_ipython", "sc", "spark", "sqlContext"}
#: Builtin names of Python 2. A condition on the version may prevent their use.
_KNOWN |= {"basestring", "cmp", "execfile", "file", "long", "raw_input", "reduce", "reload", "unichr", "unicode", "xrange"}
_KNOWN |= {"StandardError", "apply", "buffer", "coerce", "intern"}
#: Functions by which a program may define names, or ask which names are defined.
_DYNAMIC = ("dir", "exec", "get_ipython", "globals", "locals", "run_path", "setattr", "vars")


def undefined_names(source: Source) -> Iterator[Finding]:
    """Names that the file does not define, so that their lines raise NameError.

    A file that may define names in other ways, such as ``import *`` or ``setattr``, has no finding.
    """
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in source.nodes):
        return
    if any(last_name(call.func) in _DYNAMIC for call in source.calls) or "sys.modules[" in source.code:
        return
    if any(isinstance(node, ast.Import) and "builtins" in {each.name for each in node.names} for node in source.nodes):
        return
    try:
        unknown = _unknown_globals(symtable.symtable(source.text, "script", "exec")) - _named_expressions(source)
    except SyntaxError:  # an assignment to x before ``global x``, for example, which ast.parse accepts
        return
    for node in source.nodes:
        if not isinstance(node, ast.Name) or node.id not in unknown or not isinstance(node.ctx, ast.Load):
            continue
        if _is_local(source, node) or _is_annotation(source, node) or _is_tried(source, node):
            continue
        message = (
            f"the name {node.id!r} is not defined in this file: the line raises NameError when it runs, on Horovod too; "
            "define or import it (until then, the code after this line does not run, and its findings do not matter)"
        )
        yield Finding(node.lineno, "trap", message)


def _unknown_globals(module: symtable.SymbolTable) -> set[str]:
    """Return the global names that some scope reads and no scope binds, except builtin names and those in ``_KNOWN``."""
    tables = [module]
    for table in tables:
        tables += table.get_children()
    symbols = [(table, symbol) for table in tables for symbol in table.get_symbols()]
    bound = {
        symbol.get_name()
        for table, symbol in symbols
        if (symbol.is_assigned() or symbol.is_imported()) and (table is module or symbol.is_declared_global())
    }
    read = {symbol.get_name() for table, symbol in symbols if symbol.is_referenced() and symbol.is_global()}
    read |= {symbol.get_name() for symbol in module.get_symbols() if symbol.is_referenced()}
    return read - bound - set(dir(builtins)) - _KNOWN


def _named_expressions(source: Source) -> set[str]:
    """Return the names that ``:=`` binds in the module. In comprehensions, Python 3.12's ``symtable`` omits them."""
    scopes = Function | ast.Lambda | ast.ClassDef
    named = (node for node in source.nodes if isinstance(node, ast.NamedExpr))
    return {node.target.id for node in named if not any(isinstance(above, scopes) for above in source.above(node))}


def _is_local(source: Source, name: ast.Name) -> bool:
    """Return whether a function, class or comprehension around ``name`` binds it, by Python's scoping rules."""
    below: ast.AST = name
    in_function = False
    for above in source.above(name):
        if isinstance(above, Function | ast.Lambda):
            inside = below is above.body if isinstance(above, ast.Lambda) else below in above.body
            if inside and name.id in _bound_in(above):
                return True
            in_function |= inside
        elif isinstance(above, ast.ClassDef):
            if not in_function and name.id in _bound_in(above):  # methods do not see names of their class
                return True
        elif isinstance(above, _COMPREHENSION) and name.id in _bound_in(above):
            return True
        below = above
    return False


_COMPREHENSION = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def _bound_in(scope: ast.AST) -> set[str]:
    """Return the names that ``scope`` binds, and those that lambdas and comprehensions in it bind.

    Leave out names that are bound only inside a ``def`` or ``class`` in it.
    """
    found, nodes = set(), list(ast.iter_child_nodes(scope))
    for node in nodes:
        if isinstance(node, Function | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.ExceptHandler | ast.pattern):
            found |= {getattr(node, "name", None) or "", getattr(node, "rest", None) or ""}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        nodes += ast.iter_child_nodes(node)
    return found


def _is_annotation(source: Source, name: ast.Name) -> bool:
    """Return whether ``name`` is in an annotation, which need not be evaluated."""
    below: ast.AST = name
    for above in source.above(name):
        if below in (getattr(above, "annotation", None), getattr(above, "returns", None)):
            return True
        below = above
    return False


def _is_tried(source: Source, name: ast.Name) -> bool:
    """Return whether ``name`` is in a ``try`` statement or in ``with suppress``, which may catch the NameError."""
    suppressed = any("suppress" in ast.unparse(item) for item in source.with_items(name))
    return suppressed or any(hasattr(above, "handlers") for above in source.above(name))
