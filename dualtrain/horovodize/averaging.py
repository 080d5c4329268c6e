"""Code by which a program may average gradients or weights itself, without DistributedOptimizer."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from dualtrain.horovodize.nodes import last_name
from dualtrain.horovodize.source import Source

#: Names of functions that may combine tensors of the ranks.
_COLLECTIVE = re.compile(r"reduce|gather|alltoall|broadcast_?(async_?)?$", re.IGNORECASE)
#: Names of functions that most likely average gradients or weights.
_OF_WEIGHTS = re.compile(
    r"(average|avg|mean|reduce|(?<!a)sync).*(grad|model|param|weight)|(grad|model|param|weight).*(average|avg|reduce|(?<!a)sync)",
    re.IGNORECASE,
)
#: Names of functions that most likely average gradients if they are called between backward and step.
_IN_STEP = re.compile(r"(?<!a)sync|all_?reduce", re.IGNORECASE)
_WEIGHTS = re.compile(r"^(grads?|data|state_dict|(named_)?param(eter)?s?|weights?)$|_(grads|params)$")
_HOOKS = re.compile(r"register_(post_accumulate_grad_)?hook\b|grad_hook|comm_hook")
#: Calls after which a library averages a model's gradients in backward.
_WRAPPERS = re.compile(r"\.(DistributedDataParallel|FullyShardedDataParallel|fully_shard|replicate)$")
#: Calls that use parameters without averaging them.
_USES_ONLY = re.compile(r"^torch\.(optim\.|save$|nn\.utils\.clip_)")
#: Libraries whose functions, except collectives, do not average a script's gradients.
LIBRARIES = ("dualtrain.", "horovod.", "torch.")


def may_average(source: Source) -> bool:
    """Return whether the program may average gradients or weights without Horovod's optimizer.

    It may do so by hooks, by functions with names such as ``average_gradients``, by collectives in a function that also
    uses gradients or parameters, or by DistributedDataParallel and similar wrappers.
    """
    calls = (file.name(call.func) for file in source.files for call in file.calls)
    if has_gradient_hooks(source) or any(map(_WRAPPERS.search, calls)):
        return True
    averaging = averaging_functions(source)
    for file in source.files:
        if any(_OF_WEIGHTS.search(last_name(call.func)) and not file.name(call.func) for call in file.calls):
            return True
        if any(_OF_WEIGHTS.search(name.rpartition(".")[2]) for name in file.imported_names):
            return True
        for nodes in file.scopes.values():
            called = {last_name(node.func) for node in nodes if isinstance(node, ast.Call)}
            near = (node for node in nodes if _WEIGHTS.search(last_name(node)) and not _only_uses(file, node))
            if any(is_collective(name) or name in averaging for name in called) and any(near):
                return True
    return False


def has_gradient_hooks(source: Source) -> bool:
    """Return whether the program registers hooks on gradients, which may average them."""
    return any("hook" in file.text and _HOOKS.search(file.code) for file in source.files)


def is_collective(name: str) -> bool:
    """Return whether a function of this name may combine tensors of the ranks."""
    return _COLLECTIVE.search(name) is not None


def _averages(name: str) -> bool:
    return is_collective(name) or _OF_WEIGHTS.search(name) is not None


def averages_in_step(name: str) -> bool:
    """Return whether a function of this name may average gradients if it is called between backward and step."""
    return any(pattern.search(name) for pattern in (_OF_WEIGHTS, _IN_STEP))


def averaging_functions(source: Source) -> set[str]:
    """Return the names of the program's functions that call collectives or average gradients.

    Methods, and functions that call such functions, count too.
    """
    called = [(name, names) for file in source.files for name, names in file.called_names]
    return with_callers({name for name, names in called if any(map(_averages, names))}, called)


def synchronizing_functions(file: Source) -> set[str]:
    """Return the names of the functions and methods of one file that, judging by the names they call, average gradients.

    Functions that call such functions count too. Calls of functions in ``LIBRARIES``, even of collectives, do not count.
    """
    calls = (call for call in file.calls if averages_in_step(last_name(call.func)))
    scopes = {file.scope(call) for call in calls if not file.name(call.func).startswith(LIBRARIES)}
    return with_callers({scope.name for scope in scopes if not isinstance(scope, ast.Module)}, file.called_names)


def with_callers(functions: set[str], called: Sequence[tuple[str, set[str]]]) -> set[str]:
    """Return ``functions`` and those that call them, also indirectly. ``called``: pairs (function, names that it calls)."""
    found = functions
    while more := {name for name, names in called if names & found} - found:
        found = found | more
    return found


def _only_uses(source: Source, node: ast.AST) -> bool:
    return any(
        _USES_ONLY.match(source.name(call.func))
        or source.hvd(call.func) in ("DistributedOptimizer", "broadcast_parameters")
        for call in source.around(node, ast.Call)
    )
