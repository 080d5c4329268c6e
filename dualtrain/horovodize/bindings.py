"""Find the imports that the names in a script refer to, by Python's scopes."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from dualtrain.horovodize.names import HOMES
from dualtrain.horovodize.nodes import arms, given_values, is_stored, last_name, loaded_module

_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_SCOPE = ast.Module | _FUNCTION
#: Yields (name in the script, full name) for each name that an import, or a call of import_module, binds.
_ImportsOf = Callable[[ast.AST], Iterable[tuple[str, str]]]


class Bindings:
    """Imports and other bindings of names, by scope. ``HOMES`` are the modules with the API of horovod.torch.

    A parameter or an assignment hides an import of the same name in the same scope and in outer scopes. Two kinds of
    bindings do not hide an import:

    - A fallback, such as ``hvd = None``, which scripts execute if the import fails.
    - A parameter whose value most likely is a module in ``HOMES``. Two conditions must hold: an import binds the
      parameter's name to such a module; and this name contains hvd or horovod, or a call passes the module to the function.

    An import in a function binds the name in this function only, unless the function declares the name as global or
    nonlocal. If several imports in one scope bind the same name, the one in the innermost block around the use counts; the
    body of the scope itself is not such a block. If no such block has one, the last one counts. But if it is conditional
    (``except ImportError:``), the last import from ``HOMES`` counts, if there is one.

    An assignment of a module in ``HOMES``, as in ``hvd = horovod.torch``, counts as an import. So does an assignment of the
    result of a function that imports such a module and returns it or None, and nothing else.

    Args:
        nodes: all nodes of the script in source order.
        parents: parent of each node.
        imports_of: yields the names that a node binds to imports.
    """

    def __init__(self, nodes: Iterable[ast.AST], parents: Mapping[ast.AST, ast.AST], imports_of: _ImportsOf) -> None:
        self._parents = parents
        #: Imports that bind each name, by scope: the node of the import, and the full name.
        self._imports: dict[ast.AST, dict[str, list[tuple[ast.AST, str]]]] = {}
        #: Names that parameters and assignments bind and that hide an import, by scope.
        self._others: dict[ast.AST, set[str]] = {}
        #: Full name of each imported name; the last import counts, but an import of a module in ``HOMES`` has priority.
        self.imported: dict[str, str] = {}
        everything = list(nodes)
        module = next((node for node in everything if isinstance(node, ast.Module)), ast.Module([], []))
        declared = [node for node in everything if isinstance(node, ast.Global | ast.Nonlocal)]
        #: Full name of the module in ``HOMES`` that each function returns, by the function's name.
        self._returned: dict[str, str] = {}
        self._returned |= self._modules_returned(everything, imports_of)
        shared = {(self._scope(node), name): self._declared_in(node, module) for node in declared for name in node.names}
        for node in everything:
            for name, full in (*imports_of(node), *self._copies_of(node)):
                if full in HOMES or self.imported.get(name) not in HOMES:
                    self.imported[name] = full
                scope = shared.get((self._scope(node), name), self._scope(node))
                self._imports.setdefault(scope, {}).setdefault(name, []).append((node, full))
        for node in everything:
            for name in self._bound_by(node) if self.imported else ():
                if name in self.imported:
                    self._others.setdefault(node if isinstance(node, _FUNCTION) else self._scope(node), set()).add(name)
        for node in declared:
            self._others.get(self._scope(node), set()).difference_update(node.names)
        self._has_stub = any(map(self._is_stub, everything))
        if not set(HOMES).isdisjoint(self.imported.values()):
            self._find_passed_modules(everything)

    def full_name(self, node: ast.Name) -> str:
        """Return the full name of the import that ``node`` refers to, or an empty string."""
        return self.meaning(node.id, node)

    def meaning(self, name: str, node: ast.AST, *, certain: bool = False) -> str:
        """Return the full name of the import that ``name`` refers to in code at ``node``, or an empty string.

        With ``certain``, return an empty string for parameters, even if their value most likely is a module in ``HOMES``.
        """
        if name not in self.imported:
            return ""
        for scope in self._scopes(node):
            if name in self._others.get(scope, ()):
                return ""
            if name in self._imports.get(scope, ()):
                return self._nearest(self._imports[scope][name], scope, node)
            if isinstance(scope, _FUNCTION) and name in _parameters(scope):
                return "" if certain else self.imported[name]  # most likely, the caller imports the module and passes it
        return ""

    @property
    def may_have_stub(self) -> bool:
        """Return whether a name imported from ``HOMES`` may also be bound to another module, a class or an object."""
        same_name = [imports for of_scope in self._imports.values() for imports in of_scope.values()]
        return self._has_stub or any(len({full.startswith(HOMES) for _, full in imports}) > 1 for imports in same_name)

    def _is_stub(self, node: ast.AST) -> bool:
        """Return whether ``node`` may give the name of a module in ``HOMES`` to a class or another object."""
        if isinstance(node, ast.ClassDef):
            return self.imported.get(node.name) in HOMES
        if not isinstance(node, ast.Assign):
            return False
        names = [one for one in node.targets if isinstance(one, ast.Name) and self.imported.get(one.id) in HOMES]
        others = [
            value
            for value in arms(node.value)
            if not isinstance(value, ast.Constant) and not loaded_module(value) and not self._module_of(value)
        ]
        called = isinstance(node.value, ast.Call)
        return bool(others) and any(called or self._is_fallback(name) for name in names)

    def _nearest(self, imports: list[tuple[ast.AST, str]], scope: ast.AST, node: ast.AST) -> str:
        """Return the full name that counts at ``node``. All ``imports`` bind the same name in ``scope``."""
        if len({full for _, full in imports}) > 1:
            below = node
            for above in self._above(node):
                if above is scope:
                    break
                block = _block(above, below)
                found = [full for at, full in imports if at in block]
                if found:
                    return found[-1]
                below = above
            if self._parents[imports[-1][0]] is not scope:
                return next((full for _, full in reversed(imports) if full.startswith(HOMES)), imports[-1][1])
        return imports[-1][1]

    def _copies_of(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        """Yield (name, full name) for each name to which ``node`` assigns an imported module in ``HOMES``."""
        if not isinstance(node, ast.Assign):
            return
        found = {full for value in arms(node.value) if (full := self._module_of(value))}
        yield from ((target.id, full) for target in node.targets if isinstance(target, ast.Name) for full in found)

    def _module_of(self, value: ast.expr) -> str:
        """Return the full name of the module in ``HOMES`` that ``value`` names or returns, or an empty string."""
        if not isinstance(value, ast.Name | ast.Attribute):
            return self._module_from(value)
        first, *rest = ast.unparse(value).split(".")
        full = ".".join([self.imported.get(first, ""), *rest])
        return full if full in HOMES else ""

    def _module_from(self, value: ast.expr) -> str:
        """Return the full name of the module in ``HOMES`` that the call ``value`` returns, or an empty string."""
        called = isinstance(value, ast.Call) and isinstance(value.func, ast.Name)
        return self._returned.get(value.func.id, "") if called else ""  # type: ignore[attr-defined]

    def _modules_returned(self, nodes: list[ast.AST], imports_of: _ImportsOf) -> Iterator[tuple[str, str]]:
        """Yield (name, full name of the module) for each function that imports and returns a module in ``HOMES``.

        The function may also return None, but nothing else. Leave out methods, names that are defined several times, and
        functions that assign a value to the returned name.
        """
        imports = [(self._scope(node), *bound) for node in nodes for bound in imports_of(node)]
        for function in {scope: None for scope, _, _ in imports if isinstance(scope, ast.FunctionDef)}:
            ends = [end.value for end in nodes if isinstance(end, ast.Return) and self._scope(end) is function]
            values = [end for end in ends if end is not None and not (isinstance(end, ast.Constant) and end.value is None)]
            paths = {tuple(ast.unparse(value).split(".")) for value in values}
            found = {
                ".".join([full, *rest])
                for first, *rest in paths
                for full in {full for scope, name, full in imports if scope is function and name == first} or {""}
            }
            changed = any(self._assigns(function, first) for first, *_ in paths)
            defined = sum(isinstance(node, ast.FunctionDef) and node.name == function.name for node in nodes)
            method = isinstance(self._parents[function], ast.ClassDef)
            if len(found) == 1 and found <= set(HOMES) and not changed and defined == 1 and not method:
                yield function.name, found.pop()

    def _bound_by(self, node: ast.AST) -> Iterator[str]:
        """Yield the names that ``node`` binds, other than by an import.

        For a function, these are its parameters, except those that are most likely modules. For a variable to which a value
        is assigned, it is the variable's name, except for fallbacks.
        """
        if isinstance(node, _FUNCTION):
            yield from (name for name in _parameters(node) if not self._is_module(name))
        elif isinstance(node, ast.Name) and is_stored(node) and not self._is_fallback(node):
            yield node.id

    def _find_passed_modules(self, nodes: list[ast.AST]) -> None:
        """Stop parameters from hiding imports if a call passes a module in ``HOMES`` by a variable of the same name.

        Example: ``main(h)`` for ``def main(h)``. The function must not assign the parameter.
        """
        calls = [(node, name) for node in nodes if isinstance(node, ast.Call) for name in _passed_names(node)]
        calls = [(call, name) for call, name in calls if self.imported.get(name.id) in HOMES]
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)] if calls else []
        while True:
            passed = {(last_name(call.func), name.id) for call, name in calls if self.full_name(name) in HOMES}
            found = [
                (function, name)
                for function in functions
                for name in self._others.get(function, ())
                if (function.name, name) in passed and name in _parameters(function) and not self._assigns(function, name)
            ]
            if not found:
                return
            for function, name in found:
                self._others[function].discard(name)

    def _assigns(self, function: ast.AST, name: str) -> bool:
        """Return whether ``function``, or a function in it, assigns ``name``. Fallbacks do not count."""
        stores = (node for node in ast.walk(function) if isinstance(node, ast.Name) and is_stored(node))
        return any(node.id == name and not self._is_fallback(node) for node in stores)

    def _is_module(self, parameter: str) -> bool:
        """Return whether the value of ``parameter`` most likely is a module in ``HOMES``, by its name."""
        return self.imported.get(parameter) in HOMES and re.search("hvd|horovod", parameter, re.IGNORECASE) is not None

    def _is_fallback(self, node: ast.Name) -> bool:
        """Return whether ``node`` is a fallback for an import that fails or is not wanted.

        A fallback is assigned a constant or a module, or is assigned in an exception handler or in the ``else``
        of an ``if``. A name with an annotation and no value, as in ``hvd: Any``, counts too.
        """
        statement = next((above for above in self._above(node) if isinstance(above, ast.stmt | ast.NamedExpr)), None)
        if isinstance(statement, ast.AnnAssign):
            return True  # it has no value: ``normal_form.py`` turns those with a value into ast.Assign
        value = statement.value if isinstance(statement, ast.Assign | ast.NamedExpr) else None
        if value is not None and (isinstance(value, ast.Constant) or loaded_module(value)):
            return True
        if statement is not None and any(name == node.id for name, _ in self._copies_of(statement)):
            return True
        below: ast.AST = node
        for above in self._above(node):
            if isinstance(above, ast.ExceptHandler) or (isinstance(above, ast.If) and below in above.orelse):
                return True
            if isinstance(above, _SCOPE):
                return False
            below = above
        return False

    def _declared_in(self, declaration: ast.Global | ast.Nonlocal, module: ast.AST) -> ast.AST:
        """Return the scope of the declared names: the module for ``global``, the enclosing function for ``nonlocal``."""
        if isinstance(declaration, ast.Global):
            return module
        above = self._above(self._scope(declaration))
        return next((scope for scope in above if isinstance(scope, _FUNCTION)), module)

    def _scope(self, node: ast.AST) -> ast.AST:
        return next(self._scopes(node), node)

    def _scopes(self, node: ast.AST) -> Iterator[ast.AST]:
        return (above for above in self._above(node) if isinstance(above, _SCOPE))

    def _above(self, node: ast.AST) -> Iterator[ast.AST]:
        while (parent := self._parents.get(node)) is not None:
            yield parent
            node = parent


def _block(parent: ast.AST, child: ast.AST) -> list[ast.AST]:
    """Return the block of ``parent`` (its body, ``else`` or ``finally``) that contains ``child``, or an empty list."""
    blocks = (getattr(parent, name, None) for name in ("body", "orelse", "finalbody"))
    return next((block for block in blocks if isinstance(block, list) and child in block), [])


def _passed_names(call: ast.Call) -> Iterator[ast.Name]:
    return (value for value in given_values(call) if isinstance(value, ast.Name))


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[str]:
    arguments = function.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    return [one.arg for one in every if one is not None]
