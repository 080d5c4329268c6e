"""The rule on loaders of training data that give all samples to every rank."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.edits import Edit
from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.nodes import (
    argument_at,
    calls_in,
    first_argument,
    is_bool,
    is_stored,
    keyword,
    last_name,
    sampler_of,
)
from dualtrain.horovodize.order import ENTRY_POINTS, calls_of, runs_on_driver
from dualtrain.horovodize.rules.evaluation import is_for_evaluation, is_for_training
from dualtrain.horovodize.rules.own_data import SHARDED, is_made_by_rank, is_sharded
from dualtrain.horovodize.rules.sampling import distributed_samplers, has_trainer, set_epoch
from dualtrain.horovodize.rules.uses import LOADERS, is_read
from dualtrain.horovodize.source import Finding, Function, Source


def every_rank_reads_all(source: Source) -> Iterator[Finding]:
    """A loader of training data without a sampler, or with a RandomSampler, in a script with a wrapped optimizer."""
    if not source.wraps or has_trainer(source) or _counts_epochs_by_size(source) or _skips_by_rank(source):
        return
    guards = Guards.of(source)
    for call in source.calls:
        if source.name(call.func) not in LOADERS or runs_on_driver(source, call) or not _loads_training_data(source, call):
            continue
        # For ``**options``, ``word.arg`` is None. The options may contain a sampler.
        others = {word.arg for word in call.keywords} & {"batch_sampler", None}
        sampler = sampler_of(call)
        data = first_argument(call, "dataset")
        sampled = sampler is not None and not _is_random(source, sampler)
        if others or sampled or data is None or is_sharded(source, data) or is_for_evaluation(source, call):
            continue
        if is_made_by_rank(source, data):
            continue
        if _is_replaced(source, call, data) or not is_read(source, call) or guards.looks_like_one_rank(call):
            continue
        if not _is_alternative(source, call):
            caveat = "" if _is_of_torchvision(source, data) else " (unless the data set itself is split by rank)"
            message = (
                f"every rank reads all samples{caveat}, so that an epoch has as many steps as on one rank; pass "
                "sampler=DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())"
            )
            yield Finding(call.lineno, "trap", message, tuple(_with_sampler(source, call, data)))


def _loads_training_data(source: Source, call: ast.Call) -> bool:
    """Return whether the loader shuffles, or has a whole training set and no argument ``shuffle``."""
    shuffle, sampler = argument_at(call, 2, "shuffle"), sampler_of(call)
    return (
        is_bool(shuffle, True)
        or (sampler is not None and _is_random(source, sampler))
        or (shuffle is None and _has_whole_training_set(source, call))
    )


def _is_random(source: Source, sampler: ast.expr) -> bool:
    """Return whether ``sampler`` is ``RandomSampler(data)``, which shuffles all samples, as ``shuffle=True`` does."""
    values = source.values.get(ast.unparse(sampler), [sampler])
    return all(
        isinstance(value, ast.Call)
        and source.name(value.func) in ("torch.utils.data.RandomSampler", "torch.utils.data.sampler.RandomSampler")
        and len(value.args) + len(value.keywords) == 1
        for value in values
    )


def _is_alternative(source: Source, call: ast.Call) -> bool:
    """Return whether runs with Horovod may use a different loader in place of ``call``.

    That is so if a different branch makes a DistributedSampler, or a loader with a sampler. It is also so if the script
    makes a DistributedSampler, and ``call`` is in a function that nothing calls and that is not in ``ENTRY_POINTS``.
    """
    for other in source.calls:
        samples = sampler_of(other) is not None and last_name(other.func).endswith("DataLoader")
        if (samples or last_name(other.func) == "DistributedSampler") and source.exclusive(call, other):
            return True
    scope = source.scope(call)
    if not isinstance(scope, Function) or not distributed_samplers(source):
        return False
    elsewhere = any(last_name(each.func) == scope.name for file in source.files[1:] for each in file.calls)
    return scope.name not in ENTRY_POINTS and not elsewhere and not any(True for _ in calls_of(source, scope))


def _is_of_torchvision(source: Source, data: ast.expr) -> bool:
    values = source.values.get(ast.unparse(data), [data])
    return all(
        isinstance(value, ast.Call) and source.name(value.func).startswith("torchvision.datasets.") for value in values
    )


def _is_replaced(source: Source, call: ast.Call, data: ast.expr) -> bool:
    """Return whether nothing reads the loader that ``call`` makes, and a loader with a sampler has the same data."""
    target = next((name for name, value, _ in source.assignments if value is call), "")
    nodes = [node for file in source.files for node in file.nodes]
    loads = [node for node in nodes if not is_stored(node)]
    used = any(target in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", "")) for node in loads)
    if used or not target.isidentifier():
        return False
    loaders = [(other, first_argument(other, "dataset")) for other in source.calls if source.name(other.func) in LOADERS]
    same = [other for other, given in loaders if given is not None and ast.unparse(given) == ast.unparse(data)]
    return any(sampler_of(other) is not None for other in same)


def _has_whole_training_set(source: Source, call: ast.Call) -> bool:
    """Return whether the loader's variable is named for training, and its dataset is map-style and not split by rank."""
    target = next((name for name, value, _ in source.assignments if value is call), "")
    calls = [value for value in source.possible_values(first_argument(call, "dataset")) if isinstance(value, ast.Call)]
    if not is_for_training(target) or len(calls) != 1:
        return False
    name = source.name(calls[0].func)
    own = {node.name: node for node in source.classes}.get(last_name(calls[0].func))
    indexed = own is not None and any(getattr(part, "name", "") == "__getitem__" for part in own.body)
    whole = own is None or not SHARDED.search(ast.unparse(own))
    return name.startswith("torchvision.datasets.") or name == "torch.utils.data.TensorDataset" or (indexed and whole)


