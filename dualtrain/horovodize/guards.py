"""Conditions that decide where the code of a script runs: on some ranks only, or only without Horovod."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property

from dualtrain.horovodize.horovod_use import HorovodUse
from dualtrain.horovodize.nodes import is_stored, last_name, names_in
from dualtrain.horovodize.rank_kinds import RankKinds
from dualtrain.horovodize.source import Function, Source

#: Matches names that scripts use for conditions that are true on one rank. Does not match ``root_rank=0``, an argument of
#: broadcasts.
_ONE_RANK = re.compile(
    r"(?<!root_)rank|rank(?!=)|master|main_?proc|is_?main|chief|primary|leader|is_?root|verbose|coordinator", re.IGNORECASE
)
_EXITS = ("sys.exit", "os._exit", "exit", "quit")
_LOOPS = ast.While | ast.For
#: Nodes whose parts may be skipped or repeated, besides ``if`` statements.
_CONDITIONAL = ast.ExceptHandler | ast.Try | ast.TryStar | ast.match_case | ast.IfExp | ast.BoolOp | _LOOPS


class Guards:
    """Conditions on the rank, and on whether Horovod is used."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.kinds = RankKinds.of(source)
        #: Values that conditions have in runs with Horovod on several ranks.
        self.use = HorovodUse(source, lambda test: self.signature(test) is not None)
        self._conditions_of: dict[ast.stmt, list[tuple[ast.expr, bool]]] = {}
        #: Results of :meth:`names_one_rank`.
        self._one_rank: dict[tuple[ast.expr, int], bool] = {}
        self._comparisons = {target: value for target, value, _ in source.assignments if self.kinds.separated_rank(value)}

    @classmethod
    def of(cls, source: Source) -> Guards:
        """Return the guards of ``source``. They are computed once, because all rules need them."""
        return source.once(cls)

    def is_in_same_rank_branch(self, node: ast.AST, other: ast.AST) -> bool:
        """Return whether both nodes are in the same branch of a condition on the rank, and so run on the same ranks."""
        mine, others = list(self._conditions(node)), list(self._conditions(other))
        return any(test is one and truth is value for test, truth in mine for one, value in others if self.signature(test))

    def is_decided(self, branch: ast.AST, comparison: str) -> bool:
        """Return whether an ``if`` around ``branch`` in its function makes this comparison or its opposite.

        ``comparison`` is the second element of a :meth:`signature`.
        """
        scope = self.source.scope(branch)
        around = [above.test for above in self.source.around(branch, ast.If) if self.source.scope(above) is scope]
        return any((known := self.signature(test)) and known[1] == comparison for test in around)

    def signature(self, test: ast.expr, depth: int = 0) -> tuple[bool, str] | None:
        """Return a normal form of ``test``: whether it is true on one rank only, and its comparison, as in "rank == 0".

        The comparison also contains the other operands of ``and``: "rank == 0 and verbose". Return None if ``test`` does
        not certainly separate one rank from all others. Two conditions are opposites if their comparisons are equal and the
        first elements differ.
        """
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.signature(test.operand, depth)
            return inner and (not inner[0], inner[1])
        if depth > 4:
            return None
        if isinstance(test, ast.NamedExpr):
            return self.signature(test.value, depth)
        if isinstance(test, ast.IfExp):
            if self.use.is_known(test.test):  # rank == 0 if args.horovod else True
                return self.signature(test.orelse if self.use.is_off(test.test, True) else test.body, depth + 1)
            # True if rank == 0 else False
            arms = [part.value if isinstance(part, ast.Constant) else None for part in (test.body, test.orelse)]
            inner = self.signature(test.test, depth + 1) if arms in ([True, False], [False, True]) else None
            return inner and (inner[0] is arms[0], inner[1])
        if isinstance(test, ast.BoolOp):
            return self._signature_of_operands(test, depth)
        if isinstance(test, ast.Compare) and (inner := self._signature_of_none(test, depth)):
            return inner
        if isinstance(test, ast.Name | ast.Attribute):
            text = ast.unparse(test)
            values = self.source.values.get(text, [])
            test = self._comparisons.get(text, test)
            if len(values) == 1 and isinstance(values[0], ast.UnaryOp | ast.IfExp | ast.Name | ast.BoolOp | ast.Call):
                return self.signature(values[0], depth + 1)
        if isinstance(test, ast.Compare) and (rank := self.kinds.separated_rank(test)):
            holds = isinstance(test.ops[0], ast.Eq | ast.Is | ast.In | ast.Lt | ast.LtE)
            return holds, f"{self.kinds.rank(test.left)} == {rank}"
        if self.kinds.rank(test):
            return False, f"{self.kinds.rank(test)} == 0"
        guards, returned = self._returned_test(test) or (self, None)
        return guards.signature(returned, depth + 1) if returned is not None else None

    def _signature_of_none(self, test: ast.Compare, depth: int) -> tuple[bool, str] | None:
        """Return the :meth:`signature` of ``x is None`` or ``x is not None``.

        Return None unless ``x`` has a single assignment, and this is like ``x = open() if rank == 0 else None``.
        """
        values = self.source.values.get(ast.unparse(test.left), [])
        is_none = isinstance(test.ops[0], ast.Is)
        if not (is_none or isinstance(test.ops[0], ast.IsNot)) or ast.unparse(test.comparators[0]) != "None":
            return None
        stores = list(filter(is_stored, self.source.mentions.get(last_name(test.left), ())))
        if len(values) != 1 or not isinstance(values[0], ast.IfExp) or len(stores) > 1:
            return None
        if not self._is_assigned_variable(test.left, self.source.statement(values[0])):
            return None
        nones = [ast.unparse(arm) == "None" for arm in (values[0].body, values[0].orelse)]
        inner = self.signature(values[0].test, depth + 1)
        if inner is None or nones[0] is nones[1]:
            return None
        return inner[0] is (nones[0] is is_none), inner[1]

    def _is_assigned_variable(self, variable: ast.expr, assignment: ast.stmt) -> bool:
        """Return whether ``variable`` is certainly the one of ``assignment``, and not another one of the same name.

        An attribute of ``self`` must be of the same class.
        """
        text = ast.unparse(variable)
        if text.startswith("self."):
            one, other = (next(self.source.around(node, ast.ClassDef), None) for node in (variable, assignment))
            return one is other
        # Parameters, and names bound by ``import``, ``except``, ``case`` and ``def``.
        binding = (node for node in self.source.nodes if not isinstance(node, ast.keyword))
        bound = {getattr(node, each, None) for node in binding for each in ("arg", "asname", "name", "rest")}
        return text not in bound and self.source.scope(assignment) in self.source.above(variable)

    def _signature_of_operands(self, test: ast.BoolOp, depth: int) -> tuple[bool, str] | None:
        if isinstance(test.op, ast.Or):  # not args.horovod or rank == 0
            parts = [value for value in test.values if not self.use.is_off(value, True)]
            return self.signature(parts[0], depth) if len(parts) == 1 else None
        found = [part for value in test.values if (part := self.signature(value, depth))]
        others = sorted(ast.unparse(value) for value in test.values if self.signature(value, depth) is None)
        return (found[0][0], " and ".join([found[0][1], *others])) if found else None

    def _returned_test(self, value: ast.expr) -> tuple[Guards, ast.expr] | None:
        """Return the expression that ``is_main()``, ``self.is_main()`` or a property returns under Horovod, or None.

        Return the guards of the file that defines the function, too: it may be a different file.
        """
        called = value.func if isinstance(value, ast.Call) else value
        if isinstance(value, ast.Call) and (value.args or value.keywords):
            return None
        guards, function = self._tested_function(value, called) or (self, None)
        ends = [node for node in ast.walk(function) if isinstance(node, ast.Return)] if function is not None else []
        ends = [end for end in ends if not guards.is_without_horovod(end)]
        return (guards, ends[0].value) if len(ends) == 1 and ends[0].value is not None else None

    def _tested_function(self, value: ast.expr, called: ast.expr) -> tuple[Guards, Function] | None:
        """Return the function or property that is certainly evaluated for ``value``, and its file's guards; else None."""
        function = self.source.functions.get(last_name(called))
        if function is None:
            found = self.kinds.function(called) if isinstance(value, ast.Call) else None
            return found and (Guards.of(found[0].source), found[1])
        if not self.source.is_only(function.name) or not isinstance(called, ast.Name | ast.Attribute):
            return None
        is_property = any(last_name(each) in ("property", "cached_property") for each in function.decorator_list)
        around = self.source.parents[function]
        if is_property is isinstance(value, ast.Call) or isinstance(around, ast.ClassDef) is isinstance(called, ast.Name):
            return None
        if isinstance(called, ast.Attribute) and not self._belongs_to(called, around):
            return None
        return self, function

    def _belongs_to(self, attribute: ast.Attribute, cls: ast.AST) -> bool:
        """Return whether ``attribute`` most likely belongs to an object of the script's class ``cls``."""
        if ast.unparse(attribute) in self.source.values:
            return False
        if ast.unparse(attribute.value) in ("self", "cls") or self.source.is_instance(attribute.value, cls):
            return True
        only = sum(attribute.attr in file.functions for file in self.source.files) == 1
        return only and self._gets_object(attribute.value, cls)

    def _gets_object(self, parameter: ast.expr, cls: ast.AST) -> bool:
        """Return whether ``parameter`` is a parameter of a function, and gets objects of the script's class ``cls``.

        That is so if the parameter's annotation says so, or if all calls of functions with the function's name pass such an
        object, or ``self`` from a method of ``cls``.
        """
        function, name = self.source.scope(parameter), last_name(parameter)
        if not isinstance(function, Function) or name not in self.source.parameters(parameter):
            return False
        annotation = next(
            each for each in ast.walk(function.args) if isinstance(each, ast.arg) and each.arg == name
        ).annotation
        if annotation is not None:
            return getattr(cls, "name", "") in re.findall(r"\w+", ast.unparse(annotation))
        calls = [call for call in self.source.calls if last_name(call.func) == function.name]
        given = [self.source.argument(function, call, name) for call in calls]
        return bool(given) and all(value is not None and self._is_object(value, cls) for value in given)

    def _is_object(self, value: ast.expr, cls: ast.AST) -> bool:
        own = ast.unparse(value) == "self" and next(self.source.around(value, ast.ClassDef), None) is cls
        return own or self.source.is_instance(value, cls)

    def is_on_some_ranks(self, node: ast.AST) -> bool:
        """Return whether ``node`` runs on one rank only, or on all except one, because of a condition in its function."""
        scope = self.source.scope(node)
        return any(
            self.signature(test) is not None for test, _ in self._conditions(node) if self.source.scope(test) is scope
        )

    def looks_like_one_rank(self, node: ast.AST, depth: int = 0) -> bool:
        """Return whether ``node`` perhaps runs on some ranks only.

        That is so if a condition around ``node``, or the condition of an earlier exit, depends on the rank or contains a
        word such as rank. The values of the variables in this condition, and the conditions around their assignments, are
        checked in the same way.
        """
        return any(self.names_one_rank(test, depth) for test, _ in self._conditions(node))

    def names_one_rank(self, test: ast.expr, depth: int = 0) -> bool:
        """Return whether the condition ``test`` is perhaps true on some ranks only, as in :meth:`looks_like_one_rank`."""
        if (test, depth) not in self._one_rank:
            assigned = [each for name in names_in(test) for each in self._assigned.get(name, ())] if depth < 2 else []
            named = _ONE_RANK.search(ast.unparse(test)) is not None or self.signature(test) is not None
            self._one_rank[test, depth] = named or any(
                self.names_one_rank(value, depth + 1) or self.looks_like_one_rank(at, depth + 1) for value, at in assigned
            )
        return self._one_rank[test, depth]

    @cached_property
    def _assigned(self) -> dict[str, list[tuple[ast.expr, ast.stmt]]]:
        """Map of each target of assignments, as text, to its values and statements."""
        found: dict[str, list[tuple[ast.expr, ast.stmt]]] = {}
        for target, value, at in self.source.assignments:
            found.setdefault(target, []).append((value, at))
        return found

    def tests(self, node: ast.AST) -> list[ast.expr]:
        """Return the conditions that decide whether ``node`` runs: those around it, and those of earlier exits."""
        return [test for test, _ in self._conditions(node)]

    def is_conditional(self, node: ast.AST) -> bool:
        """Return whether ``node`` may be skipped or repeated, by a condition, a case, a loop or a ``try``.

        A test of ``__name__`` does not count. An earlier exit counts only if it is taken only without Horovod or with one
        rank.
        """
        for above in self.source.above(node):
            if isinstance(above, ast.If) and "__name__" not in ast.unparse(above.test):
                return True
            if isinstance(above, _CONDITIONAL):
                return True
        # An earlier exit that is taken without Horovod is a condition too: without Horovod, the node is skipped.
        return any(self.use.is_off(test, not truth) for test, truth in self._conditions(node))

    # -- without Horovod --------------------------------------------------------------------------------------------

    def is_without_horovod(self, node: ast.AST) -> bool:
        """Return whether ``node`` runs only without Horovod or with one rank."""
        return self._excludes_init(node) or any(self.use.is_off(test, truth) for test, truth in self._conditions(node))

    def _excludes_init(self, node: ast.AST) -> bool:
        inits = self.source.hvd_calls("init")
        return bool(inits) and all(self.source.exclusive(node, init) for init in inits)

    def lines_without_horovod(self) -> set[int]:
        """Return the lines that run only without Horovod or with one rank, or never."""
        return set(self._lines_off(self.source.tree.body))

    def _lines_off(self, block: list[ast.stmt]) -> Iterator[int]:
        off = False  # whether an earlier statement exits in all runs with Horovod
        for statement in block:
            if off:
                yield from _lines(statement)
            elif isinstance(statement, ast.If):
                for arm, truth in ((statement.body, True), (statement.orelse, False)):
                    is_off = self.use.is_off(statement.test, truth) or (bool(arm) and self._excludes_init(arm[0]))
                    yield from (line for inner in arm for line in _lines(inner)) if is_off else self._lines_off(arm)
                leaving = [
                    truth for arm, truth in ((statement.body, True), (statement.orelse, False)) if arm and self.leaves(arm)
                ]
                off = any(self.use.is_off(statement.test, not truth) for truth in leaving)
            else:
                yield from (line for inner in _blocks(statement) for line in self._lines_off(inner))
            off = off or self.leaves([statement])

    def runs_whenever(self, node: ast.AST, other: ast.AST) -> bool:
        """Return whether every run with Horovod that reaches ``other`` also reaches ``node``, if it enters all loops.

        Both nodes must be in one function, or ``other`` must be the function or module that contains ``node``.
        """
        around, shared = list(self.source.above(other)), list(self._conditions(other))
        for above in self.source.above(node):
            if isinstance(above, ast.ExceptHandler | ast.match_case) and above not in around:
                return False
        return all(
            self.use.is_off(test, not truth) or any(test is one and truth is value for one, value in shared)
            for test, truth in self._conditions(node)
            if ast.unparse(test) != "__name__ == '__main__'"
        )

    def _conditions(self, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
        """Yield each condition that decides whether ``node`` runs, and the value that the condition must have.

        Conditions of loops, and of cases in ``match``, are left out.
        """
        below = node
        for above in self.source.above(node):
            if isinstance(below, ast.stmt):
                yield from self._conditions_of_statement(below)
                return
            if isinstance(above, ast.If | ast.IfExp) and below is not above.test:
                body = above.body if isinstance(above.body, list) else [above.body]
                yield above.test, below in body
            elif isinstance(above, ast.BoolOp) and isinstance(below, ast.expr):  # rank == 0 and save()
                earlier = above.values[: above.values.index(below)]
                yield from ((value, isinstance(above.op, ast.And)) for value in earlier)
            below = above

    def _conditions_of_statement(self, statement: ast.stmt) -> list[tuple[ast.expr, bool]]:
        if statement not in self._conditions_of:
            above, block = self.source.parents[statement], self.source.block(statement)
            found = [(above.test, statement in above.body)] if isinstance(above, ast.If) else []
            found += [*self._exits(block[: block.index(statement)]), *self._conditions(above)]
            self._conditions_of[statement] = found
        return self._conditions_of[statement]

    def _exits(self, block: list[ast.stmt]) -> Iterator[tuple[ast.expr, bool]]:
        """Yield each condition of an exit in ``block``, and the value with which the code after the exit runs."""
        for statement in block:
            if isinstance(statement, ast.If) and self.leaves(statement.body):
                yield statement.test, False
            elif isinstance(statement, ast.If) and statement.orelse and self.leaves(statement.orelse):
                yield statement.test, True
            elif isinstance(statement, ast.If) and self.use.is_off(statement.test, False):
                yield from self._exits(statement.body)  # all runs with Horovod run this branch

    def leaves(self, block: list[ast.stmt]) -> bool:
        """Return whether the statement after ``block`` never runs, because ``block`` ends with an exit or a jump."""
        last = block[-1]
        if isinstance(last, ast.If):
            return bool(last.orelse) and self.leaves(last.body) and self.leaves(last.orelse)
        if isinstance(last, ast.With):
            return self.leaves(last.body) and not any("suppress" in ast.unparse(item) for item in last.items)
        exits = isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and ast.unparse(last.value.func) in _EXITS
        return exits or isinstance(last, ast.Return | ast.Raise | ast.Continue | ast.Break)


def _lines(statement: ast.stmt) -> range:
    return range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the blocks directly in ``node``, including those of exception handlers and cases."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield from _blocks(part)
