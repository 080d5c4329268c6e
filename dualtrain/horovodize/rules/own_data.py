"""Detect code that may give the ranks different samples."""

from __future__ import annotations

import ast
import re
from copy import deepcopy

from dualtrain.horovodize.nodes import names_in
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


def is_made_by_rank(source: Source, data: ast.expr, depth: int = 0) -> bool:
    """Return whether each process may make ``data`` itself: by random numbers without a seed, or by rollouts."""
    text = ast.unparse(data)
    draws = re.search(r"\b(rand|randn|randint|normal|uniform|random)\(", text)
    if _MADE_BY_RANK.search(text) or (draws and not any(map(seeds_torch, source.files))):
        return True
    return depth < 4 and any(is_made_by_rank(source, value, depth + 1) for value in _definitions(source, data))


def _definitions(source: Source, data: ast.expr) -> list[ast.expr]:
    """Return the values that the script assigns to the names in ``data``, also as elements of tuples."""
    names = names_in(data)
    return [value for target, value, _ in source.assignments if names & set(re.split(r",\s*|[()]", target))]


def is_sharded(source: Source, data: ast.expr, depth: int = 0) -> bool:
    """Return whether ``data`` may depend on the rank.

    That is so if its name, or an expression that defines it, contains a word such as rank. Parameters of functions count
    too, because their values are unknown.
    """
    selecting = _without_download(data)
    if SHARDED.search(ast.unparse(selecting)):
        return True
    if any(_is_unknown(source, data, name) for name in names_in(selecting)):
        return True
    return depth < 4 and any(is_sharded(source, value, depth + 1) for value in _definitions(source, selecting))


def _is_unknown(source: Source, data: ast.expr, name: str) -> bool:
    """Return whether ``name`` in ``data`` is a parameter, or an attribute of ``self`` that the script does not assign."""
    first, *rest = name.split(".")
    if first in ("self", "cls"):
        return bool(rest) and f"{first}.{rest[0]}" not in source.values
    scope: Scope = source.scope(data)
    return not rest and isinstance(scope, Function) and name in {word.arg for word in scope.args.args}


def _without_download(data: ast.expr) -> ast.expr:
    """Return ``data`` without arguments such as ``download=hvd.rank() == 0``, which do not select samples."""
    if not any(isinstance(node, ast.keyword) and node.arg == "download" for node in ast.walk(data)):
        return data
    copied = deepcopy(data)
    for call in (node for node in ast.walk(copied) if isinstance(node, ast.Call)):
        call.keywords = [word for word in call.keywords if word.arg != "download"]
    return copied
