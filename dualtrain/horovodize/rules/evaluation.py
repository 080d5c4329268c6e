"""The rule on evaluation with a sampler that splits the samples over the ranks, and may repeat some of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.nodes import argument_at, arms, calls_in, first_argument, is_bool, last_name, sampler_of
from dualtrain.horovodize.order import arguments, calls_of
from dualtrain.horovodize.rules.discarded import is_barrier
from dualtrain.horovodize.rules.ranks import only_waits
from dualtrain.horovodize.rules.uses import is_distributed_sampler, is_read, leaves_program, loader_around
from dualtrain.horovodize.source import Finding, Scope, Source

_EVALUATION = re.compile(
    r"(^|[^a-z])(dev|eval|evaluation|test|tst|val|valid|validation)($|[^a-z])|(?<!train)(test|val)(set|data)"
)
_TRAINING = re.compile(r"(^|[^a-z])(train|training|trn)(data|set|loader|sampler|dl|ds)*($|[^a-z])")
#: A variable as a pair: the function or module that assigns it (``None`` for an attribute), and its name.
_Variable = tuple[Scope | None, str]


def padded_evaluation(source: Source) -> Iterator[Finding]:
    """A DistributedSampler or ElasticSampler of a validation or test loader.

    If the source shows that nothing combines the ranks' results, or that only some ranks evaluate, the message says that
    each rank evaluates only a part of the samples. Otherwise, it says that samples are repeated, and there is no finding if
    the loaders drop an incomplete last batch.
    """
    for call in source.calls:
        if not is_distributed_sampler(source, call) and not source.hvd(call.func).endswith(".ElasticSampler"):
            continue
        if not is_for_evaluation(source, call) or not is_read(source, call):
            continue
        combined = any(_combines(file, one) for file in source.files for one in file.calls)
        known = not combined and not leaves_program(source, call) and not _is_returned_with(source, call)
        if known or _evaluates_on_some_ranks(source):
            yield Finding(call.lineno, "trap", _PARTIAL)
        elif not _drops_last(source, call):
            yield Finding(call.lineno, "trap", _PADDED)


_PADDED = (
    "if len(data) is not a multiple of the number of ranks, some samples are evaluated twice (or left out), "
    "which may change the result; use Subset(data, range(rank, len(data), size)), and combine sums and counts after the "
    "loop with op=hvd.Sum (not in the loop: ranks may have different numbers of batches)"
)
_PARTIAL = (
    "the sampler gives each rank only a part of the samples, and nothing combines the results; evaluate on all ranks, and "
    "sum results and counts with hvd.allreduce(…, op=hvd.Sum)"
)
_COMBINATIONS = re.compile(r"reduce(?!lr)|gather|averag|avg|sync|aggregat|mean_?(of|over|across)|merge", re.IGNORECASE)


def _evaluates_on_some_ranks(source: Source) -> bool:
    """Return whether the script calls its functions for evaluation only under conditions on the rank."""
    guards = Guards.of(source)
    calls = [
        call for call in source.calls if is_evaluation(last_name(call.func)) and last_name(call.func) in source.functions
    ]
    return bool(calls) and all(guards.is_on_some_ranks(call) for call in calls)


def _is_returned_with(source: Source, sampler: ast.Call) -> bool:
    """Return whether the function that makes ``sampler`` returns anything, perhaps the loader that uses the sampler."""
    nodes = ast.walk(source.scope(sampler)) if source.scope(sampler) is not source.tree else ()
    return any(isinstance(node, ast.Return) and node.value is not None for node in nodes)


def _combines(source: Source, call: ast.Call) -> bool:
    """Return whether ``call`` may combine results of the ranks, by its name."""
    name = source.name(call.func)
    if name.startswith(("torch.", "numpy.", "os.")) and not name.startswith("torch.distributed"):
        return False
    if source.hvd(call.func):
        made_here = isinstance(first_argument(call, "tensor"), ast.Call) and isinstance(source.parents[call], ast.Expr)
        if made_here and is_barrier(source, call):
            return False  # nothing can read hvd.allreduce_(torch.zeros(1))
        return source.hvd(call.func).startswith(("allreduce", "allgather", "grouped_all", "alltoall", "reducescatter"))
    called = last_name(call.func)
    if called == "skip_synchronize" or (called == "synchronize" and only_waits(source, call)):
        return False
    if called[:1].isupper():
        # AverageMeter does not combine results. A class such as Metric in Horovod's examples does. If no file of the
        # program defines the class, assume from its name that it combines results.
        return "Metric" in called and all(called != one.name for file in source.files for one in file.classes)
    return bool(_COMBINATIONS.search(called))


def _drops_last(source: Source, sampler: ast.Call) -> bool:
    """Return whether the loaders with ``sampler`` leave out an incomplete last batch, and with it the repeated samples."""
    names = {target for target, value, _ in source.assignments if value is sampler}
    passed = [(call, sampler_of(call)) for call in source.calls]
    values = [(call, arm) for call, value in passed if value is not None for arm in arms(value)]
    loaders = [call for call, value in values if value is sampler or ast.unparse(value) in names]
    drops = [argument_at(loader, 8, "drop_last") for loader in loaders]
    return bool(drops) and all(is_bool(value, True) for value in drops)


def is_for_evaluation(source: Source, call: ast.Call) -> bool:
    """Return whether names or uses indicate that ``call`` makes a sampler or loader for validation or test data."""
    loader = loader_around(source, call)
    outer = call if loader is None else loader
    target = next((name for name, value, _ in source.assignments if value is outer), "")
    data = first_argument(call, "dataset")
    text = "" if data is None else ast.unparse(data)
    names = f"{target} {text}".lower()
    if _EVALUATION.search(names) and not _TRAINING.search(target.lower()):
        return True
    if _TRAINING.search(names):
        return False
    sampler = target if loader is None else ast.unparse(call)
    return (_home(sampler, source.scope(call)), sampler) in source.once(_samplers_under_eval)


def _home(variable: str, scope: Scope) -> Scope | None:
    """Return ``scope``; None if ``variable`` is an attribute, which belongs to no function."""
    return scope if variable.isidentifier() else None


def is_evaluation(name: str) -> bool:
    """Return whether the name of a function says that it evaluates, and does not train."""
    return bool(_EVALUATION.search(name.lower())) and not _TRAINING.search(name.lower())


def is_for_training(name: str) -> bool:
    """Return whether the name of a variable says that it is for training."""
    return bool(_TRAINING.search(name.lower())) and not _EVALUATION.search(name.lower())


def _samplers_under_eval(source: Source) -> set[_Variable]:
    """Return the samplers of loaders that are iterated while the model is in evaluation mode.

    Leave out samplers whose ``set_epoch`` the same function calls: they are for training.
    """
    samplers: dict[str, list[tuple[Scope, _Variable]]] = {}  # loader → function that makes it, and its sampler
    for target, value, statement in source.assignments:
        if isinstance(value, ast.Call) and (sampler := sampler_of(value)) is not None:
            home, text = source.scope(statement), ast.unparse(sampler)
            makers = {source.scope(one) for name, _, one in source.assignments if name == text}
            samplers.setdefault(target, []).append((home, (_home(text, home if home in makers else source.tree), text)))
    found = set()
    for scope, nodes in source.scopes.items():
        evaluating = False
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("eval", "train"):
                evaluating = node.func.attr == "eval" and not node.args
            elif isinstance(node, ast.For) and evaluating and not _trains(source, node):
                for user, loader in _iterated(source, scope, node):
                    made = samplers.get(loader, [])
                    found |= {sampler for home, sampler in made if len(made) == 1 or home in (user, source.tree)}
    shuffled = (
        (source.scope(call), _text(call.func.value))
        for call in source.calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "set_epoch"
    )
    return found - {(_home(text, scope), text) for scope, text in shuffled}


def _iterated(source: Source, scope: Scope, loop: ast.For) -> Iterator[tuple[Scope, str]]:
    """Yield the variables that ``loop`` in ``scope`` iterates, as (function or module that uses the variable, its text).

    For a parameter, these are the variables that the script's calls pass, if there are such calls.
    """
    for part in ast.walk(loop.iter):
        calls = calls_of(source, scope) if _text(part) in source.parameters(loop) else ()
        given = [
            (source.scope(call), _text(value))
            for call in calls
            for value in arguments(source, scope, call, _text(part))  # type: ignore[arg-type]
        ]
        yield from given or [(scope, _text(part))]


def _trains(source: Source, loop: ast.For) -> bool:
    """Return whether the loop, or a function that it calls, calls ``backward`` or ``step``.

    If so, its model is not in evaluation mode.
    """
    training = {"backward", "step"}
    training |= {name for name, called in source.called_names if called & training}
    return any(last_name(call.func) in training for call in calls_in(loop))


def _text(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
