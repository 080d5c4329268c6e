"""Rules on single calls of horovod.torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.edits import Edit
from dualtrain.horovodize.names import (
    ASYNC,
    COMPRESSIONS,
    HOMES,
    MODULE_NAMES,
    OBJECTS,
    OUT_OF_PLACE,
    PUBLIC,
    RANK_NAMES,
    WRAP_ARGUMENTS,
)
from dualtrain.horovodize.source import Finding, Function, Source, first_argument, keyword, last_name

#: Modules of dualtrain.hvd that replace modules of horovod.common.
_OWN_MODULES = {"exceptions", "util"}
_NEW_TENSORS = {f"torch.{name}" for name in ("as_tensor", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")}
_NEW_TENSORS |= {f"torch.{name}Tensor" for name in ("Byte", "Float", "Int", "Long")} | {"torch.Tensor"}
_COPIES = ("torch.as_tensor", "torch.tensor")
_METHODS = ("clone", "cpu", "cuda", "detach", "double", "float", "to")


def discarded_result(source: Source) -> Iterator[Finding]:
    """A collective whose result or handle is discarded."""
    for call in source.hvd_calls(*OUT_OF_PLACE, *ASYNC, *OBJECTS):
        alone = isinstance(source.parents[call], ast.Expr)
        if not (alone or _is_unused(source, call)) or _is_barrier(source, call) or _expects_error(source, call):
            continue
        name = source.hvd(call.func)
        if name in ASYNC:
            message = f"the handle of {name}() is lost, so nothing waits for the result; pass it to hvd.synchronize()"
        else:
            cure = f"assign the result, or call {name}_()" if f"{name}_" in PUBLIC else "assign the result"
            cure = cure if alone else cure.replace("assign", "use")
            if name == "broadcast_object" and _has_state(call):
                cure = "broadcast its state_dict(), and load the result on all ranks"
            message = f"the result of {name}() is lost, and its input is not changed; {cure}"
        yield Finding(call.lineno, "trap", message, tuple(_edits_to_use_result(source, call, name)) if alone else ())
    yield from _discarded_from_functions(source)


def _has_state(call: ast.Call) -> bool:
    """Return whether the name of the sent object is typical of objects with a ``state_dict``, such as ``scheduler``."""
    value = first_argument(call, "obj")
    named = re.search(r"(^|_)(scheduler|optimizer|scaler|model)(_?(wu|re|lr|\d))?$", last_name(value)) if value else None
    return named is not None


def _expects_error(source: Source, call: ast.Call) -> bool:
    """Return whether the call is a test for an error: in ``with raises(…)``, or in a ``try`` of one or two statements."""
    statement = source.statement(call)
    above = source.parents[statement]
    if isinstance(above, ast.With):
        return "raises" in ast.unparse(above.items[0]).lower()
    return isinstance(above, ast.Try) and len(above.body) < 3 and statement in above.body


def _is_unused(source: Source, call: ast.Call) -> bool:
    """Return whether the result is in a list that is discarded, or in a local variable that nothing reads."""
    parent = source.parents[call]
    if isinstance(parent, ast.ListComp):
        return parent.elt is call and isinstance(source.parents[parent], ast.Expr)
    if not isinstance(parent, ast.Assign) or not isinstance(source.scope(call), Function):
        return False
    if re.search(r"bench|perf|test|time|warm", getattr(source.scope(call), "name", ""), re.IGNORECASE):
        return False
    names = {target.id for target in parent.targets if isinstance(target, ast.Name)}
    if any(_UNUSED.match(name) for name in names):
        return False  # discarded on purpose, as after a call that serves as a barrier
    read = (node.id for node in source.nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store))
    other = any(isinstance(node, ast.Global | ast.Nonlocal) and names & set(node.names) for node in source.nodes)
    return len(names) == len(parent.targets) and not other and names.isdisjoint(read)


#: Names of variables that are unused on purpose.
_UNUSED = re.compile(r"_|dummy|ignore|unused|temp$|tmp$")


def _discarded_from_functions(source: Source) -> Iterator[Finding]:
    """Report discarded results of the script's own functions that only return the result of a collective."""
    for call in source.calls:
        function = source.functions.get(call.func.id) if isinstance(call.func, ast.Name) else None
        if function is None or not isinstance(source.parents[call], ast.Expr) or source.is_ambiguous(function.name):
            continue
        inner = _returned_collective(source, function)
        if inner and not _BARRIER.search(function.name) and not _is_new(source, call.args[0] if call.args else None):
            message = f"the result of {function.name}(), which calls {inner}(), is lost; assign the result"
            yield Finding(call.lineno, "trap", message)


def _returned_collective(source: Source, function: Function) -> str:
    """Return the name of the collective whose result ``function`` returns; "" if ``function`` may do more than that."""
    body = [part for part in function.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    simple = all(
        isinstance(part, ast.Return) or (isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name))
        for part in body
    )
    inside = [node for part in body for node in ast.walk(part) if isinstance(node, ast.Call)]
    names = [source.hvd(node.func) for node in inside if source.hvd(node.func)]
    own = [name for name in names if name in OUT_OF_PLACE]
    returns = any(isinstance(part, ast.Return) and part.value is not None for part in body)
    only_these = set(names) <= {*own, *RANK_NAMES}
    return own[0] if simple and returns and own and only_these and function.args.args else ""


