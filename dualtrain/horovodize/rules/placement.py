"""Rules on the choice of GPUs, on files that ranks write, and on calls after shutdown()."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.edits import Edit
from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.names import COLLECTIVES, RANK_NAMES
from dualtrain.horovodize.order import ENTRY_POINTS, calls_of, nodes_after, runs_on_driver
from dualtrain.horovodize.source import Finding, Function, Source, keyword, last_name

_GPU_CALLS = ("torch.cuda.set_device", "torch.cuda.device")
_CUDA = re.compile(r"(cuda|gpu):?(\{\}|%[ds])?$")
_CHECKPOINT_WRITERS = ("torch.save",)
_RANK_IN_PATH = re.compile(r"rank|size\(|getpid|uuid|hostname|worker|temp", re.IGNORECASE)
_NEEDS_INIT = (COLLECTIVES | RANK_NAMES) - {"shutdown"}


def gpu_by_rank(source: Source) -> Iterator[Finding]:
    """A GPU chosen by rank() in place of local_rank()."""
    guards = Guards(source)
    for used in _gpu_numbers(source):
        if guards.rank(used) != "rank":
            continue
        call = used if isinstance(used, ast.Call) else None
        spelled = f"{ast.unparse(call.func)[: -len('rank')]}local_rank" if call else source.spell("local_rank", used)
        if call and isinstance(call.func, ast.Name):
            spelled = source.spell("local_rank", used)
        message = "the GPU is chosen by rank(), which exceeds the GPU numbers on a second host; use local_rank()"
        edits = (source.layout.replace(used, f"{spelled}()"),) if spelled else ()
        yield Finding(used.lineno, "trap", message, edits)


def same_gpu(source: Source) -> Iterator[Finding]:
    """Ranks that all use the default GPU; one finding."""
    starts = source.wraps and any(True for _ in source.hvd_calls("init"))
    if not starts or any(_PLACED.search(file.code) for file in (source, *source.program)):
        return
    guards = Guards(source)
    for call in source.calls:
        if _uses_default_gpu(source, call) and not (guards.is_without_horovod(call) or runs_on_driver(source, call)):
            message = (
                "all ranks of a host use the same GPU, unless the launcher shows each rank another one; call "
                "torch.cuda.set_device(hvd.local_rank()) after hvd.init()"
            )
            yield Finding(call.lineno, "trap", message)
            return


#: Words of scripts that may give each rank a GPU, also in functions of other files.
_PLACED = re.compile(
    r"local_?rank|local_?id|visible_devices|device_?(count|ids?|num|index|map)|gpu_?(id|num|index|rank|list)|[._]gpus?\b|"
    r"(set|setup|init|get|select|pin|choose|assign)\w*_(device|gpu|cuda|distributed|dist|horovod|hvd)|lightning|accelerate|"
    r"current_device",
    re.IGNORECASE,
)


def _uses_default_gpu(source: Source, call: ast.Call) -> bool:
    """Return whether ``call`` is ``x.cuda()``, ``x.to("cuda")``, ``torch.device("cuda:0")`` or the like."""
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "cuda":
        return not call.args and keyword(call, "device") is None
    if (call.func.attr != "to" and source.name(call.func) != "torch.device") or len(call.args) != 1:
        return False
    values = [call.args[0], *source.values.get(ast.unparse(call.args[0]), ())]
    constants = [node.value for value in values for node in ast.walk(value) if isinstance(node, ast.Constant)]
    return any(text in ("cuda", "cuda:0") for text in constants)


def _gpu_numbers(source: Source) -> Iterator[ast.expr]:
    """Yield the expressions that choose the GPU of a process."""
    for call in source.calls:
        name, method = source.name(call.func), last_name(call.func)
        if name in _GPU_CALLS or (isinstance(call.func, ast.Attribute) and method in ("cuda", "to")):
            yield from call.args[:1]
        elif name == "torch.device" and len(call.args) == 2 and _is_cuda(call.args[0]):
            yield call.args[1]
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
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(_CUDA.search(node.value))


def _without_str(value: ast.expr) -> ast.expr:
    """Return ``x`` for ``str(x)``, ``(x,)`` and ``f"{x}"``, else ``value``."""
    if isinstance(value, ast.Call) and last_name(value.func) == "str" and value.args:
        return value.args[0]
    if isinstance(value, ast.Tuple) and len(value.elts) == 1:
        return value.elts[0]
    if isinstance(value, ast.JoinedStr) and len(value.values) == 1 and isinstance(value.values[0], ast.FormattedValue):
        return value.values[0].value
    return value


def saved_by_all_ranks(source: Source) -> Iterator[Finding]:
    """A checkpoint that every rank writes to the same file."""
    if not (source.wraps or any(True for _ in source.hvd_calls("init"))):
        return
    guards = Guards(source)
    for call in source.calls:
        if source.name(call.func) not in _CHECKPOINT_WRITERS or runs_on_driver(source, call):
            continue
        file = call.args[1] if len(call.args) > 1 else keyword(call, "f")
        if file is None or _depends_on_process(source, file) or _is_for_some(source, guards, call):
            continue
        message = "all ranks write this file at the same time; write it on rank 0 only: `if hvd.rank() == 0:`"
        yield Finding(call.lineno, "trap", message, tuple(_save_on_rank_zero(source, call, file)))


def _save_on_rank_zero(source: Source, call: ast.Call, file: ast.expr) -> list[Edit]:
    statement, rank = source.statement(call), source.spell("rank", call)
    alone = isinstance(statement, ast.Expr) and statement.value is call
    gathers = any(source.hvd(node) in COLLECTIVES for node in ast.walk(call))
    if not alone or gathers or not rank or not any(True for _ in source.hvd_calls("init")):
        return []
    if _is_read_by_all(source, file):
        return []  # without a common file system, each host needs the file
    return source.layout.wrap(statement, f"if {rank}() == 0:")


def _is_read_by_all(source: Source, file: ast.expr) -> bool:
    """Return whether every rank may read the file later."""
    guards = Guards(source)
    loads = [call for call in source.calls if source.name(call.func) == "torch.load" and call.args]
    everywhere = [call for call in loads if not guards.looks_like_one_rank(call)]
    return any(_words(call.args[0]) & _words(file) for call in everywhere)


def _words(path: ast.expr) -> set[str]:
    """Return the variables, attributes and string constants in the expression of a path."""
    nodes = list(ast.walk(path))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return texts | {last_name(node) for node in nodes if last_name(node)} - {"args", "os", "path", "join", "format", "self"}


def _depends_on_process(source: Source, file: ast.expr, depth: int = 0) -> bool:
    """Return whether each process has its own file: a path with the rank, a temporary path, or a memory buffer."""
    if _RANK_IN_PATH.search(ast.unparse(file)):
        return True
    names = {ast.unparse(node) for node in ast.walk(file) if isinstance(node, ast.Name | ast.Attribute)}
    values = [value for name in names for value in source.values.get(name, ())]
    if any(isinstance(value, ast.Call) and source.name(value.func) == "io.BytesIO" for value in (file, *values)):
        return True
    return depth < 3 and any(_depends_on_process(source, value, depth + 1) for value in values)


def _is_for_some(source: Source, guards: Guards, node: ast.AST, depth: int = 0) -> bool:
    """Return whether only some ranks may run ``node``, or no call of its function is found."""
    if guards.looks_like_one_rank(node) or _is_in_own_folder(source, node):
        return True
    scope = source.scope(node)
    if not isinstance(scope, Function):
        return False
    if any(_RANK_DECORATOR.search(ast.unparse(decorator)) for decorator in scope.decorator_list):
        return True
    calls = list(calls_of(source, scope))
    if scope.name in ENTRY_POINTS and not calls:
        return False  # passed to a launcher, which calls it on all ranks
    return not calls or depth > 3 or all(_is_for_some(source, guards, call, depth + 1) for call in calls)


def _is_in_own_folder(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` is in a ``with`` of Ray Tune's context, which gives all ranks but one a temporary folder."""
    items = [item for above in source.above(node) if isinstance(above, ast.With) for item in above.items]
    return any("distributed_checkpoint_dir" in ast.unparse(item.context_expr) for item in items)


_RANK_DECORATOR = re.compile(r"rank|master|main_process", re.IGNORECASE)


def use_after_shutdown(source: Source) -> Iterator[Finding]:
    """Calls of rank() and similar functions after shutdown()."""
    for shutdown in source.hvd_calls("shutdown"):
        for node in nodes_after(source, shutdown):
            if not isinstance(node, ast.Call):
                continue
            name = source.hvd(node.func)
            if name == "init":
                break
            if name in _NEEDS_INIT:
                message = f"{name}() after shutdown() raises an error, on Horovod too; call it earlier and keep its result"
                yield Finding(node.lineno, "trap", message)
