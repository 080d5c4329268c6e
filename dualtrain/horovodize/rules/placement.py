"""Rules on the choice of GPUs, and on calls before init() or after shutdown()."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.names import COLLECTIVES, RANK_NAMES
from dualtrain.horovodize.nodes import argument_at, first_argument, given_values, keyword, last_name
from dualtrain.horovodize.order import nodes_certainly_after, runs_on_driver
from dualtrain.horovodize.source import Finding, Source

_GPU_CALLS = ("torch.cuda.set_device", "torch.cuda.device")
_CUDA = re.compile(r"cuda:?(\{\}|%[ds])?")
_LOGS = re.compile(r"print|log|info|debug|warning|write|set_description|add_text", re.IGNORECASE)
_NEEDS_INIT = (COLLECTIVES | RANK_NAMES) - {"shutdown"}


def gpu_by_rank(source: Source) -> Iterator[Finding]:
    """A GPU chosen by rank() in place of local_rank()."""
    guards, numbers = Guards.of(source), list(_gpu_numbers(source))
    for used in numbers:
        if guards.kinds.rank(used) != "rank" or _is_logged(source, used):
            continue
        call = used if isinstance(used, ast.Call) else None
        spelled = source.spell("local_rank", used)
        if call and isinstance(call.func, ast.Attribute) and source.hvd(call.func) == "rank":
            spelled = f"{ast.unparse(call.func.value)}.local_rank"
        message = "the GPU is chosen by rank(), which exceeds the GPU numbers on a second host; use local_rank()"
        used_elsewhere = call is None and _is_used_elsewhere(source, used, numbers)
        edits = (source.layout.replace(used, f"{spelled}()"),) if spelled and not used_elsewhere else ()
        yield Finding(used.lineno, "trap", message, edits)


def _is_used_elsewhere(source: Source, used: ast.expr, numbers: list[ast.expr]) -> bool:
    """Return whether ``used`` is a variable like ``device`` that the script reads outside of ``numbers`` and messages."""
    if not re.search("device|gpu|cuda", last_name(used), re.IGNORECASE):
        return False
    loads = (node for node in source.mentions[last_name(used)] if isinstance(getattr(node, "ctx", None), ast.Load))
    return any(node not in numbers and not _is_logged(source, node) for node in loads)


def _is_logged(source: Source, node: ast.AST) -> bool:
    return any(_LOGS.search(last_name(call.func)) for call in source.around(node, ast.Call))


def same_gpu(source: Source) -> Iterator[Finding]:
    """Ranks that all use the default GPU, or all use ``cuda:0``; at most one finding."""
    if not source.wraps or not source.hvd_calls("init"):
        return
    if any(re.match(r"(ray|(horovod|dualtrain)\.ray)(\.|$)", name) for name in source.imported_names):
        return  # Ray may make only one GPU visible to each rank
    guards = Guards.of(source)
    placed = any(_PLACED.search(file.code) for file in source.files)
    shown = any(_VISIBLE.search(file.code) for file in source.files)
    for call in source.calls:
        if guards.is_without_horovod(call) or runs_on_driver(source, call):
            continue
        if not placed and _uses_default_gpu(source, call):
            what, cure = "use the same GPU", "call torch.cuda.set_device(hvd.local_rank()) after hvd.init()"
        elif placed and not shown and _uses_first_gpu(source, guards, call):
            what, cure = "use cuda:0", 'use torch.device("cuda", hvd.local_rank())'
        else:
            continue
        message = f"all ranks of a host {what}, unless the launcher makes a different GPU visible to each rank; {cure}"
        yield Finding(call.lineno, "trap", message)
        return


_VISIBLE = re.compile(r"visible_devices|get_device|set_visible", re.IGNORECASE)


def _uses_first_gpu(source: Source, guards: Guards, call: ast.Call) -> bool:
    """Return whether ``call`` moves data to ``cuda:0``, or makes this device for a variable that the program reads.

    That variable must have no other value. If the argument of ``call`` is a variable, as in ``x.to(device)``, one of the
    values of ``device`` must be ``cuda:0``, and none may be a different GPU. A call that depends on a condition
    (:func:`_is_chosen`) does not count.
    """
    name = source.name(call.func)
    if not isinstance(call.func, ast.Attribute) or (name != "torch.device" and call.func.attr != "to"):
        return False
    device = first_argument(call, "device")
    given = [] if device is None else [device, *_visible_values(source, device)]
    words = [node.value for value in given for node in ast.walk(value) if isinstance(node, ast.Constant)]
    if device is None or "cuda:0" not in words or guards.looks_like_one_rank(call) or _is_chosen(source, call):
        return False
    if _may_be_other_gpu(source, device):
        return False
    if name != "torch.device":
        return True
    target = next((target for target, value, _ in source.assignments if value is call), "")
    return bool(target) and len(source.values[target]) == 1 and _is_loaded(source, target)


def _may_be_other_gpu(source: Source, variable: ast.expr, value: ast.expr | None = None) -> bool:
    """Return whether ``value`` may be a GPU other than the first, as ``f"cuda:{n}"`` may.

    Without ``value``, check ``variable`` and the values that are assigned to it.
    """
    if value is None:
        return any(_may_be_other_gpu(source, variable, one) for one in (variable, *_visible_values(source, variable)))
    if isinstance(value, ast.IfExp):
        return any(_may_be_other_gpu(source, variable, one) for one in (value.body, value.orelse))
    if isinstance(value, ast.Call) and source.name(value.func) == "torch.device":
        return argument_at(value, 1, "index") is not None or any(
            _may_be_other_gpu(source, variable, one) for one in given_values(value)
        )
    if isinstance(value, ast.Constant):
        return re.fullmatch(r"(cuda:)?0*[1-9]\d*", str(value.value)) is not None
    return ast.unparse(value) != ast.unparse(variable)


def _is_loaded(source: Source, target: str) -> bool:
    """Return whether the program reads a variable or attribute with this name. ``torch.device`` does not count.

    Return True if ``target`` is an element, as in ``config["device"]``.
    """
    name = target.rpartition(".")[2]
    if not name.isidentifier():
        return True
    found = [(file, node) for file in source.files for node in file.mentions.get(name, ())]
    loads = [(file, node) for file, node in found if isinstance(getattr(node, "ctx", None), ast.Load)]
    return any(not file.name(node).startswith("torch.") for file, node in loads)


def _is_chosen(source: Source, call: ast.Call) -> bool:
    """Return whether ``call`` depends on a condition. Tests for a GPU, and of ``__name__``, do not count."""
    tests = [above.test for above in source.around(call, ast.If)]
    tests += [node.test for node in ast.walk(call) if isinstance(node, ast.IfExp)]
    texts = [ast.unparse(test) for test in tests if "__name__" not in ast.unparse(test)]
    return not all(re.fullmatch(r"[\w.]*(is_available\(\)|cuda)", text) for text in texts)


#: Words that suggest that a script gives each rank its own GPU, perhaps in a function of a different file.
_PLACED = re.compile(
    r"local_?rank|local_?id|visible_devices|device_?(count|ids?|num|index|map)|gpu_?(id|num|index|rank|list)|[._]gpus?\b|"
    r"(set|setup|init|get|select|pin|bind|choose|assign)\w*_(device|gpu|cuda|distributed|dist|horovod|hvd)|lightning|accelerate|"
    r"current_device",
    re.IGNORECASE,
)


def _uses_default_gpu(source: Source, call: ast.Call) -> bool:
    """Return whether ``call`` is ``x.cuda()``, ``x.to("cuda")``, ``torch.device("cuda:0")`` or the like."""
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "cuda":
        return first_argument(call, "device") is None
    made = source.name(call.func) == "torch.device"
    device = first_argument(call, "type" if made and keyword(call, "device") is None else "device")
    if (call.func.attr != "to" and not made) or device is None or (made and argument_at(call, 1, "index") is not None):
        return False
    values = [device, *_visible_values(source, device)]
    constants = [node.value for value in values for node in ast.walk(value) if isinstance(node, ast.Constant)]
    return any(text in ("cuda", "cuda:0") for text in constants) and not _may_be_other_gpu(source, device)


def _visible_values(source: Source, variable: ast.expr) -> list[ast.expr]:
    """Return the values that are assigned to ``variable`` in the functions around it, or in the module.

    If ``variable`` is an attribute, assignments in all functions count. For a parameter, return an empty list.
    """
    if isinstance(variable, ast.Name) and variable.id in source.parameters(variable):
        return []
    text, around = ast.unparse(variable), list(source.above(variable))
    found = [(value, source.scope(statement)) for target, value, statement in source.assignments if target == text]
    return [value for value, scope in found if scope in around or not isinstance(variable, ast.Name)]


def _gpu_numbers(source: Source) -> Iterator[ast.expr]:
    """Yield the expressions that choose the GPU of a process."""
    for call in source.calls:
        name, method = source.name(call.func), last_name(call.func)
        if name in _GPU_CALLS or (isinstance(call.func, ast.Attribute) and method in ("cuda", "to")):
            yield from filter(None, [first_argument(call, "device")])
        elif name == "torch.device":
            kind, index = first_argument(call, "type"), argument_at(call, 1, "index")
            yield from [index] if kind is not None and index is not None and _is_cuda(kind) else []
        elif method == "format" and isinstance(call.func, ast.Attribute) and _is_cuda(call.func.value):
            yield from call.args[:1]
        if (devices := keyword(call, "device_ids")) is not None and isinstance(devices, ast.List):
            yield from devices.elts
    for node in source.nodes:
        if isinstance(node, ast.JoinedStr) and len(node.values) == 2 and _is_cuda(node.values[0]):
            yield from (part.value for part in node.values[1:] if isinstance(part, ast.FormattedValue))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.Add) and _is_cuda(node.left):
            yield _without_str(node.right)
    for target, value, _ in source.assignments:
        if re.search(r"environ\[.CUDA_VISIBLE_DEVICES.\]$", target):
            yield _without_str(value)


def _is_cuda(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(_CUDA.fullmatch(node.value))


def _without_str(value: ast.expr) -> ast.expr:
    """Return ``x`` for ``str(x)``, ``(x,)`` and ``f"{x}"``, else ``value``."""
    if isinstance(value, ast.Call) and last_name(value.func) == "str" and value.args:
        return value.args[0]
    if isinstance(value, ast.Tuple) and len(value.elts) == 1:
        return value.elts[0]
    if isinstance(value, ast.JoinedStr) and len(value.values) == 1 and isinstance(value.values[0], ast.FormattedValue):
        return value.values[0].value
    return value


def use_after_shutdown(source: Source) -> Iterator[Finding]:
    """Calls of rank(), allreduce() and so on after shutdown(); at most one finding for each shutdown()."""
    for shutdown in source.hvd_calls("shutdown"):
        for node in nodes_certainly_after(source, shutdown):
            if not isinstance(node, ast.Call):
                continue
            name = source.hvd(node.func)
            if name == "init":
                break
            if name in _NEEDS_INIT:
                message = f"{name}() after shutdown() raises an error, on Horovod too; call it earlier and keep its result"
                yield Finding(node.lineno, "trap", message)
                break  # this call ends the script


def use_before_init(source: Source) -> Iterator[Finding]:
    """Calls of rank(), allreduce() and so on before init(), in the same block of code; at most one finding.

    If this block is an ``if`` of the module, the module's statements before the ``if`` are checked, too.
    """
    inits = source.hvd_calls("init")
    if len(inits) != 1 or Guards.of(source).is_conditional(inits[0]) or runs_on_driver(source, inits[0]):
        return
    start = source.statement(inits[0])
    block = source.block(start)
    guard = source.parents[start]
    at_top = isinstance(guard, ast.If) and source.parents[guard] is source.tree
    earlier = source.tree.body[: source.tree.body.index(guard)] if at_top else []  # type: ignore[arg-type]
    for call in source.hvd_calls(*_NEEDS_INIT):
        before = [*block[: block.index(start)], *earlier]
        choices = (ast.BoolOp, ast.IfExp, ast.Lambda, ast.comprehension)
        if source.statement(call) in before and not any(isinstance(above, choices) for above in source.above(call)):
            message = f"{source.hvd(call.func)}() before init() raises an error, on Horovod too; call hvd.init() first"
            yield Finding(call.lineno, "trap", message)
            return  # this call ends the script
