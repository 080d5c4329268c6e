"""A script as the rules of ``--check`` look at it: a syntax tree whose names are known. It is never run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Literal, NamedTuple

from dualtrain.horovodize.names import PUBLIC

Level = Literal["differs", "trap", "unsupported"]
Function = ast.FunctionDef | ast.AsyncFunctionDef
#: What has statements of its own, and names: a rule on the order of calls looks at one at a time.
Scope = ast.Module | Function

_MODULES = ("mpi_ops", "functions", "optimizer", "compression", "sync_batch_norm", "process_sets")


class Finding(NamedTuple):
    """Something a rule has to say about a line."""

    line: int
    level: Level
    message: str


class Source:
    """One script.

    Args:
        text: its source.
        wrapped: names under which other files of the program wrap optimizers.

    Raises:
        SyntaxError: it is no Python.
    """

    def __init__(self, text: str, wrapped: Iterable[str] = ()) -> None:
        self.tree = ast.parse(text)
        #: All nodes, in the order of the text.
        self.nodes = list(_in_order(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._imported = dict(self._imports())
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        #: Last names of what holds an hvd.DistributedOptimizer: ``optimizer`` for ``self.optimizer`` too.
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
        """The full dotted name that ``node`` stands for by the imports, or nothing."""
        if isinstance(node, ast.Name):
            return self._imported.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.name(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def hvd(self, node: ast.AST) -> str:
        """What ``node`` is called in horovod.torch (``allreduce``, ``elastic.run``), or nothing."""
        for root in ("horovod.torch.", "dualtrain.hvd."):
            full = self.name(node)
            if full.startswith(root):
                first, _, rest = full.removeprefix(root).partition(".")
                return rest if first in _MODULES and rest else f"{first}.{rest}".rstrip(".")
        return ""

    def hvd_calls(self, *names: str) -> Iterator[ast.Call]:
        """The calls of these functions of horovod.torch."""
        return (call for call in self.calls if self.hvd(call.func) in names)

    @property
    def uses_horovod(self) -> bool:
        """Whether anything of horovod, or of its stand-in, is imported."""
        return any(name.startswith(("horovod", "dualtrain.hvd")) for name in self._imported.values())

    @cached_property
    def assignments(self) -> list[tuple[str, ast.expr, ast.AST]]:
        """Everything that is assigned: the target's text, the value, the statement. Tuples are taken apart."""
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
        """The calls of hvd.DistributedOptimizer, each with the last name of what it is assigned to."""
        return [
            (target.rpartition(".")[2], value)
            for target, value, _ in self.assignments
            if isinstance(value, ast.Call) and self.hvd(value.func) == "DistributedOptimizer"
        ]

    @property
    def own_wrapped(self) -> set[str]:
        """The names under which this file wraps optimizers."""
        return {name for name, _ in self.wraps}

    @cached_property
    def functions(self) -> dict[str, Function]:
        """The functions and methods of the script, by name."""
        return {node.name: node for node in self.nodes if isinstance(node, Function)}

    def scopes(self) -> Iterator[tuple[Scope, list[ast.AST]]]:
        """The module and every function, each with its own nodes in the order of the text."""
        own: dict[ast.AST, list[ast.AST]] = {node: [] for node in self.nodes if isinstance(node, Scope)}
        for node in self.nodes[1:]:
            own[self.scope(node)].append(node)
        yield from ((scope, nodes) for scope, nodes in own.items() if isinstance(scope, Scope))

    def scope(self, node: ast.AST) -> Scope:
        """The function, or else the module, that ``node`` stands in."""
        return next(above for above in self.above(node) if isinstance(above, Scope))

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """What contains ``node``, from the inside out."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def exclusive(self, one: ast.AST, other: ast.AST) -> bool:
        """Whether the two stand in different branches of one ``if``."""
        arms = {above: _arm(above, below) for above, below in self._steps(one)}
        return any(above in arms and arms[above] != _arm(above, below) for above, below in self._steps(other))

    def _steps(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        below = node
        for above in self.above(node):
            if isinstance(above, ast.If | ast.IfExp) and below is not above.test:
                yield above, below
            below = above


def last_name(node: ast.AST) -> str:
    """``optimizer`` for ``optimizer`` and ``self.optimizer``; nothing for what is no name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The argument that ``call`` passes by this name."""
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
