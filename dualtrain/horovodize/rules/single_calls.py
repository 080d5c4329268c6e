"""Rules on single calls of horovod.torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dualtrain.horovodize.names import COMPRESSIONS, HOMES, MODULE_NAMES, PRIVATE, PUBLIC, RANK_NAMES
from dualtrain.horovodize.nodes import argument_at, first_argument, is_stored, keyword, last_name
from dualtrain.horovodize.own_modules import parameters
from dualtrain.horovodize.source import Finding, Source

#: Modules of dualtrain.hvd that replace modules of horovod.common.
_OWN_MODULES = {"exceptions", "util"}


def unknown_name(source: Source) -> Iterator[Finding]:
    """A name that is not public in horovod.torch 0.28.1, and that dualtrain lacks."""
    for node in source.nodes:
        if isinstance(source.parents.get(node), ast.Attribute):
            continue  # ``node`` is a part of a longer name
        called, *attributes = source.hvd(node).split(".")
        module = source.hvd_path(node).partition(".")[0]
        inside = module in MODULE_NAMES and called != module
        names, owner = MODULE_NAMES[module] if inside else PUBLIC | _OWN_MODULES, ""
        if called == "Compression" and attributes:
            called, names, owner = attributes[0], COMPRESSIONS, "Compression."
        if called and owner + called not in names and not called.startswith("__") and not _is_known(source, node, called):
            where = f"horovod.torch.{module}" if inside else "horovod.torch"
            message = f"'{owner}{called}' is not a public name of {where} 0.28.1, and dualtrain lacks it; use a public name"
            line: int = getattr(node, "lineno", 1)
            yield Finding(_import_line(source, node) or line, "unsupported", message)


def _is_known(source: Source, node: ast.AST, name: str) -> bool:
    """Return whether the script itself assigns ``name``, or tests for ``name`` before ``node`` runs."""
    text = f"{ast.unparse(node)}."
    assigned = any(target.rpartition(".")[2] == name and text.startswith(f"{target}.") for target in source.values)
    return assigned or _tests_for(source, node, name)


def _import_line(source: Source, node: ast.AST) -> int | None:
    """Return the line of the import that fails because of the name in ``node``; None for a module's attribute."""
    while isinstance(node, ast.Attribute):
        node = node.value
    if not isinstance(node, ast.Name) or source.name(node) in HOMES or source.hvd(node) in ("", *MODULE_NAMES):
        return None
    imports = (one for one in source.nodes if isinstance(one, ast.ImportFrom) and "horovod" in (one.module or ""))
    return next((one.lineno for one in imports if any((each.asname or each.name) == node.id for each in one.names)), None)


def _tests_for(source: Source, node: ast.AST, name: str) -> bool:
    """Return whether ``node`` runs only if ``hasattr(…, name)`` is true, or in a ``try`` that catches AttributeError.

    The ``else`` of such a ``try`` counts if the body uses ``name``.
    """
    below = node
    for above in source.above(node):
        known: list[tuple[ast.expr, bool]] = []  # conditions, and their values where ``node`` runs
        if isinstance(above, ast.If | ast.IfExp) and below is not above.test:
            known = [(above.test, below in above.body if isinstance(above.body, list) else below is above.body)]
        elif isinstance(above, ast.BoolOp):
            known = [(one, isinstance(above.op, ast.And)) for one in above.values[: above.values.index(below)]]  # type: ignore[arg-type]
        if any(_shows(test, truth, name) for test, truth in known):
            return True
        if isinstance(above, ast.Try) and any(
            "AttributeError" in ast.unparse(one.type) for one in above.handlers if one.type
        ):
            tried = any(last_name(part) == name for one in above.body for part in ast.walk(one))
            if below in above.body or (below in above.orelse and tried):
                return True
        below = above
    return False


