"""A script as the rules of ``--check`` see it: a syntax tree with resolved names. The script is never run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Literal, NamedTuple

from dualtrain.horovodize.names import PUBLIC

Level = Literal["differs", "trap", "unsupported"]
Function = ast.FunctionDef | ast.AsyncFunctionDef
#: A block of statements with its own names. Rules about the order of calls look at one scope at a time.
Scope = ast.Module | Function

_MODULES = ("mpi_ops", "functions", "optimizer", "compression", "sync_batch_norm", "process_sets")


class Finding(NamedTuple):
    """A rule's finding about one line."""

    line: int
    level: Level
    message: str


class Source:
    """Syntax tree of one script, with resolved imports.

    Args:
        text: source code of the script.
        wrapped: names of the optimizers that other files of the program wrap.

    Raises:
        SyntaxError: the text is not valid Python.
    """

    def __init__(self, text: str, wrapped: Iterable[str] = ()) -> None:
        self.tree = ast.parse(text)
        #: All nodes in source order.
        self.nodes = list(_in_order(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._imported = dict(self._imports())
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        #: Names of variables that hold an hvd.DistributedOptimizer: ``optimizer`` also for ``self.optimizer``.
        self.wrapped = {*self.own_wrapped, *wrapped}

    def _imports(self) -> Iterator[tuple[str, str]]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield (
                        alias.asname or alias.name.partition(".")[0],
                        (alias.name if alias.asname else alias.name.partition(".")[0]),
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    names = PUBLIC if alias.name == "*" and node.module == "horovod.torch" else [alias.name]
                    yield from ((alias.asname or name, f"{node.module}.{name}") for name in names)

    def name(self, node: ast.AST) -> str:
        """Resolve ``node`` by the imports to its full dotted name; return an empty string if it is not imported."""
        if isinstance(node, ast.Name):
            return self._imported.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.name(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def hvd(self, node: ast.AST) -> str:
        """Return the name of ``node`` in horovod.torch (``allreduce``, ``elastic.run``), or an empty string."""
        for root in ("horovod.torch.", "dualtrain.hvd."):
            full = self.name(node)
            if full.startswith(root):
                first, _, rest = full.removeprefix(root).partition(".")
                return rest if first in _MODULES and rest else f"{first}.{rest}".rstrip(".")
        return ""

    def hvd_calls(self, *names: str) -> Iterator[ast.Call]:
        """Return the calls of these functions of horovod.torch."""
        return (call for call in self.calls if self.hvd(call.func) in names)

    @property
    def uses_horovod(self) -> bool:
        """True if anything of horovod or dualtrain.hvd is imported."""
        return any(name.startswith(("horovod", "dualtrain.hvd")) for name in self._imported.values())

    @cached_property
    def assignments(self) -> list[tuple[str, ast.expr, ast.AST]]:
        """All assignments: (target as text, value, statement). Tuples are split into their elements."""
        found: list[tuple[str, ast.expr, ast.AST]] = []
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    found += [(ast.unparse(t), value, node) for t, value in _pairs(target, node.value)]
            elif isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
                found.append((ast.unparse(node.target), node.value, node))
        return found

    @cached_property
    def wraps(self) -> list[tuple[str, ast.Call]]:
        """Calls of hvd.DistributedOptimizer, each with the name of the variable that it is assigned to."""
        return [
            (target.rpartition(".")[2], value)
            for target, value, _ in self.assignments
            if isinstance(value, ast.Call) and self.hvd(value.func) == "DistributedOptimizer"
        ]

    @property
    def own_wrapped(self) -> set[str]:
        """Names of the optimizers that this file wraps."""
        return {name for name, _ in self.wraps}

    @cached_property
    def functions(self) -> dict[str, Function]:
        """Functions and methods of the script by name."""
        return {node.name: node for node in self.nodes if isinstance(node, Function)}

    def scopes(self) -> Iterator[tuple[Scope, list[ast.AST]]]:
        """Yield the module and every function, each with its own nodes in source order."""
        own: dict[ast.AST, list[ast.AST]] = {node: [] for node in self.nodes if isinstance(node, Scope)}
        for node in self.nodes[1:]:
            own[self.scope(node)].append(node)
        yield from ((scope, nodes) for scope, nodes in own.items() if isinstance(scope, Scope))

    def scope(self, node: ast.AST) -> Scope:
        """Return the innermost function, or else the module, that contains ``node``."""
        return next(above for above in self.above(node) if isinstance(above, Scope))

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that contain ``node``, from the innermost to the outermost."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def exclusive(self, one: ast.AST, other: ast.AST) -> bool:
        """Return whether the two nodes are in different branches of one ``if``."""
        arms = {above: _arm(above, below) for above, below in self._steps(one)}
        return any(above in arms and arms[above] != _arm(above, below) for above, below in self._steps(other))

    def _steps(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        below = node
        for above in self.above(node):
            if isinstance(above, ast.If | ast.IfExp) and below is not above.test:
                yield above, below
            below = above


def last_name(node: ast.AST) -> str:
    """Return "optimizer" for ``optimizer`` and ``self.optimizer``, an empty string for anything but a name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return the keyword argument ``name`` of ``call``, or None."""
    return next((word.value for word in call.keywords if word.arg == name), None)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def _arm(branch: ast.AST, below: ast.AST) -> bool:
    body = getattr(branch, "body", None)
    return below in body if isinstance(body, list) else below is body


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, other in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, other)
    else:
        yield target, value
