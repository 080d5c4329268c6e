"""Changes of gradients, and of parameters by their gradients, that a script makes itself: ``p.grad.clamp_(-1, 1)``."""

from __future__ import annotations

import ast
import re

from dualtrain.horovodize.averaging import averages_in_step, is_collective, synchronizing_functions
from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.nodes import calls_in, keyword, last_name, variables_in
from dualtrain.horovodize.source import Source

#: Functions of torch that clip gradients.
CLIPS = ("clip_grad_norm", "clip_grad_norm_", "clip_grad_value_")
#: Methods that change a tensor. Zeroing does not count: scripts zero all gradients before backward, and may zero the
#: gradients of frozen parameters.
_METHODS = ("add_", "clamp_", "clamp_max_", "clamp_min_", "clip_", "div_", "mul_", "nan_to_num_", "sub_")
#: More methods that change a tensor. :func:`is_change` leaves them out, because scripts also use them to write
#: averaged values into gradients.
_MORE_METHODS = ("addcdiv_", "addcmul_", "copy_")
#: Names of functions that run backward passes or steps, and so may average gradients.
_PASSES = re.compile(r"backward|^step$")
#: Attributes and methods of a tensor whose results do not depend on the tensor's elements.
_METADATA = re.compile(r"(device|dim|dtype|is_\w+|layout|ndim|new_\w+|numel|shape|size|type)$")


def is_change(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` changes the gradient ``p.grad`` of a parameter, and calls no function that may average it.

    ``node`` may be a call such as ``p.grad.mul_(2)`` or ``torch.clamp_(p.grad, -1, 1)``; an augmented assignment, such as
    ``p.grad *= 2``; or an assignment to ``p.grad``, or a call with ``out=p.grad``, that reads a gradient.
    """
    if isinstance(node, ast.Call):
        changed, out = list[ast.AST](), keyword(node, "out")
        if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            changed = [*node.args[:1]] if source.name(node.func).startswith("torch.") else [node.func.value]
        elif out is not None and _is_gradient(source, out):
            changed = [part for value in node.args for part in ast.walk(value)]
        changes = any(_is_gradient(source, one) for one in changed)
    elif isinstance(node, ast.AugAssign):
        changes = _is_gradient(source, node.target)
    elif isinstance(node, ast.Assign) and any(_is_gradient(source, target) for target in node.targets):
        changes = any(_is_gradient(source, part) for part in ast.walk(node.value))
    else:
        changes = False
    return changes and not _may_average(node)


def is_update(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` changes a parameter by its own gradient, as in ``p.data.add_(p.grad, alpha=-0.1)``.

    ``node`` may be a call of a method, an augmented assignment, or an assignment to ``p.data``. It must use elements of the
    gradient, and must call no function that may average gradients.
    """
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in (*_METHODS, *_MORE_METHODS)
    ):
        target, used = node.func.value, [*node.args, *(word.value for word in node.keywords)]
    elif isinstance(node, ast.AugAssign):
        target, used = node.target, [node.value]
    elif isinstance(node, ast.Assign) and last_name(node.targets[0]) == "data":
        target, used = node.targets[0], [node.value]
    else:
        return False
    if isinstance(target, ast.Attribute) and target.attr == "data":
        target = target.value
    gradients = (part for value in used for part in ast.walk(value) if isinstance(part, ast.Attribute))
    own = (part for part in gradients if ast.unparse(part) == f"{ast.unparse(target)}.grad" and _is_gradient(source, part))
    return any(_reads_elements(source, part) for part in own) and not _may_average(node)


def _reads_elements(source: Source, gradient: ast.Attribute) -> bool:
    """Return whether the expression around ``gradient`` uses its elements.

    False for ``p.grad.shape``, ``torch.randn_like(p.grad)``, ``p.grad is None`` and similar expressions.
    """
    node: ast.AST = gradient
    while isinstance(above := source.parents[node], ast.Attribute) and above.attr == "data":
        node = above
    if isinstance(above, ast.Attribute):
        return not _METADATA.match(above.attr)
    if isinstance(above, ast.Compare):
        return not isinstance(above.ops[0], ast.Is | ast.IsNot)
    return not (isinstance(above, ast.Call) and last_name(above.func).endswith("_like"))


def changing_functions(source: Source) -> set[str]:
    """Return the names of the program's functions that change or clip gradients and do not average them.

    Leave out methods, names that a file defines several times or also assigns, names in ``CLIPS``, and changes that are
    made only without Horovod or with one rank.
    """
    return {name for file in source.files for name in file.once(_changing_functions_of)}


def _changing_functions_of(file: Source) -> set[str]:
    found = set[str]()
    if ".grad" not in file.code and "clip_grad_" not in file.code:
        return found
    averaging = file.once(synchronizing_functions)
    for name, function in file.functions.items():
        certain = name not in (*CLIPS, *averaging) and not file.is_ambiguous(name) and not _may_average(function)
        changes = (node for node in ast.walk(function) if _clips(node) or is_change(file, node)) if certain else ()
        if not all(map(Guards.of(file).is_without_horovod, changes)):
            found.add(name)
    return found


def _clips(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) in CLIPS


def _may_average(node: ast.AST) -> bool:
    """Return whether ``node`` contains a call of a function that, judging by its name, may average gradients."""
    called = (last_name(call.func) for call in calls_in(node))
    return any(is_collective(name) or averages_in_step(name) or _PASSES.search(name) for name in called)


def _is_gradient(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` is ``p.grad``, ``p.grad.data`` or a part of them, and the names show that p is a parameter.

    ``p`` must be ``….weight`` or ``….bias``, or the variable of a loop over an expression that contains "param".
    """
    while isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
        node = node.value
    if not isinstance(node, ast.Attribute) or node.attr != "grad":
        return False
    if last_name(node.value) in ("bias", "weight") and isinstance(node.value, ast.Attribute):
        return True
    named = (loop for loop in source.around(node, ast.For) if last_name(node.value) in variables_in(loop.target))
    return isinstance(node.value, ast.Name) and any("param" in ast.unparse(loop.iter) for loop in named)