def _with_sampler(source: Source, call: ast.Call, data: ast.expr) -> list[Edit]:
    statement = source.statement(call)
    size, rank = source.spell("size", call), source.spell("rank", call)
    words = [word for word in call.keywords if word.arg == "shuffle"]
    found = [target for target, value, _ in source.assignments if value is call]
    if keyword(call, "sampler") is not None:  # sampler=None
        return []
    if not (words and size and rank and found and found[0].isidentifier() and isinstance(data, ast.Name | ast.Attribute)):
        return []
    name = (re.sub(r"_?(data)?_?loader$", "", found[0]) or "train") + "_sampler"
    if re.search(rf"\b{name}\b", source.text) or not source.imports_torch(call):
        return []
    sampler = f"torch.utils.data.DistributedSampler({ast.unparse(data)}, num_replicas={size}(), rank={rank}())"
    before = source.layout.insert_before(statement, f"{name} = {sampler}")
    epochs = set_epoch(source, name, statement)
    return [*before, source.layout.replace(words[0], f"sampler={name}"), *epochs] if before and epochs else []


def _skips_by_rank(source: Source) -> bool:
    """Return whether each rank takes its own batches.

    Examples: ``if i % size != rank: continue``, ``if (i - rank) % size: continue``, or islice() with the rank.
    """
    kinds = Guards.of(source).kinds
    for node in source.nodes:
        if isinstance(node, ast.Call) and last_name(node.func) == "islice" and any(map(kinds.rank, node.args)):
            return True
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and kinds.is_size(node.right)):
            continue
        above = source.parents[node]
        if isinstance(above, ast.Compare) and any(map(kinds.rank, (above.left, *above.comparators))):
            return True
        parts = [node.left.left, node.left.right] if isinstance(node.left, ast.BinOp) else []
        tested = isinstance(above, ast.Compare | ast.If | ast.UnaryOp)
        if tested and any(map(kinds.rank, parts)) and not any(isinstance(part, ast.Constant) for part in parts):
            return True
    return False


def _counts_epochs_by_size(source: Source) -> bool:
    """Return whether the script divides a value, probably the number of epochs or steps, by the number of ranks.

    ``1 / hvd.size()`` does not count: scripts use it as the first factor of a warm-up, or to turn a sum into an average.
    """
    return any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div | ast.FloorDiv)
        and not (isinstance(node.left, ast.Constant) and node.left.value == 1)
        and any(source.hvd(call.func) == "size" for call in calls_in(node.right))
        for node in source.nodes
    )
