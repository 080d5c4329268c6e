"""Values of a script's conditions in runs with Horovod on several ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

from dualtrain.horovodize.rank_kinds import RankKinds
from dualtrain.horovodize.source import Source

_HOROVOD = re.compile(r"horovod|hvd", re.IGNORECASE)
_NO_HOROVOD = re.compile(r"(^|[._])(no|not|disable|without|skip)_?(horovod|hvd)", re.IGNORECASE)
#: Comparisons of the number of ranks with a constant, and their values if there are several ranks.
_SEVERAL: dict[tuple[type[ast.cmpop], Any], bool] = {
    (ast.Gt, 1): True,
    (ast.GtE, 2): True,
    (ast.NotEq, 1): True,
    (ast.Eq, 1): False,
    (ast.LtE, 1): False,
}


class HorovodUse:
    """Conditions that have one and the same value in all runs with Horovod on several ranks, such as ``args.horovod``.

    Args:
        source: the script.
        depends_on_rank: returns whether a condition depends on the rank.
    """

    def __init__(self, source: Source, depends_on_rank: Callable[[ast.expr], bool]) -> None:
        self.source = source
        self.kinds = RankKinds.of(source)
        self._depends_on_rank = depends_on_rank

    def is_known(self, test: ast.expr) -> bool:
        """Return whether ``test`` certainly has one and the same value in all runs with Horovod on several ranks."""
        return self.is_off(test, True) or self.is_off(test, False)

    def is_off(self, test: ast.expr, truth: bool, depth: int = 0) -> bool:
        """Return whether Horovod is off (not used, or used with one rank) in all runs in which ``test`` is ``truth``.

        Also return True if ``test`` never has this value.
        """
        if isinstance(test, ast.Constant):
            return bool(test.value) is not truth
        if isinstance(test, ast.NamedExpr):
            return self.is_off(test.value, truth, depth)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.is_off(test.operand, not truth, depth)
        if isinstance(test, ast.BoolOp):
            parts = [self.is_off(value, truth, depth) for value in test.values]
            return any(parts) if isinstance(test.op, ast.And) is truth else all(parts)
        value = self._value_with_horovod(test, depth)
        return value is not None and value is not truth

    def _value_with_horovod(self, test: ast.expr, depth: int = 0) -> bool | None:
        """Return the value of ``test`` when Horovod is used with several ranks; None if unknown."""
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._compared(test.left, test.ops[0], test.comparators[0])
        if self.kinds.rank(test) or not isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            return None
        text = ast.unparse(test)
        if text in self._conditions_of_use:
            return True
        values = self.source.values.get(text, [])
        if len(values) == 1 and depth < 3 and (known := self._value_with_horovod(values[0], depth + 1)) is not None:
            return known
        if isinstance(test, ast.Call):
            if depth < 3 and (known := self._result_with_horovod(test, depth + 1)) is not None:
                return known
            called = self.source.hvd(test.func)
            name = ast.unparse(test.func).rpartition(".")[2]
            return True if called == "is_initialized" or (not called and _HOROVOD.search(name)) else None
        return not _NO_HOROVOD.search(text) if _HOROVOD.search(text) else None

    def _result_with_horovod(self, call: ast.Call, depth: int) -> bool | None:
        """Return the truth value of the result of ``call`` when Horovod is used with several ranks; None if unknown.

        Only calls of the script's functions with a single ``return`` are known.
        """
        function = self.source.functions.get(call.func.id) if isinstance(call.func, ast.Name) else None
        if function is None or self.source.is_ambiguous(function.name):
            return None
        ends = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        if len(ends) != 1 or ends[0] is None:
            return None
        return True if self.is_off(ends[0], False, depth) else False if self.is_off(ends[0], True, depth) else None

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool | None:
        """Return the value of a comparison when Horovod is used with several ranks; None if unknown."""
        if not isinstance(right, ast.Constant):
            return None
        if self.kinds.is_size(left):
            return _SEVERAL.get((type(op), right.value))
        same = isinstance(op, ast.Eq | ast.Is)
        if not same and not isinstance(op, ast.NotEq | ast.IsNot):
            return None
        values = self.source.values.get(ast.unparse(left), [])
        of_torch = [isinstance(one, ast.Call) and self.source.name(one.func) == "torch.device" for one in values]
        if isinstance(right.value, str) and values and all(of_torch):
            return not same  # torch.device("cuda") == "cuda" is False
        if isinstance(right.value, str) and _HOROVOD.search(right.value):
            return same
        if (right.value is None or isinstance(right.value, bool)) and _HOROVOD.search(ast.unparse(left)):
            return same if right.value else not same
        return None

    @cached_property
    def _conditions_of_use(self) -> set[str]:
        """Conditions under which the script calls ``init`` or wraps an optimizer; if one is false, Horovod is not used."""
        found = self.__dict__["_conditions_of_use"] = set[str]()  # _depends_on_rank() may read the set while it is computed
        for call in self.source.hvd_calls("init", "DistributedOptimizer"):
            below: ast.AST = call
            for above in self.source.above(call):
                if isinstance(above, ast.If | ast.IfExp) and isinstance(above.test, ast.Name | ast.Attribute):
                    body = above.body if isinstance(above.body, list) else [above.body]
                    if below in body and not self._depends_on_rank(above.test):
                        found.add(ast.unparse(above.test))
                below = above
        return found