def _shows(test: ast.expr, truth: bool, name: str) -> bool:
    """Return whether ``hasattr(…, name)`` is true if ``test`` has the value ``truth``."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _shows(test.operand, not truth, name)
    if isinstance(test, ast.BoolOp):
        parts = [_shows(value, truth, name) for value in test.values]
        return any(parts) if isinstance(test.op, ast.And) is truth else all(parts)
    if isinstance(test, ast.Compare) and isinstance(value := test.comparators[0], ast.Constant) and len(test.ops) == 1:
        equal = isinstance(test.ops[0], ast.Is | ast.Eq)
        known = equal or isinstance(test.ops[0], ast.IsNot | ast.NotEq)
        # ``hasattr(…) is True`` has the value of hasattr; ``is False`` and ``is not True`` have the opposite value.
        return known and isinstance(value.value, bool) and _shows(test.left, truth is (equal is value.value), name)
    word = (
        test.args[1] if isinstance(test, ast.Call) and len(test.args) == 2 and last_name(test.func) == "hasattr" else None
    )
    return truth and isinstance(word, ast.Constant) and word.value == name


def uncalled(source: Source) -> Iterator[Finding]:
    """A comparison with a function such as ``hvd.rank`` or ``hvd.size`` in place of its result, such as ``hvd.rank()``."""
    for node in source.nodes:
        parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        for part in parts:
            name = source.hvd(part)
            if name in RANK_NAMES and not any(isinstance(other, ast.Constant) and other.value is None for other in parts):
                written = ast.unparse(part)
                message = f"{written} is a function, but is compared with a value; call it: {written}()"
                yield Finding(part.lineno, "trap", message)


def unknown_argument(source: Source) -> Iterator[Finding]:
    """Keyword arguments that a function of horovod.torch does not have; patched versions of Horovod may have them."""
    for call in source.hvd_calls(*parameters()):
        name = source.hvd(call.func)
        for word in call.keywords:
            if word.arg is None or word.arg in parameters()[name] or source.is_caught(call, r"\b(TypeError|Exception)\b"):
                continue
            message = f"neither dualtrain nor Horovod 0.28.1 has the argument {name}({word.arg}=…); remove it"
            yield Finding(call.lineno, "unsupported", message)


def subclass_of_wrapper(source: Source) -> Iterator[Finding]:
    """A subclass of Horovod's internal class _DistributedOptimizer, whose methods and attributes dualtrain lacks."""
    for node in source.classes:
        for base in node.bases:
            if source.hvd(base) in ("_DistributedOptimizer", "_DistributedAdasumOptimizer"):
                message = (
                    f"dualtrain's class {ast.unparse(base)} has none of the methods and attributes of Horovod's, so that a "
                    "subclass of it fails; wrap the optimizer with hvd.DistributedOptimizer"
                )
                yield Finding(node.lineno, "unsupported", message)


def private_attribute(source: Source) -> Iterator[Finding]:
    """A private attribute of Horovod's wrapped optimizers that dualtrain's wrapped optimizers do not have."""
    for node in source.nodes:
        if not isinstance(node, ast.Attribute) or node.attr not in PRIVATE or not _is_wrapped_at(source, node.value):
            continue
        if not _tests_for(source, node, node.attr) and not any(_defines(file, node.attr) for file in source.files):
            message = (
                f"'{node.attr}' is a private attribute of Horovod's optimizers, and dualtrain lacks it; use public methods "
                "such as synchronize()"
            )
            yield Finding(node.lineno, "unsupported", message)


def _is_wrapped_at(source: Source, owner: ast.expr) -> bool:
    """Return whether the variable ``owner`` is a wrapped optimizer, as far as the function that uses it shows.

    If the function assigns the variable, one of the assigned values above ``owner`` must be a wrapped optimizer.
    """
    if last_name(owner) not in source.wrapped:
        return False
    text, scope = ast.unparse(owner), source.scope(owner)
    stores = [node for node in source.mentions.get(last_name(owner), ()) if is_stored(node) and ast.unparse(node) == text]
    found = [(value, at) for target, value, at in source.assignments if target == text and source.scope(at) is scope]
    above = [value for value, at in found if at.lineno < owner.lineno]
    wraps = [wrap for _, wrap in source.wraps]
    local = any(source.scope(node) is scope for node in stores)
    return not local or any(value in wraps or last_name(value) in source.wrapped for value in above)


def _defines(source: Source, name: str) -> bool:
    """Return whether an optimizer class of the script defines the attribute or method ``name`` itself."""
    classes = [one for one in source.classes if any("optim" in source.name(base).lower() for base in one.bases)]
    nodes = (node for one in classes for node in ast.walk(one))
    return any((last_name(node) == name and is_stored(node)) or getattr(node, "name", "") == name for node in nodes)


def join_with_other_operations(source: Source) -> Iterator[Finding]:
    """join() together with Min, Max or Product."""
    operations = {source.hvd(node) for node in source.nodes} & {"Min", "Max", "Product"}
    for call in source.hvd_calls("join") if operations else ():
        message = (
            f"with dualtrain, joined ranks do not change the result of hvd.{sorted(operations)[0]}; on Horovod, they "
            "contribute zeros, so the result may be wrong; nothing to do"
        )
        yield Finding(call.lineno, "differs", message)


def adasum(source: Source) -> Iterator[Finding]:
    """Adasum: one finding for all uses."""
    for node in source.nodes:
        if source.hvd(node) == "Adasum" and isinstance(node, ast.Attribute | ast.Name):
            message = (
                "with dualtrain, Adasum combines any number of ranks; Horovod needs MPI and a power of two, and on GPUs it "
                "first averages over the ranks of each host, so results differ; on GPUs, compare the results"
            )
            yield Finding(node.lineno, "differs", message)
            return


