"""Rules on single calls of horovod.torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dualtrain.horovodize.edits import Edit
from dualtrain.horovodize.names import ASYNC, OBJECTS, OUT_OF_PLACE, PUBLIC, RANK_NAMES, WRAP_ARGUMENTS
from dualtrain.horovodize.source import Finding, Source, keyword

#: Modules of dualtrain.hvd that replace modules of horovod.common.
_OWN_MODULES = ("exceptions", "util")
_NEW_TENSORS = ("empty", "ones", "tensor", "zeros")


def discarded_result(source: Source) -> Iterator[Finding]:
    """A collective whose result or handle is discarded."""
    for call in source.hvd_calls(*OUT_OF_PLACE, *ASYNC, *OBJECTS):
        if not isinstance(source.parents[call], ast.Expr) or _is_barrier(source, call):
            continue
        name = source.hvd(call.func)
        if name in ASYNC:
            message = f"the handle of {name}() is lost, so nothing waits for the result; pass it to hvd.synchronize()"
        else:
            cure = f"assign the result, or call {name}_()" if f"{name}_" in PUBLIC else "assign the result"
            message = f"the result of {name}() is lost, and its input is not changed; {cure}"
        yield Finding(call.lineno, "trap", message, tuple(_in_use(source, call, name)))


def _in_use(source: Source, call: ast.Call, name: str) -> list[Edit]:
    """Make the call change its input, or wait for its handle; return no edits if the input is not a variable."""
    value, layout = call.args[0] if call.args else None, source.layout
    if not isinstance(value, ast.Name | ast.Attribute) or not isinstance(call.func, ast.Attribute):
        return []
    if isinstance(value, ast.Name) and value.id in source.parameters(call):
        return []  # the caller of the function may still need the tensor's old value
    if name in ("allreduce", "broadcast"):
        end = layout.end(call.func)
        return [Edit(end, end, "_")]
    if name in ASYNC and name.endswith("_") and (wait := source.spell("synchronize", call)):
        return [Edit(layout.start(call), layout.start(call), f"{wait}("), Edit(layout.end(call), layout.end(call), ")")]
    return []


def _is_barrier(source: Source, call: ast.Call) -> bool:
    """Return whether the call can only serve as a barrier: by its name, or because its input is a new value."""
    value = call.args[0] if call.args else keyword(call, "obj")
    name = keyword(call, "name")
    if isinstance(value, ast.Constant) or (name is not None and "barrier" in ast.unparse(name).lower()):
        return True
    return isinstance(value, ast.Call) and source.name(value.func) in {f"torch.{name}" for name in _NEW_TENSORS}


def unknown_name(source: Source) -> Iterator[Finding]:
    """A name that horovod.torch 0.28.1 does not have."""
    for node in source.nodes:
        if isinstance(source.parents.get(node), ast.Attribute):
            continue  # a part of a longer name
        called = source.hvd(node).partition(".")[0]
        known = called in PUBLIC or called in _OWN_MODULES or called.startswith("__")
        if called and not known and not _tests_for(source, node, called):
            message = f"{called!r} is no public name of horovod.torch 0.28.1, and dualtrain lacks it; use a public name"
            yield Finding(getattr(node, "lineno", 1), "unsupported", message)


def _tests_for(source: Source, node: ast.AST, name: str) -> bool:
    """Return whether ``node`` runs only if ``hasattr(hvd, name)``, or is in a ``try`` that catches AttributeError."""
    for above in source.above(node):
        test = above.test if isinstance(above, ast.If | ast.IfExp) else above if isinstance(above, ast.BoolOp) else None
        for call in ast.walk(test) if test is not None else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "hasattr" and len(call.args) == 2:
                word = call.args[1]
                if isinstance(word, ast.Constant) and word.value == name:
                    return True
        if isinstance(above, ast.Try) and any(
            each.type is not None and "AttributeError" in ast.unparse(each.type) for each in above.handlers
        ):
            return True
    return False


def uncalled(source: Source) -> Iterator[Finding]:
    """A comparison of the function ``hvd.rank`` itself with a number."""
    for node in source.nodes:
        parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        for part in parts:
            name = source.hvd(part)
            if name in RANK_NAMES and not any(isinstance(other, ast.Constant) and other.value is None for other in parts):
                written = ast.unparse(part)
                message = f"{written} is a function, which equals no number; call it: {written}()"
                yield Finding(part.lineno, "trap", message)


def unknown_argument(source: Source) -> Iterator[Finding]:
    """Arguments of DistributedOptimizer that only patched versions of Horovod have."""
    for call in source.hvd_calls("DistributedOptimizer"):
        for word in call.keywords:
            if word.arg is not None and word.arg not in WRAP_ARGUMENTS:
                message = f"DistributedOptimizer has no argument {word.arg}, also in Horovod 0.28.1; remove it"
                yield Finding(call.lineno, "unsupported", message)


def unnamed_calls(source: Source) -> Iterator[Finding]:
    """Calls without a name; one finding for all of them."""
    unnamed = [call for call in source.hvd_calls(*OUT_OF_PLACE, *ASYNC) if not _named(call)]
    if unnamed:
        others = f" (and {len(unnamed) - 1} more)" if len(unnamed) > 1 else ""
        message = (
            f"a call without a name{others} matches the other ranks' next unnamed call of its kind and process set; "
            "Horovod hangs once a rank has made one call more than others; name calls that only some ranks make"
        )
        yield Finding(unnamed[0].lineno, "differs", message)


def _named(call: ast.Call) -> bool:
    return any(word.arg in ("name", None) for word in call.keywords) or len(call.args) > 2


def join_with_other_operations(source: Source) -> Iterator[Finding]:
    """join() together with Min, Max or Product."""
    operations = {source.hvd(node) for node in source.nodes} & {"Min", "Max", "Product"}
    for call in source.hvd_calls("join") if operations else ():
        message = (
            f"a joined rank does not change the result of hvd.{sorted(operations)[0]}; on Horovod it wrongly contributes "
            "zeros; nothing to do"
        )
        yield Finding(call.lineno, "differs", message)


def adasum(source: Source) -> Iterator[Finding]:
    """Adasum: one finding for all uses."""
    for node in source.nodes:
        if source.hvd(node) == "Adasum" and isinstance(node, ast.Attribute | ast.Name):
            message = "Adasum runs on any number of ranks; Horovod needs a power of two, and MPI on the CPU; nothing to do"
            yield Finding(node.lineno, "differs", message)
            return


def half_precision(source: Source) -> Iterator[Finding]:
    """Compression to 16 bits: one finding for all uses."""
    for node in source.nodes:
        if source.hvd(node) == "Compression.fp16" and isinstance(node, ast.Attribute) and not _is_for_adasum(source, node):
            message = "averages of fp16 values cannot overflow here; on Horovod their sums can; nothing to do"
            yield Finding(node.lineno, "differs", message)
            return


def _is_for_adasum(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` is in a call with ``op=hvd.Adasum``, which computes no averages."""
    calls = [above for above in source.above(node) if isinstance(above, ast.Call)]
    return any((op := keyword(call, "op")) is not None and source.hvd(op) == "Adasum" for call in calls)


def mpi_communicator(source: Source) -> Iterator[Finding]:
    """hvd.init with a communicator of mpi4py."""
    for call in source.hvd_calls("init"):
        comm = keyword(call, "comm") or (call.args[0] if call.args else None)
        if comm is None:
            continue
        assigned = [value for target, value, _ in source.assignments if target == ast.unparse(comm)]
        if any(source.name(node).startswith("mpi4py") for value in (comm, *assigned) for node in ast.walk(value)):
            message = "an MPI communicator works under mpirun only; start the script with mpirun, or give a list of ranks"
            yield Finding(call.lineno, "differs", message)
