"""Rules on splits of the data into training and validation, and into a part for each rank."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.nodes import argument_at, first_argument, given_values, keyword, names_in
from dualtrain.horovodize.order import runs_on_driver
from dualtrain.horovodize.rules.own_data import is_sharded
from dualtrain.horovodize.rules.rank_values import may_repeat
from dualtrain.horovodize.rules.seeds import seeds_numpy, seeds_random, seeds_torch
from dualtrain.horovodize.rules.uses import is_distributed_sampler
from dualtrain.horovodize.source import Finding, Source


def different_splits(source: Source) -> Iterator[Finding]:
    """A split of the data that gives a different result on each rank: random_split, or train_test_split of sklearn."""
    guards = Guards.of(source)
    for call in source.calls if source.wraps else ():
        name = source.name(call.func)
        if name == "torch.utils.data.random_split":
            seeded = any(map(seeds_torch, source.files)) or len(call.args) > 2 or keyword(call, "generator") is not None
            given = "generator=torch.Generator().manual_seed(0)"
        elif name == "sklearn.model_selection.train_test_split":
            ordered = [word for word in call.keywords if word.arg == "shuffle" and ast.unparse(word.value) == "False"]
            sharded = bool(call.args) and is_sharded(source, call.args[0])
            seeded = (
                any(map(seeds_numpy, source.files)) or keyword(call, "random_state") is not None or bool(ordered) or sharded
            )
            given = "random_state=0"
        else:
            continue
        if seeded or runs_on_driver(source, call) or any(word.arg is None for word in call.keywords):
            continue
        data = first_argument(call, "dataset")
        if guards.looks_like_one_rank(call) or (data is not None and _is_part_of_rank(source, data)):
            continue
        message = (
            "each rank splits the data differently, so that one rank trains on samples that a different rank uses for "
            f"validation; pass {given}"
        )
        known = source.imports_torch(call) or "torch" not in given
        # No repair if the call may be repeated: with a constant seed, all its splits would be equal.
        edits = source.layout.add_keywords(call, [given]) if known and not may_repeat(source, call) else []
        yield Finding(call.lineno, "trap", message, tuple(edits))


def _is_part_of_rank(source: Source, data: ast.expr) -> bool:
    """Return whether each rank may have its own ``data``: see ``is_sharded``.

    Unlike ``is_sharded``, return False if ``data`` itself is a parameter of the function: its value is unknown.
    """
    parameter = isinstance(data, ast.Name) and data.id in source.parameters(data)
    return not parameter and is_sharded(source, data)


def shuffled_shards(source: Source) -> Iterator[Finding]:
    """A shuffle without a seed, of a list from which each rank then takes its part."""
    for call in source.calls:
        seeded = {"numpy.random.shuffle": seeds_numpy, "random.shuffle": seeds_random}.get(source.name(call.func))
        if seeded is None or any(map(seeded, source.files)) or not given_values(call) or runs_on_driver(source, call):
            continue
        if _is_split_by_rank(source, ast.unparse(given_values(call)[0]), call):
            message = (
                "each rank shuffles differently before it takes its part, so that parts overlap and samples are missing; "
                "use the same seed on all ranks"
            )
            yield Finding(call.lineno, "trap", message)


def _is_split_by_rank(source: Source, name: str, shuffle: ast.Call) -> bool:
    """Return whether, after ``shuffle``, the same function takes a slice of ``name`` whose bounds contain the rank.

    A slice of a variable that is assigned from ``name`` counts, too.
    """
    guards, nodes = Guards.of(source), list(ast.walk(source.scope(shuffle)))
    later = [node for node in nodes if getattr(node, "lineno", 0) > shuffle.lineno]
    names = {name}
    for statement in sorted((node for node in later if isinstance(node, ast.Assign)), key=lambda node: node.lineno):
        if names & names_in(statement.value):
            names |= {ast.unparse(target) for target in statement.targets}
    for node in later:
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and ast.unparse(node.value) in names:
            bounds = [part for part in ast.walk(node.slice) if isinstance(part, ast.expr)]
            if any(guards.kinds.rank(part) or ast.unparse(part) in ("rank", "self.rank", "args.rank") for part in bounds):
                return True
    return False


def shard_by_local_rank(source: Source) -> Iterator[Finding]:
    """A shard that is chosen by the local rank, although there is one shard for each rank of all hosts."""
    guards = Guards.of(source)
    if source.hvd_calls("cross_rank", "cross_size"):
        return  # the script may give each host its own samples
    for node in source.nodes:
        pair = _shard(source, node)
        if pair is None or guards.kinds.rank(pair[0]) != "local_rank" or not guards.kinds.is_size(pair[1]):
            continue
        # data[rank * n : (rank + 1) * n] contains the rank twice, so that an edit at one place is not enough.
        once = not isinstance(node, ast.Slice) or node.step is not None
        spelled = source.spell("rank", pair[0]) if isinstance(pair[0], ast.Call) and once else ""
        edits = (source.layout.replace(pair[0], f"{spelled}()"),) if spelled else ()
        message = "the shard is chosen by local_rank(), so all hosts train on the same samples; use hvd.rank()"
        yield Finding(pair[0].lineno, "trap", message, edits)


def _rank_and_size(source: Source, start: ast.BinOp) -> tuple[ast.expr, ast.expr] | None:
    """If ``start`` is ``rank * n``, and a value of ``n`` contains ``x // size`` or ``x / size``, return (rank, size).

    Otherwise, return None.
    """
    guards = Guards.of(source)
    for index, length in ((start.left, start.right), (start.right, start.left)):
        for value in source.possible_values(length) if guards.kinds.rank(index) else ():
            for part in ast.walk(value):
                if (
                    isinstance(part, ast.BinOp)
                    and isinstance(part.op, ast.Div | ast.FloorDiv)
                    and guards.kinds.is_size(part.right)
                ):
                    return index, part.right
    return None


_SHARD_INDEX = ("rank", "shard", "cur_shard", "shard_id", "shard_index", "index", "global_rank", "worker_id")
_SHARD_COUNT = ("num_replicas", "world_size", "size", "shard_count", "num_shards", "global_size", "num_workers")


def _shard(source: Source, node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """Return the shard's number and the number of shards in ``data[number::shards]`` and similar expressions, else None."""
    if isinstance(node, ast.Slice) and isinstance(node.lower, ast.BinOp) and isinstance(node.lower.op, ast.Mult):
        return _rank_and_size(source, node.lower)
    if isinstance(node, ast.Slice):
        return (node.lower, node.step) if node.lower is not None and node.step is not None else None
    if not isinstance(node, ast.Call) or is_distributed_sampler(source, node):
        return None
    if source.name(node.func).startswith("torch.distributed."):
        return None  # such as init_process_group: its rank and world_size do not select samples
    if isinstance(node.func, ast.Attribute) and node.func.attr == "shard" and len(given_values(node)) == 2:
        shards, shard = first_argument(node, "num_shards"), argument_at(node, 1, "index")
        if shard is not None and shards is not None:
            return shard, shards
    if isinstance(node.func, ast.Name) and node.func.id == "range" and len(node.args) == 3:
        return node.args[0], node.args[2]
    index = next((word.value for word in node.keywords if word.arg in _SHARD_INDEX), None)
    count = next((word.value for word in node.keywords if word.arg in _SHARD_COUNT), None)
    return (index, count) if index is not None and count is not None else None
