"""Detect code that may give the ranks different samples."""

from __future__ import annotations

import ast
import re
from copy import deepcopy

from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.nodes import calls_in, last_name, names_in
from dualtrain.horovodize.rules.seeds import seeds_torch
from dualtrain.horovodize.source import Function, Scope, Source

#: Words in code that gives each rank its part of the data.
SHARDED = re.compile(
    r"rank|size\(|shard|petastorm|make_batch_reader|make_reader|partition|world|(?<!co)mpi|chunk|scatter|\bcomm\b",
    re.IGNORECASE,
)
#: Words for data that each process generates itself, such as a replay buffer.
_MADE_BY_RANK = re.compile(
    r"rollout|collect(?!ions)|replay|(?<!from)buffer|(?<!in)memory|episode|trajector|simulat|self_?play|\benv\b",
    re.IGNORECASE,
)
#: Names of functions and methods that draw random numbers.
_DRAWS = ("rand", "randn", "randint", "normal", "uniform", "random")


_PARSES = re.compile(r"parse_(known_)?args$")
#: Names of parameters whose attributes are settings.
_SETTINGS = re.compile(r"(args?|cfg|conf|config|flags|hparams|hp|opts?|options|params)$", re.IGNORECASE)


def is_made_by_rank(source: Source, data: ast.expr, depth: int = 0) -> bool:
    """Return whether each process may make ``data`` itself: by random numbers without a seed, or by rollouts."""
    draws = [call for call in calls_in(data) if last_name(call.func) in _DRAWS]
    unseeded = any("manual_seed(" not in ast.unparse(call) for call in draws) and not any(map(seeds_torch, source.files))
    if unseeded or _MADE_BY_RANK.search(ast.unparse(data)):
        return True
    return depth < 4 and any(is_made_by_rank(source, value, depth + 1) for value in _definitions(source, data))


def _definitions(source: Source, data: ast.expr) -> list[ast.expr]:
    """Return the values that the script assigns to the names in ``data``, also as elements of tuples.

    Leave out parsed command lines, which are equal on all ranks: the help text of an option may contain the word rank.
    """
    names = names_in(data)
    found = [value for target, value, _ in source.assignments if names & set(re.split(r",\s*|[()]", target))]
    return [value for value in found if not any(_PARSES.match(last_name(call.func)) for call in calls_in(value))]


def is_sharded(source: Source, data: ast.expr, depth: int = 0) -> bool:
    """Return whether ``data`` may depend on the rank.

    That is so in these cases:

    - ``data``, or an expression that defines or changes it, contains a word such as rank.
    - A function or class of the script makes ``data``, and contains a slice such as ``[rank::size]``.
    - ``data`` contains a parameter of a function, or an attribute of ``self`` that the script does not assign: their values
      are unknown. A parameter such as ``args``, in ``args.folder``, counts only if the program may replace the attribute.
    """
    selecting = _without_download(data)
    if SHARDED.search(ast.unparse(selecting)):
        return True
    parts = [node for node in ast.walk(selecting) if isinstance(node, ast.Attribute | ast.Subscript)]
    for name in names_in(selecting):
        settings = {ast.unparse(part) for part in parts if ast.unparse(part.value) == name}
        if settings and _SETTINGS.match(name):  # args, in args.folder
            if _may_be_replaced(source, name, settings):
                return True
        elif _is_unknown(source, data, name) or _is_changed_by_rank(source, name):
            return True
    if any(_is_split_inside(source, call) for call in calls_in(selecting)):
        return True
    return depth < 4 and any(is_sharded(source, value, depth + 1) for value in _definitions(source, selecting))


def _is_unknown(source: Source, data: ast.expr, name: str) -> bool:
    """Return whether ``name`` in ``data`` is a parameter, or an attribute of ``self`` that the script does not assign."""
    first, *rest = name.split(".")
    if first in ("self", "cls"):
        return bool(rest) and f"{first}.{rest[0]}" not in source.values
    scope: Scope = source.scope(data)
    return not rest and isinstance(scope, Function) and name in {word.arg for word in scope.args.args}


def _may_be_replaced(source: Source, name: str, settings: set[str]) -> bool:
    """Return whether the program may replace one of the ``settings`` (``args.files``) of the object ``name``.

    It may do so by assigning a value that is not a constant, or by a function that it imports and whose result it does not
    use: ``choose(args)``.
    """
    for file in source.files:
        if any(target in settings and not isinstance(value, ast.Constant) for target, value, _ in file.assignments):
            return True
        alone = (call for call in file.calls if isinstance(file.parents[call], ast.Expr))
        calls = [call for call in alone if any(ast.unparse(value) == name for value in call.args)]
        given = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        if given.difference(["print"], *(one.functions for one in source.files)):
            return True
    return False


def _is_changed_by_rank(source: Source, name: str) -> bool:
    """Return whether the rank may decide on changes of the variable ``name``: ``data.files = data.files[rank::size]``."""
    changes = [value for target, value, _ in source.assignments if target.startswith((f"{name}.", f"{name}["))]
    calls = [call for call in source.calls if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == name]
    calls = calls if name in source.values else []  # not a module, as in torch.save()
    given = [*changes, *(value for call in calls for value in call.args)]
    added = [call for call in calls if last_name(call.func) in ("add", "append", "extend", "insert")]
    return any(map(Guards.of(source).looks_like_one_rank, added)) or any("rank" in ast.unparse(value) for value in given)


def _is_split_inside(source: Source, call: ast.Call) -> bool:
    """Return whether a function or class of the script that ``call`` calls contains a slice such as [rank::size]."""
    called = [one for one in (*source.functions.values(), *source.classes) if one.name == last_name(call.func)]
    slices = [node for one in called for node in ast.walk(one) if isinstance(node, ast.Slice)]
    return any("rank" in ast.unparse(node) for node in slices)


def _without_download(data: ast.expr) -> ast.expr:
    """Return ``data`` without arguments such as ``download=hvd.rank() == 0``, which do not select samples."""
    if not any(isinstance(node, ast.keyword) and node.arg == "download" for node in ast.walk(data)):
        return data
    copied = deepcopy(data)
    for call in calls_in(copied):
        call.keywords = [word for word in call.keywords if word.arg != "download"]
    return copied
