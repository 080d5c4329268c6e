"""Values of a script that are ranks or the number of ranks: results of calls, variables and results of functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cached_property

from dualtrain.horovodize.nodes import arms, last_name, names_of_target
from dualtrain.horovodize.source import Function, Source

_RANKS = ("rank", "local_rank", "cross_rank")
_KINDS = (*_RANKS, "size")
#: Comparisons of a rank with a constant that separate rank 0 from all other ranks.
_FIRST_RANK = {(ast.Lt, "1"), (ast.LtE, "0"), (ast.Gt, "0"), (ast.GtE, "1")}


class RankKinds:
    """Kinds of the values of a script: rank, local rank, cross rank, or number of ranks."""

    def __init__(self, source: Source) -> None:
        self.source = source
        #: Kinds of variables, by their text; of functions' results, by (function, None); and of elements of tuples that
        #: functions return, by (function, position).
        self._kinds: dict[str | tuple[Function, int | None], str] = {}

    @classmethod
    def of(cls, source: Source) -> RankKinds:
        """Return the kinds of ``source``. They are computed once, because many rules need them."""
        return source.once(cls)

    def rank(self, value: ast.expr) -> str:
        """Return the kind of rank that ``value`` is (``rank``, ``local_rank``, ``cross_rank``), or an empty string."""
        kind = self.kind(value)
        return kind if kind in _RANKS else ""

    def kind(self, value: ast.expr, position: int | None = None) -> str:
        """Return which of ``_KINDS`` the ``value`` is, or its element at ``position``; return "" for other values."""
        if isinstance(value, ast.NamedExpr):  # (rank := hvd.rank())
            return self.kind(value.value, position)
        if isinstance(value, ast.IfExp):  # hvd.rank() if args.horovod else 0
            return _only(self.kind(arm, position) for arm in arms(value) if not _is_constant(arm))
        if isinstance(value, ast.Tuple) and position is not None:
            return self.kind(value.elts[position]) if position < len(value.elts) else ""
        if isinstance(value, ast.Call):
            name = self.source.hvd(value.func)
            return (name if name in _KINDS and position is None else "") or self._kind_of_result(value.func, position)
        if isinstance(value, ast.Name | ast.Attribute) and position is None:
            text = ast.unparse(value)
            if text not in self._kinds:
                self._kinds[text] = ""  # ends the recursion if the value depends on the variable itself
                self._kinds[text] = self._kind_of_variable(text)
            return self._kinds[text]
        return ""

    def _kind_of_variable(self, text: str) -> str:
        """Return which of ``_KINDS`` is assigned to a variable; "" if several are, or none.

        An element such as ``setup["rank"]`` counts as a rank. A copy of another variable counts only if the copy is an
        attribute, or if its name contains "rank".
        """
        kinds = set()
        for value, position in self._values.get(text, ()):
            if isinstance(value, ast.Subscript):
                key = str(value.slice.value) if isinstance(value.slice, ast.Constant) else ""
                kinds.add(key if key in _RANKS else "")
            elif not isinstance(value, ast.Name | ast.Attribute) or "." in text or "rank" in text.lower():
                kinds.add(self.kind(value, position))
        return _only(kinds - {""})

    @cached_property
    def _values(self) -> dict[str, list[tuple[ast.expr, int | None]]]:
        """Map of each variable to its values: (value, the variable's position if the target is a tuple, else None)."""
        found: dict[str, list[tuple[ast.expr, int | None]]] = {}
        for target, value, _ in self.source.assignments:
            names = names_of_target(target)
            for position, name in enumerate(names):
                found.setdefault(name, []).append((value, None if name == target else position))
        return found

    def _kind_of_result(self, called: ast.expr, position: int | None) -> str:
        """Return which of ``_KINDS`` a function of the program returns, or has at ``position`` of its tuple; else "".

        Constants and torch's ranks are ignored.
        """
        found = self.function(called)
        if found is None:
            return ""
        kinds, function = found
        if (function, position) not in kinds._kinds:
            kinds._kinds[function, position] = ""  # ends the recursion if the function calls itself
            ends = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
            results = [arm for end in ends for arm in arms(end)]
            if position is not None:
                tuples = (each.elts for each in results if isinstance(each, ast.Tuple))
                parts = [elements[position] for elements in tuples if position < len(elements)]
                results = parts if len(parts) == len(results) else []
            counted = [each for each in results if not _is_constant(each) and not kinds._is_of_torch(each)]
            kinds._kinds[function, position] = _only(map(kinds.kind, counted))
        return kinds._kinds[function, position]

    def _is_of_torch(self, value: ast.expr) -> bool:
        return isinstance(value, ast.Call) and self.source.name(value.func).startswith("torch.distributed.")

    def function(self, called: ast.expr) -> tuple[RankKinds, Function] | None:
        """Return the function of the program that ``called`` names, with the kinds of its file; None if it is unknown.

        Methods, and names that are defined several times or also assigned, are unknown. A function of another file is known
        only if no third file defines it, and if its name, or the module in ``module.name``, is imported.
        """
        name = last_name(called)
        if isinstance(called, ast.Name) and name in self.source.functions:
            return None if self.source.is_ambiguous(name) else (self, self.source.functions[name])
        root = called.value if isinstance(called, ast.Attribute) else called
        imported = self._imported
        if not isinstance(root, ast.Name) or not {root.id, "*"} & imported.keys() or root.id in self.source.values:
            return None
        if self.source.name(called).startswith(("torch.", "horovod.", "numpy.", "tensorflow.")):
            return None
        name = imported.get(name, name) if root is called else name
        files = [file for file in self.source.files if file is not self.source and name in file.functions]
        known = len(files) == 1 and not files[0].is_ambiguous(name)
        return (RankKinds.of(files[0]), files[0].functions[name]) if known else None

    @cached_property
    def _imported(self) -> dict[str, str]:
        """Map of the names that import statements define: name in the script → imported name."""
        imports = (node for node in self.source.nodes if isinstance(node, ast.Import | ast.ImportFrom))
        return {alias.asname or alias.name.partition(".")[0]: alias.name for node in imports for alias in node.names}

    def is_size(self, value: ast.expr) -> bool:
        """Return whether ``value`` is the number of ranks, or a variable that may hold it."""
        calls = (given for given in self.source.possible_values(value) if isinstance(given, ast.Call))
        return any(self.source.hvd(call.func) == "size" for call in calls) or self.kind(value) == "size"

    def separated_rank(self, test: ast.expr) -> str:
        """Return the one rank that ``test`` separates from all other ranks; "" if there is none.

        For example, return "0" for ``rank not in (-1, 0)``, and for ``rank < 1``.
        """
        if not isinstance(test, ast.Compare) or not self.rank(test.left):
            return ""
        constants = map(ast.unparse, self._constants(test.comparators[0]))
        ranks = [text for text in constants if text != "-1"]  # -1 is for runs without Horovod
        if len(ranks) != 1:
            return ""
        if isinstance(test.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn):
            return ranks[0]
        return "0" if (type(test.ops[0]), ranks[0]) in _FIRST_RANK else ""

    def _constants(self, value: ast.expr) -> list[ast.expr]:
        """Return the integer constants in ``value``: a constant, a constant variable, or a list, tuple or set of these."""
        parts = value.elts if isinstance(value, ast.List | ast.Tuple | ast.Set) else [value]
        known = [self.source.constant(part) or part if isinstance(part, ast.Name) else part for part in parts]
        return [part for part in known if re.fullmatch(r"-?\d+", ast.unparse(part))]


def _is_constant(value: ast.expr) -> bool:
    return isinstance(value.operand if isinstance(value, ast.UnaryOp) else value, ast.Constant)


def _only(kinds: Iterable[str]) -> str:
    """Return the only one of ``kinds``; "" if there are several, or none."""
    found = set(kinds)
    return found.pop() if len(found) == 1 else ""
