"""The rule on collectives that only some ranks call."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from dualtrain.horovodize.names import COLLECTIVES
from dualtrain.horovodize.source import Finding, Function, Source, keyword, last_name

_RANKS = ("rank", "local_rank", "cross_rank")
_LEAVING = ast.Return | ast.Continue | ast.Break | ast.Raise


def collective_on_some_ranks(source: Source) -> Iterator[Finding]:
    """A collective behind a condition on the rank."""
    look = _Collectives(source)
    for branch in source.nodes:
        if not isinstance(branch, ast.If | ast.IfExp) or not look.depends_on_rank(branch.test):
            continue
        body = branch.body if isinstance(branch.body, list) else [branch.body]
        other = branch.orelse if isinstance(branch.orelse, list) else [branch.orelse]
        if isinstance(branch, ast.If) and isinstance(body[-1], _LEAVING):
            other = [*other, *look.behind(branch)]
        here, there = list(look.inside(body)), list(look.inside(other))
        for calls, opposite in ((here, there), (there, here)):
            matched = {name for name, _ in opposite}
            for name, call in calls:
                if name not in matched:
                    message = f"only some ranks call {name}(), and they wait for the others; call it outside the condition"
                    yield Finding(call.lineno, "trap", message)


class _Collectives:
    """Finder of calls that all ranks must make: Horovod's, steps of wrapped optimizers, functions that contain these."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.own: set[str] = set()
        for _ in range(4):  # nested calls, four levels deep
            self.own |= {name for name, function in source.functions.items() if self._contains(function)}
        self._ranks: set[str] = set()
        self._ranks = {target for target, value, _ in source.assignments if self._is_rank(value)}
        self._firsts = {target for target, value, _ in source.assignments if self._compares(value)}

    def depends_on_rank(self, test: ast.expr) -> bool:
        """Return whether ``test`` is true on one rank only, or on all but one."""
        if isinstance(test, ast.BoolOp):
            return isinstance(test.op, ast.And) and any(self.depends_on_rank(value) for value in test.values)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._is_rank(test.operand) or self.depends_on_rank(test.operand)
        return self._compares(test) or ast.unparse(test) in self._firsts or self._is_rank(test)

    def inside(self, nodes: Sequence[ast.AST]) -> Iterator[tuple[str, ast.Call]]:
        """Yield the collective calls in ``nodes``, except inside functions that are only defined there."""
        for node in nodes:
            if isinstance(node, Function | ast.Lambda | ast.ClassDef):
                continue
            if isinstance(node, ast.Call) and (name := self._collective(node)):
                yield name, node
            yield from self.inside(list(ast.iter_child_nodes(node)))

    def behind(self, branch: ast.If) -> list[ast.stmt]:
        """Return the statements after ``branch`` in its block."""
        parent = self.source.parents[branch]
        for block in (getattr(parent, "body", None), getattr(parent, "orelse", None)):
            if isinstance(block, list) and branch in block:
                return block[block.index(branch) + 1 :]
        return []

    def _collective(self, call: ast.Call) -> str:
        name, called = self.source.hvd(call.func), last_name(call.func)
        if name in COLLECTIVES:
            return name if keyword(call, "process_set") is None else ""
        if isinstance(call.func, ast.Name) and called in self.own:
            return called
        stepping = isinstance(call.func, ast.Attribute) and last_name(call.func.value) in self.source.wrapped
        return called if stepping and called in ("step", "synchronize") else ""

    def _contains(self, function: Function) -> bool:
        return any(True for _ in self.inside(function.body))

    def _compares(self, test: ast.expr) -> bool:
        if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq | ast.NotEq | ast.Gt):
            return False
        return self._is_rank(test.left) and isinstance(test.comparators[0], ast.Constant)

    def _is_rank(self, value: ast.expr) -> bool:
        return ast.unparse(value) in self._ranks or (isinstance(value, ast.Call) and self.source.hvd(value.func) in _RANKS)