def adasum_skipping(source: Source) -> Iterator[Finding]:
    """skip_synchronize() of an optimizer that uses Adasum, which raises AssertionError."""
    wraps = {
        name: call for name, call in source.wraps if (op := _op(source, call)) is not None and _names_adasum(source, op)
    }
    for call in source.calls:
        if last_name(call.func) != "skip_synchronize" or not isinstance(call.func, ast.Attribute):
            continue
        wrap = wraps.get(last_name(call.func.value))
        if wrap is not None and not source.exclusive(call, wrap) and not _depends_on_adasum(source, call):
            message = (
                "with op=hvd.Adasum, skip_synchronize() raises AssertionError, on Horovod too; with Adasum, call step() "
                "outside of it"
            )
            yield Finding(call.lineno, "trap", message)


def _names_adasum(source: Source, op: ast.expr) -> bool:
    """Return whether ``op``, or a value that is assigned to it, may be hvd.Adasum."""
    return any(source.hvd(node) == "Adasum" for value in source.possible_values(op) for node in ast.walk(value))


def _depends_on_adasum(source: Source, node: ast.AST) -> bool:
    """Return whether a condition around ``node`` depends on Adasum."""
    tests = (above.test for above in source.above(node) if isinstance(above, ast.If | ast.IfExp))
    return any("adasum" in ast.unparse(test).lower() for test in tests)


def half_precision(source: Source) -> Iterator[Finding]:
    """Compression to 16 bits: one finding for all uses."""
    for node in source.nodes:
        if source.hvd(node) != "Compression.fp16" or not isinstance(node, ast.Attribute):
            continue
        if _is_averaged(source, node) and not is_switched_off(source, node):
            message = (
                "averages of fp16 values cannot overflow with dualtrain; on Horovod with MPI, Gloo or NCCL before 2.10, "
                "sums of these values can; nothing to do"
            )
            yield Finding(node.lineno, "differs", message)
            return


def is_switched_off(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` is in ``node if v else …`` or ``v and node``, and the variable ``v`` is always false.

    A variable is regarded as always false if only false constants are assigned to it, and no assignment is directly in an
    ``if`` (``if __name__ …`` does not count). Parsed command-line options are never regarded as always false, because the
    user may set them.
    """
    tests = [above.test for above in source.around(node, ast.IfExp) if node is above.body]
    for above in (node, *source.above(node)):
        parent = source.parents.get(above)
        if isinstance(parent, ast.BoolOp) and isinstance(parent.op, ast.And):
            tests += parent.values[: parent.values.index(above)]  # type: ignore[arg-type]
    for test in tests:
        root = ast.unparse(test).partition(".")[0]
        parsed = any(isinstance(one, ast.Call) and "parse" in last_name(one.func) for one in source.values.get(root, ()))
        found = [(value, statement) for target, value, statement in source.assignments if target == ast.unparse(test)]
        off = [isinstance(value, ast.Constant) and not value.value for value, _ in found]
        if off and all(off) and not parsed and not any(_is_under_condition(source, one) for _, one in found):
            return True
    return False


def _is_under_condition(source: Source, statement: ast.AST) -> bool:
    around = source.parents[statement]
    return isinstance(around, ast.If) and "__name__" not in ast.unparse(around.test)


def _is_averaged(source: Source, node: ast.AST) -> bool:
    """Return whether a call that gets the compression ``node`` may compute averages.

    If ``node`` is in no call, any DistributedOptimizer of the script may get it, so all of them are checked.
    """
    inside = [above for above in source.around(node, ast.Call) if source.hvd(above.func)]
    calls = inside or [wrap for _, wrap in source.wraps]
    return not calls or any(_may_average(source, _op(source, call)) for call in calls)


_OP_IS_FIFTH = ("DistributedOptimizer", "allreduce", "grouped_allreduce")


def _op(source: Source, call: ast.Call) -> ast.expr | None:
    """Return the argument ``op`` of an allreduce or a DistributedOptimizer."""
    return argument_at(call, 4, "op") if source.hvd(call.func) in _OP_IS_FIFTH else keyword(call, "op")


def _may_average(source: Source, op: ast.expr | None) -> bool:
    """Return whether ``op`` may be Average: false if ``op`` and its assigned values name Adasum or Sum, but not Average."""
    names = {source.hvd(node) for value in source.possible_values(op) for node in ast.walk(value)}
    return "Average" in names or not names & {"Adasum", "Sum"}


def mpi_communicator(source: Source) -> Iterator[Finding]:
    """hvd.init with a communicator of mpi4py."""
    for call in source.hvd_calls("init"):
        values = source.possible_values(first_argument(call, "comm"))
        if any(source.name(node).startswith("mpi4py") for value in values for node in ast.walk(value)):
            message = "an MPI communicator works under mpirun only; start the script with mpirun, or give a list of ranks"
            yield Finding(call.lineno, "differs", message)
