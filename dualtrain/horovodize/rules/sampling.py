"""Rules on the samples that each rank gets, and on their order."""

from __future__ import annotations

import ast
import builtins
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
    names_in,
    sampler_of,
)
from dualtrain.horovodize.order import runs_on_driver
from dualtrain.horovodize.rules.evaluation import is_evaluation, is_for_evaluation
from dualtrain.horovodize.rules.own_data import is_made_by_rank, is_sharded
from dualtrain.horovodize.rules.uses import LOADERS, is_distributed_sampler, is_read, leaves_program
from dualtrain.horovodize.source import Finding, Function, Source

_EPOCH = re.compile(r"(^|_)(epoch|ep|e)(s|_?(idx|index|num|i|id|no|n|count|number))?$|epoch", re.IGNORECASE)
_TRAINERS = re.compile(r"(lightning|pytorch_lightning|ignite|accelerate)(\.|$)|transformers\.\w*Trainer")


def sampler_without_ranks(source: Source) -> Iterator[Finding]:
    """A DistributedSampler without num_replicas or rank, which therefore reads them from torch.distributed."""
    called = (last_name(call.func) for file in source.files for call in file.calls)
    if any(_STARTS_GROUP.match(name) and all(name not in file.functions for file in source.files) for name in called):
        return
    samplers = distributed_samplers(source)
    for call in samplers:
        if any(word.arg is None for word in call.keywords) or len(call.args) > 2:
            continue
        if any(source.exclusive(call, other) and argument_at(other, 2, "rank") is not None for other in samplers):
            continue  # the sampler in the other branch is for runs with Horovod
        if is_for_other_launcher(source, call):
            continue
        missing = {"num_replicas": "size", "rank": "rank"}
        if len(call.args) > 1:
            del missing["num_replicas"]
        missing = {argument: name for argument, name in missing.items() if keyword(call, argument) is None}
        if missing:
            spelled = {argument: source.spell(name, call) for argument, name in missing.items()}
            keywords = [f"{argument}={name}()" for argument, name in spelled.items()]
            message = (
                f"without {' and '.join(missing)}, the sampler needs torch.distributed's default group, which Horovod does "
                "not create; pass num_replicas=hvd.size(), rank=hvd.rank()"
            )
            edits = source.layout.add_keywords(call, keywords) if all(spelled.values()) else []
            yield Finding(call.lineno, "trap", message, tuple(edits))


_STARTS_GROUP = re.compile(r"(init|setup|start|launch|prepare)_?\w*(process_group|dist|ddp)|(dist|ddp)\w*_(init|setup)")
#: Words in conditions on other launchers. Such a condition may be true only in runs without Horovod.
_OTHER_LAUNCHER = re.compile(r"dist|ddp|parallel|multi|launch|world|gpu|nccl|\bdp\b|backend|strateg", re.IGNORECASE)


