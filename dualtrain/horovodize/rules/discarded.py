"""The rule on collectives whose results or handles are discarded."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.edits import Edit
from dualtrain.horovodize.names import ASYNC, OBJECTS, OUT_OF_PLACE, PUBLIC, RANK_NAMES
from dualtrain.horovodize.nodes import calls_in, first_argument, given_values, is_stored, keyword, last_name, variables_in
from dualtrain.horovodize.source import Finding, Function, Source

_NEW_TENSORS = {f"torch.{name}" for name in ("as_tensor", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")}
_NEW_TENSORS |= {f"torch.{name}Tensor" for name in ("Byte", "Float", "Int", "Long")} | {"torch.Tensor"}
_COPIES = ("torch.as_tensor", "torch.tensor")
_METHODS = ("clone", "cpu", "cuda", "detach", "double", "float", "to")


def discarded_result(source: Source) -> Iterator[Finding]:
    """A collective whose result or handle is discarded."""
    for call in source.hvd_calls(*OUT_OF_PLACE, *ASYNC, *OBJECTS):
        alone, name = isinstance(source.parents[call], ast.Expr), source.hvd(call.func)
        if not (alone or _is_unused(source, call)) or _expects_error(source, call):
            continue
        if name not in ASYNC and is_barrier(source, call):
            continue
        if name in ASYNC:
            message = f"the handle of {name}() is lost, so nothing waits for the result; pass it to hvd.synchronize()"
        else:
            kept = not _is_new(source, first_argument(call, "tensor"), follow=False)
            cure = f"assign the result, or call {name}_()" if kept and f"{name}_" in PUBLIC else "assign the result"
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
    """Return whether the result is used only in a discarded list or conversion, or in a local variable that nothing reads.

    A conversion is a call such as ``hvd.allreduce(x).item()``. Variables that are unused on purpose do not count, nor do
    variables and conversions in functions that measure or test.
    """
    parent = source.parents[call]
    if isinstance(parent, ast.ListComp):
        return parent.elt is call and isinstance(source.parents[parent], ast.Expr)
    if re.search(r"bench|perf|test|time|warm", getattr(source.scope(call), "name", ""), re.IGNORECASE):
        return False
    if isinstance(parent, ast.Attribute) and parent.attr in ("item", "tolist", *_METHODS):
        outer, is_tensor = source.parents[parent], source.hvd(call.func) not in OBJECTS
        is_called = isinstance(outer, ast.Call) and outer.func is parent
        return is_tensor and is_called and isinstance(source.parents[outer], ast.Expr)
    if not isinstance(parent, ast.Assign) or not isinstance(source.scope(call), Function):
        return False
    names = {target.id for target in parent.targets if isinstance(target, ast.Name)}
    if any(_UNUSED.match(name) for name in names):
        return False  # discarded on purpose, as after a call that serves as a barrier
    read = (node.id for node in source.nodes if isinstance(node, ast.Name) and not is_stored(node))
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
        if inner and not _BARRIER.search(function.name) and not _is_new(source, next(iter(given_values(call)), None)):
            message = f"the result of {function.name}(), which calls {inner}(), is lost; assign the result"
            yield Finding(call.lineno, "trap", message)


def _returned_collective(source: Source, function: Function) -> str:
    """Return the name of the collective whose result ``function`` returns; "" if it may do more, or has no parameter."""
    body = [part for part in function.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    simple = all(
        isinstance(part, ast.Return) or (isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name))
        for part in body
    )
    names = [name for call in calls_in(*body) if (name := source.hvd(call.func))]
    collectives = [name for name in names if name in OUT_OF_PLACE]
    returns = any(isinstance(part, ast.Return) and part.value is not None for part in body)
    only_these = set(names) <= {*collectives, *RANK_NAMES}
    return collectives[0] if simple and returns and collectives and only_these and function.args.args else ""


def _edits_to_use_result(source: Source, call: ast.Call, name: str) -> list[Edit]:
    """Return edits that make the call change its input, or wait for its handle; none if that may break the script."""
    value, layout = first_argument(call, "tensor"), source.layout
    if not isinstance(value, ast.Name | ast.Attribute) or not isinstance(call.func, ast.Attribute):
        return []
    if isinstance(value, ast.Name) and value.id in source.parameters(call):
        return []  # the caller of the function may still need the tensor's old value
    if _is_used_by_backward(source, call, value):
        return []  # backward may need this value, as it needs the result of sqrt(), so it must not change in place
    if name in ("allreduce", "broadcast"):
        end = layout.end(call.func)
        return [Edit(end, end, "_")]
    if name in ASYNC and name.endswith("_") and (wait := source.spell("synchronize", call)):
        return [Edit(layout.start(call), layout.start(call), f"{wait}("), Edit(layout.end(call), layout.end(call), ")")]
    return []


def _is_used_by_backward(source: Source, call: ast.Call, value: ast.expr) -> bool:
    """Return whether ``value`` is read after ``call`` and up to the last backward pass of the same function.

    For a broadcast, which scripts use to make a tensor equal on all ranks, only ``value.backward()`` counts.
    """
    nodes, text = source.scopes[source.scope(call)], ast.unparse(value)
    passes = {"backward", *(name for name, calls in source.called_names if "backward" in calls)}
    last = max(
        (one.end_lineno or 0 for one in nodes if isinstance(one, ast.Call) and last_name(one.func) in passes), default=0
    )
    start = (call.end_lineno or call.lineno, call.end_col_offset or 0)
    reads = [one for one in nodes if isinstance(one, ast.Name | ast.Attribute) and ast.unparse(one) == text]
    if source.hvd(call.func).startswith("broadcast"):
        reads = [one for one in reads if last_name(source.parents[one]) == "backward"]
    return any((one.lineno, one.col_offset) > start and one.lineno <= last and not is_stored(one) for one in reads)


def is_barrier(source: Source, call: ast.Call) -> bool:
    """Return whether the call may be only a barrier.

    The first rule that applies decides:

    1. If the input is a variable with a copy of another variable's value, and is read after the call: no.
    2. If the argument ``name``, or the name of the function around the call, is "barrier" or similar: yes.
    3. If the input is made from a variable, as in ``torch.tensor(loss)``, and not a rank, a size or a loop counter: no.
    4. If the input is a constant or a new tensor: yes. Otherwise, no.
    """
    value = first_argument(call, "obj") or keyword(call, "tensor")
    names = [keyword(call, "name"), *call.args[1:]]
    if _is_copy_read_later(source, call, value):
        return False
    if any(_BARRIER.search(ast.unparse(name)) for name in names if name is not None):
        return True
    scope = source.scope(call)
    if _BARRIER.search(getattr(scope, "name", "")) is not None:
        return True
    return _is_new(source, value) and not _holds_variable(source, value)


def _holds_variable(source: Source, value: ast.expr | None) -> bool:
    """Return whether ``value`` is ``torch.tensor(x)`` or ``torch.Tensor([x])`` of a variable ``x``, such as a loss.

    A rank, size, constant or loop counter ``x`` does not count: scripts send it only to make the ranks wait for each other.
    """
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _METHODS:
        value = value.func.value  # torch.tensor(x).cuda()
    content = first_argument(value, "data") if isinstance(value, ast.Call) else None
    if not isinstance(value, ast.Call) or content is None:
        return False
    name = source.name(value.func)
    elements = content.elts if isinstance(content, ast.List) else []
    if name not in _COPIES and not (name in _NEW_TENSORS and name.endswith("Tensor") and elements):
        return False  # torch.Tensor(n), for example, has n elements without values
    content = elements[0] if len(elements) == 1 else content
    if not isinstance(content, ast.Name | ast.Attribute) or source.constant(content) is not None:
        return False
    counts = [loop.target for loop in source.around(value, ast.For) if re.match(r"\w*range\(", ast.unparse(loop.iter))]
    if any(ast.unparse(content) == ast.unparse(count) for count in counts):
        return False  # most likely equal on all ranks, in a loop of calls that only warm up, for example
    return re.search("rank|size|world", ast.unparse(content), re.IGNORECASE) is None


def _is_copy_read_later(source: Source, call: ast.Call, value: ast.expr | None) -> bool:
    """Return whether ``value`` is made from the value of a variable, and is read after ``call`` in the same function.

    Return False if ``value`` is assigned again after ``call``, or if only its shape, dtype or device is read.
    """
    if not isinstance(value, ast.Name):
        return False
    assigned = [(given, at) for target, given, at in source.assignments if target == value.id]
    values = [given for given, at in assigned if not isinstance(at, ast.AugAssign)]
    if not values or not all(_copies_variable(source, one) for one in values):
        return False
    scope, later = source.scope(call), call.end_lineno or call.lineno
    same = [node for node in source.nodes if isinstance(node, ast.Name) and node.id == value.id and node.lineno > later]
    same = [node for node in same if source.scope(node) is scope]
    # ``value /= size`` reads the value, too.
    stored = any(is_stored(node) and not isinstance(source.parents[node], ast.AugAssign) for node in same)
    return not stored and any(getattr(source.parents[node], "attr", "") not in _OF_SHAPE for node in same)


def _copies_variable(source: Source, value: ast.expr) -> bool:
    """Return whether ``value`` is ``torch.tensor(x)`` with a variable in ``x``, or a call such as ``y.clone()``."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _METHODS:
        if isinstance(value.func.value, ast.Name):
            return True
        value = value.func.value
    copied = first_argument(value, "data") if isinstance(value, ast.Call) and source.name(value.func) in _COPIES else None
    return copied is not None and bool(variables_in(copied))


#: Attributes of a tensor that do not depend on its values.
_OF_SHAPE = ("device", "dtype", "element_size", "nbytes", "numel", "shape", "size")
_BARRIER = re.compile(r"barrier|\bwait|^synchroni[sz]e$", re.IGNORECASE)


def _is_new(source: Source, value: ast.expr | None, *, follow: bool = True) -> bool:
    """Return whether ``value`` is a constant or a new tensor; with ``follow``, also a variable with only such values."""
    if isinstance(value, ast.Name) and follow:
        values = source.values.get(value.id, ())
        return bool(values) and all(_is_new(source, one, follow=False) for one in values)
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Call):
        value = value.func.value  # torch.zeros(1).cuda()
    if isinstance(value, ast.Call):
        return source.name(value.func) in _NEW_TENSORS
    return isinstance(value, ast.Constant)