def _edits_to_use_result(source: Source, call: ast.Call, name: str) -> list[Edit]:
    """Return edits that make the call change its input, or wait for its handle; none if the input is not a variable."""
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
    """Return whether the call may be only a barrier.

    It may be one if its argument ``name``, or the name of the function around it, is "barrier" or similar, or if its input
    is a constant or a new tensor. It is not a barrier if its input is made from a variable's value, and is read after the
    call.
    """
    value = call.args[0] if call.args else keyword(call, "obj") or keyword(call, "tensor")
    names = [keyword(call, "name"), *call.args[1:]]
    if _is_copy_read_later(source, call, value):
        return False
    if any(_BARRIER.search(ast.unparse(name)) for name in names if name is not None):
        return True
    scope = source.scope(call)
    if _BARRIER.search(getattr(scope, "name", "")) is not None:
        return True
    return _is_new(source, value)


def _is_copy_read_later(source: Source, call: ast.Call, value: ast.expr | None) -> bool:
    """Return whether ``value`` is made from the value of a variable, and is read after ``call`` in the same function."""
    if not isinstance(value, ast.Name):
        return False
    made = [(given, at) for target, given, at in source.assignments if target == value.id]
    values = [given for given, at in made if not isinstance(at, ast.AugAssign)]
    if not values or not all(_copies_variable(source, one) for one in values):
        return False
    scope, later = source.scope(call), call.end_lineno or call.lineno
    same = [node for node in source.nodes if isinstance(node, ast.Name) and node.id == value.id and node.lineno > later]
    same = [node for node in same if source.scope(node) is scope]
    # ``value /= size`` reads the value, too.
    stored = any(isinstance(node.ctx, ast.Store) and not isinstance(source.parents[node], ast.AugAssign) for node in same)
    return not stored and any(getattr(source.parents[node], "attr", "") not in _OF_SHAPE for node in same)


def _copies_variable(source: Source, made: ast.expr) -> bool:
    """Return whether ``made`` is ``torch.tensor(x)`` with a variable in ``x``, or a call such as ``y.clone()``."""
    while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr in _METHODS:
        if isinstance(made.func.value, ast.Name):
            return True
        made = made.func.value
    copies = isinstance(made, ast.Call) and source.name(made.func) in _COPIES and bool(made.args)
    return copies and isinstance(made, ast.Call) and any(isinstance(part, ast.Name) for part in ast.walk(made.args[0]))


#: Attributes of a tensor that do not depend on its values.
_OF_SHAPE = ("device", "dtype", "element_size", "nbytes", "numel", "shape", "size")
_BARRIER = re.compile(r"barrier|\bwait|^synchroni[sz]e$", re.IGNORECASE)


def _is_new(source: Source, value: ast.expr | None, *, follow: bool = True) -> bool:
    """Return whether ``value`` is a constant or a new tensor, or a variable that has only values of these kinds."""
    if isinstance(value, ast.Name) and follow:
        values = source.values.get(value.id, ())
        return bool(values) and all(_is_new(source, one, follow=False) for one in values)
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Call):
        value = value.func.value  # torch.zeros(1).cuda()
    if isinstance(value, ast.Call):
        return source.name(value.func) in _NEW_TENSORS
    return isinstance(value, ast.Constant)


def unknown_name(source: Source) -> Iterator[Finding]:
    """A name that horovod.torch 0.28.1 does not have."""
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
            message = f"'{owner}{called}' is no public name of {where} 0.28.1, and dualtrain lacks it; use a public name"
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
    """Return whether ``node`` runs only if ``hasattr(…, name)`` is true, or in a ``try`` that catches AttributeError."""
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
    """A comparison with the function ``hvd.rank`` in place of its result ``hvd.rank()``."""
    for node in source.nodes:
        parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        for part in parts:
            name = source.hvd(part)
            if name in RANK_NAMES and not any(isinstance(other, ast.Constant) and other.value is None for other in parts):
                written = ast.unparse(part)
                message = f"{written} is a function, but is compared with a value; call it: {written}()"
                yield Finding(part.lineno, "trap", message)


def unknown_argument(source: Source) -> Iterator[Finding]:
    """Arguments of DistributedOptimizer that only patched versions of Horovod have."""
    for call in source.hvd_calls("DistributedOptimizer"):
        for word in call.keywords:
            if word.arg is not None and word.arg not in WRAP_ARGUMENTS:
                message = (
                    f"neither dualtrain nor Horovod 0.28.1 has the argument DistributedOptimizer({word.arg}=…); remove it"
                )
                yield Finding(call.lineno, "unsupported", message)


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
    """skip_synchronize() of an optimizer that uses Adasum: AssertionError."""
    wraps = {
        name: call for name, call in source.wraps if (op := keyword(call, "op")) is not None and _names_adasum(source, op)
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
    values = [op, *source.values.get(ast.unparse(op), ())]
    return any(source.hvd(node) == "Adasum" for value in values for node in ast.walk(value))


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
    """Return whether ``node`` is certainly not evaluated, because a variable that guards it is always false.

    A variable is regarded as always false if only false constants are assigned to it, and no assignment is directly in an
    ``if`` (other than ``if __name__ …``).
    Parsed command-line options are never regarded as always false, because the user may set them.
    """
    tests = [above.test for above in source.above(node) if isinstance(above, ast.IfExp) and node is above.body]
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
    inside = [above for above in source.above(node) if isinstance(above, ast.Call) and source.hvd(above.func)]
    calls = inside or [wrap for _, wrap in source.wraps]
    return not calls or any(_may_average(source, keyword(call, "op")) for call in calls)


def _may_average(source: Source, op: ast.expr | None) -> bool:
    """Return whether ``op`` may be Average: false if ``op`` and its assigned values name Adasum or Sum, but not Average."""
    values = [] if op is None else [op, *source.values.get(ast.unparse(op), ())]
    names = {source.hvd(node) for value in values for node in ast.walk(value)}
    return "Average" in names or not names & {"Adasum", "Sum"}


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