def is_for_other_launcher(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` perhaps runs only without Horovod, because of a condition around it."""
    guards = Guards.of(source)
    tests = [above.test for above in source.above(node) if isinstance(above, ast.If | ast.IfExp)]
    unknown = [test for test in tests if not guards.use.is_known(test)]
    return any(_OTHER_LAUNCHER.search(ast.unparse(test)) for test in unknown)


def sampler_with_shuffle(source: Source) -> Iterator[Finding]:
    """A DataLoader with a distributed sampler and shuffle=True."""
    samplers = distributed_samplers(source)
    made = {target for target, value, _ in source.assignments if any(part in samplers for part in ast.walk(value))}
    for call in source.calls:
        sampler = sampler_of(call)
        if source.name(call.func) not in LOADERS or not is_bool(argument_at(call, 2, "shuffle"), True):
            continue
        given = isinstance(sampler, ast.Name) and sampler.id in source.parameters(call)
        if sampler is not None and not given and (sampler in samplers or ast.unparse(sampler) in made):
            message = (
                "a DataLoader with a sampler and shuffle=True raises ValueError, on Horovod too; remove shuffle=True, "
                "because the sampler shuffles"
            )
            yield Finding(call.lineno, "trap", message)


def sampler_by_local_rank(source: Source) -> Iterator[Finding]:
    """A DistributedSampler that gets the local rank or size, or a constant."""
    guards = Guards.of(source)
    if source.hvd_calls("cross_rank", "cross_size"):
        return  # the script may give each host its own samples
    for call in distributed_samplers(source):
        for position, (argument, right) in enumerate((("num_replicas", "size"), ("rank", "rank")), start=1):
            value = argument_at(call, position, argument)
            if value is None:
                continue
            name = source.hvd(value.func) if isinstance(value, ast.Call) else guards.kinds.rank(value)
            if name == f"local_{right}" and not _counts_ranks_of_host(source, call):
                wrong = f"local_{right}(), so all hosts"
            elif (
                isinstance(value, ast.Constant) and (right == "rank" or value.value == 1) and _has_fixed_rank(source, call)
            ):
                wrong = f"{ast.unparse(value)} on all ranks, so they"
            else:
                continue
            message = f"{argument} is {wrong} train on the same samples; use hvd.{right}()"
            spelled = source.spell(right, value)
            edits = (source.layout.replace(value, f"{spelled}()"),) if spelled else ()
            yield Finding(value.lineno, "trap", message, edits)


def _counts_ranks_of_host(source: Source, call: ast.Call) -> bool:
    """Return whether ``num_replicas`` may be a number of ranks per host that the script does not get from Horovod."""
    count = argument_at(call, 1, "num_replicas")
    if count is None or isinstance(count, ast.Constant) or "world" in ast.unparse(count):
        return False
    calls = (value for value in source.possible_values(count) if isinstance(value, ast.Call))
    return not any(source.hvd(call.func) in ("size", "local_size") for call in calls)


def _has_fixed_rank(source: Source, call: ast.Call) -> bool:
    """Return whether the sampler that ``call`` makes has a constant rank, and all ranks of a run train on its samples."""
    rank, data = argument_at(call, 2, "rank"), first_argument(call, "dataset")
    if not isinstance(rank, ast.Constant) or data is None or not source.wraps or runs_on_driver(source, call):
        return False
    if is_for_evaluation(source, call) or is_for_other_launcher(source, call) or not is_read(source, call):
        return False
    differs = is_sharded(source, data) or is_made_by_rank(source, data)
    seed = argument_at(call, 4, "seed")  # a seed that depends on the rank gives each rank other samples in each step
    if seed is not None and is_sharded(source, seed):
        return False
    return not differs and not Guards.of(source).looks_like_one_rank(call)


def same_order_every_epoch(source: Source) -> Iterator[Finding]:
    """A shuffling DistributedSampler without set_epoch, or with set_epoch of a constant only."""
    constant = [_sets_constant(file, node) for file in source.files for node in file.nodes if _sets_epoch(node)]
    if not all(constant) or has_trainer(source):
        return
    loops, endless = _epoch_loops(source), _endless_reads(source)
    for call in distributed_samplers(source):
        if not loops and all(read in source.above(call) for read in endless):
            continue  # nothing reads the samples repeatedly, or each pass makes its own sampler
        shuffle = argument_at(call, 3, "shuffle")
        shuffles = shuffle is None or is_bool(shuffle, True)
        scope = getattr(source.scope(call), "name", "")
        if not shuffles or is_for_evaluation(source, call) or is_evaluation(scope) or source.uses_elastic:
            continue
        if not is_read(source, call) or leaves_program(source, call) or _depends_on_epoch(source, call, loops):
            continue
        message = "all epochs have the same order of samples; call set_epoch(epoch) on the sampler before each epoch"
        # No repair if there is a set_epoch(0): it may run after the inserted call and override it.
        yield Finding(call.lineno, "trap", message, () if constant else tuple(_set_epoch_of(source, call)))


def _depends_on_epoch(source: Source, call: ast.Call, loops: list[ast.For]) -> bool:
    """Return whether the sampler may have other samples in each epoch because its data set or seed depends on the epoch."""
    seed = argument_at(call, 4, "seed")
    names = {last_name(node) for node in ast.walk(seed)} - {""} if seed is not None else set[str]()
    if any(_EPOCH.search(name) for name in names) or any(
        _epoch_variable(loop).rpartition(".")[2] in names for loop in loops
    ):
        return True
    data = first_argument(call, "dataset")
    around = [loop for loop in loops if loop in source.above(call)]
    if data is None or not around:
        return False
    epoch = _epoch_variable(around[0])
    values = [value for value in source.values.get(ast.unparse(data), [data]) if around[0] in source.above(value)]
    return any(epoch in names_in(value) for value in values)


#: Usual names of variables with an attribute ``epoch`` that are not samplers.
_NO_SAMPLERS = ("args", "self", "state")


def _sets_epoch(node: ast.AST) -> bool:
    """Return whether ``node`` is ``sampler.set_epoch``, or assigns ``sampler.epoch``."""
    if not isinstance(node, ast.Attribute):
        return False
    stored = node.attr == "epoch" and is_stored(node) and last_name(node.value) not in _NO_SAMPLERS
    return node.attr == "set_epoch" or stored


def _sets_constant(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` is in ``sampler.set_epoch(0)``: a constant gives all epochs the same order."""
    call = source.parents[node]
    return isinstance(call, ast.Call) and call.func is node and isinstance(first_argument(call, "epoch"), ast.Constant)


def _set_epoch_of(source: Source, call: ast.Call) -> list[Edit]:
    found = [(target, statement) for target, value, statement in source.assignments if value is call]
    once = len(found) == 1 and sum(name == found[0][0] for name, _, _ in source.assignments) == 1
    return set_epoch(source, *found[0]) if once else []


def set_epoch(source: Source, sampler: str, assignment: ast.stmt) -> list[Edit]:
    """Return edits that call set_epoch in the loop over epochs.

    Return no edits if there is not exactly one such loop, or if it does not train or cannot use the variable ``sampler``.
    """
    loops = _epoch_loops(source)
    if len(loops) != 1 or not _may_train(source, loops[0], set()):
        return []
    if not _reaches(source, sampler, assignment, loops[0]):
        return []
    return source.layout.insert_before(loops[0].body[0], f"{sampler}.set_epoch({_epoch_variable(loops[0])})")


def _may_train(source: Source, node: ast.AST, seen: set[ast.AST]) -> bool:
    """Return whether the code in ``node`` may take a training step, itself or by a function that it calls.

    A ``for`` loop in ``node`` that is not over a range counts as such code.
    """
    seen.add(node)
    loops = (part for part in ast.walk(node) if isinstance(part, ast.For) and part is not node)
    if any(not ast.unparse(loop.iter).startswith("range(") for loop in loops):
        return True
    for call in calls_in(node):
        name = last_name(call.func)
        functions = [file.functions[name] for file in source.files if name in file.functions]
        unknown = isinstance(call.func, ast.Name) and not source.name(call.func) and name not in dir(builtins)
        if name == "backward" or (not functions and (unknown or _TRAINS.search(name))):
            return True
        if any(_may_train(source, function, seen) for function in functions if function not in seen):
            return True
    return False


#: Names of functions and methods that may train, if no file of the program defines them.
_TRAINS = re.compile(r"train|fit|run|epoch|step|loop|update|optimi[sz]e", re.IGNORECASE)


def _reaches(source: Source, target: str, statement: ast.stmt, loop: ast.For) -> bool:
    """Return whether ``target``, which only ``statement`` assigns, certainly has the assigned value in ``loop``."""
    home, user = source.scope(statement), source.scope(loop)
    if home is user:
        return source.parents[statement] in source.above(loop) and statement.lineno < loop.lineno
    if target.startswith("self."):
        same = source.parents.get(home) is source.parents.get(user)
        return same and getattr(home, "name", "") == "__init__" and source.parents[statement] is home
    at_top = source.parents[statement] is source.tree
    return at_top and isinstance(user, Function) and target not in {word.arg for word in user.args.args}


def distributed_samplers(source: Source) -> list[ast.Call]:
    """Return the calls that make a DistributedSampler of torch, if the file uses Horovod."""
    return [call for call in source.calls if source.uses_horovod and is_distributed_sampler(source, call)]


_RANGES = ("range", "trange", "xrange")
_COUNTS = (*_RANGES, "tqdm", "count", "master_bar")
#: Names of numbers of epochs: ``EPOCHS``, ``args.num_epochs``, ``max_epoch``; but not ``steps_per_epoch``.
_EPOCHS = re.compile(r"^(train(ing)?_?)?epochs$|^(n|nb|num|number_of|max|total)_?(train(ing)?_?)?epochs?$", re.IGNORECASE)


def _epoch_loops(source: Source) -> list[ast.For]:
    """Return the loops that look like loops over epochs.

    If the name of the loop's variable does not show this, but the name of its range's end does, the loop must also contain
    code that may train.
    """
    names = {node: _epoch_variable(node) for node in source.nodes if isinstance(node, ast.For)}
    loops = [loop for loop, name in names.items() if name and not _runs_once(source, loop)]
    return [loop for loop in loops if _EPOCH.search(names[loop]) or _may_train(source, loop, set())]


def _epoch_variable(loop: ast.For) -> str:
    """Return the variable that counts epochs in ``loop``, or "" if ``loop`` does not look like one over epochs.

    The name of the variable, or of the range's end, must show that ``loop`` counts epochs. For ``enumerate(range(…))``,
    the variable is the second target.
    """
    counts, target = loop.iter, loop.target
    ranges = [call for call in calls_in(counts) if last_name(call.func) in _RANGES and call.args]
    if isinstance(counts, ast.Call) and last_name(counts.func) == "enumerate" and ranges:
        if not counts.args or not isinstance(target, ast.List | ast.Tuple) or len(target.elts) != 2:
            return ""
        counts, target = counts.args[0], target.elts[1]
    if not isinstance(counts, ast.Call) or last_name(counts.func) not in _COUNTS or not last_name(target):
        return ""
    ends = [part for call in ranges for part in _summands(call.args[min(len(call.args) - 1, 1)])]
    counts_epochs = _EPOCH.search(last_name(target)) or any(_EPOCHS.search(last_name(end)) for end in ends)
    return ast.unparse(target) if counts_epochs else ""


def _summands(value: ast.expr) -> list[ast.expr]:
    """Return the operands of sums: ``epochs`` and ``1`` for ``epochs + 1``. ``epochs * steps`` is not a sum."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return [*_summands(value.left), *_summands(value.right)]
    return [value]


def _endless_reads(source: Source) -> list[ast.AST]:
    """Return the loops and handlers that read a loader again when it ends, in scripts that count steps, not epochs.

    These are ``while`` loops around ``for … in loader`` (not a loader of test data), and ``except StopIteration:`` with a
    call of ``iter``.
    """
    found: list[ast.AST] = []
    for node in source.nodes:
        if isinstance(node, ast.While):
            iters = [loop.iter for loop in ast.walk(node) if isinstance(loop, ast.For)]
            names = [last_name(part) for value in iters for part in ast.walk(value)]
            if any("loader" in name.lower() and not is_evaluation(name) for name in names):
                found.append(node)
        elif isinstance(node, ast.ExceptHandler):
            calls = [last_name(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)]
            if "iter" in calls and node.type is not None and last_name(node.type) == "StopIteration":
                found.append(node)
    return found


def _runs_once(source: Source, loop: ast.For) -> bool:
    """Return whether ``loop`` is over ``range(1)``, or over the range of a variable that is always 1."""
    arguments = loop.iter.args if isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "range" else []
    if len(arguments) != 1:
        return False
    values = source.values.get(ast.unparse(arguments[0]), arguments)
    return all(isinstance(value, ast.Constant) and value.value == 1 for value in values)


def has_trainer(source: Source) -> bool:
    """Return whether the script uses a library that may give each rank its samples."""
    return any(_TRAINERS.match(name) for name in source.imported_names)
