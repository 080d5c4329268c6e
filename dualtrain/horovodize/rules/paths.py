"""Paths of files: whether each process may have its own path, for example with its rank or the time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.nodes import calls_in, given_values, is_stored, last_name
from dualtrain.horovodize.order import arguments, calls_of
from dualtrain.horovodize.rules.rank_values import loop_variables
from dualtrain.horovodize.source import Function, Source

_RANK_IN_PATH = re.compile(
    r"rank|size\(|getpid|uuid|host|node|worker|temp|time|\bnow|wandb|trial|procid|task_?id|random|gpu|device|devnull|/dev/",
    re.IGNORECASE,
)
#: Names of variables with results, which differ between ranks unless they are averaged.
_OWN_VALUE = re.compile(
    r"(^|_)(acc|accuracy|bleu|dice|f1|iou|loss|metric|perplexity|ppl|psnr|score|ssim)(\d*|_(avg|epoch|mean|test|val))$",
    re.IGNORECASE,
)
_BUFFERS = ("io.BytesIO", "io.StringIO")
#: Collectives whose result is the same on all ranks.
_SAME_RESULTS = ("allreduce", "allreduce_", "broadcast", "broadcast_", "broadcast_object")


def depends_on_process(source: Source, file: ast.expr, depth: int = 0) -> bool:
    """Return whether each process may have its own file: a memory buffer, or a path with the rank, the time or a metric.

    Also return True if the path may contain a value whose origin the script does not show (:func:`_is_unknown`), or if this
    origin is more than five definitions away.
    """
    if _RANK_IN_PATH.search(ast.unparse(file)) or depth > 5:
        return True
    if any(_is_unknown(source, node) for node in ast.walk(file)):
        return True
    if any(_OWN_VALUE.search(last_name(node)) for node in ast.walk(file)):
        return True
    values = [value for node in nodes_of(source, file) for value in origins(source, node) if not _is_common(source, value)]
    if any(isinstance(value, ast.Call) and source.name(value.func) in _BUFFERS for value in (file, *values)):
        return True
    called = (source.functions.get(last_name(call.func)) for call in calls_in(file))
    if any(_RANK_IN_PATH.search(ast.unparse(function)) for function in called if function is not None):
        return True
    return any(depends_on_process(source, value, depth + 1) for value in values)


def _is_unknown(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` is a name in a class, and the script does not show where its value comes from.

    The value may depend on the rank, for example if a subclass or a caller in another file passes it to ``__init__``.
    """
    if not isinstance(node, ast.Name | ast.Attribute) or not any(isinstance(up, ast.ClassDef) for up in source.above(node)):
        return False
    outer: ast.AST = node
    if isinstance(source.parents[node], ast.Attribute):
        outer = source.parents[node]  # ``self.path`` in ``self.path.format(epoch)``
    # Examine one node of each expression: ``self.path`` in ``self.path`` and in ``self.path.format(epoch)``, ``self`` in
    # ``self.path(epoch)``, and all of ``self.path.stem``.
    if (outer is not node) is not _is_called(source, outer):
        return False
    if source.name(node) or is_option(source, node) or any(True for _ in origins(source, node)):
        return False
    if not isinstance(node, ast.Name) or node.id in source.parameters(node):
        return True
    named = (one for one in source.mentions[node.id] if isinstance(one, ast.Name))
    return not any(map(is_stored, named))  # the script assigns it, for example as the variable of a loop


def _is_called(source: Source, node: ast.AST) -> bool:
    parent = source.parents[node]
    return isinstance(parent, ast.Call) and parent.func is node


def origins(source: Source, node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that ``node``, a variable or a parameter, may have as its value.

    For the variable of a loop or comprehension, yield what decides its values, such as the start of a ``range``.
    """
    if not isinstance(node, ast.Name | ast.Attribute):
        return
    text = ast.unparse(node)
    yield from source.values.get(text, ())
    opened = ((item.optional_vars, item.context_expr) for item in source.with_items(node))
    yield from (value for variable, value in opened if variable is not None and ast.unparse(variable) == text)
    loops = [loop for above in source.above(node) for loop in getattr(above, "generators", [above])]
    for loop in loops:
        if isinstance(loop, ast.For | ast.comprehension):
            sequences = (values for name, values in loop_variables(loop.target, loop.iter) if ast.unparse(name) == text)
            yield from (part for values in sequences for part in _deciding(source, values))
    scope = source.scope(node)
    if isinstance(node, ast.Name) and isinstance(scope, Function) and text in source.parameters(node):
        yield from (value for call in calls_of(source, scope) for value in arguments(source, scope, call, text))


def _deciding(source: Source, values: ast.expr) -> Iterator[ast.expr]:
    """Yield the parts of ``values``, the sequence of a loop, that may decide which values a rank's loop has.

    Leave out the end and the step of a ``range``, because ranges with the same start have values in common. Also leave out
    keyword arguments, such as ``disable`` of ``tqdm(range(9), disable=hvd.rank() > 0)``.
    """
    if not isinstance(values, ast.Call) or last_name(values.func) in source.functions:
        yield values
    elif last_name(values.func) in ("range", "trange"):
        yield from values.args[:-1][:1]
    else:
        owner = [values.func.value] if isinstance(values.func, ast.Attribute) and not source.name(values.func) else []
        for one in (*owner, *values.args):  # ``mine`` in ``mine.items()``
            yield from _deciding(source, one)


def _is_common(source: Source, value: ast.expr) -> bool:
    """Return whether all ranks certainly have the same ``value``, as in ``int(hvd.broadcast(x, root_rank=0).item())``."""
    while True:
        if isinstance(value, ast.Attribute) or (isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant)):
            value = value.value
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not given_values(value):
            value = value.func
        elif isinstance(value, ast.Call) and ast.unparse(value.func) == "int" and value.args:
            value = value.args[0]
        else:
            return isinstance(value, ast.Call) and source.hvd(value.func) in _SAME_RESULTS


def nodes_of(source: Source, path: ast.expr) -> list[ast.AST]:
    """Return the nodes of ``path``, without the variable ``args`` of options such as ``args.name``."""
    options = {part.value for part in ast.walk(path) if isinstance(part, ast.Attribute) and is_option(source, part)}
    return [node for node in ast.walk(path) if node not in options]


def is_option(source: Source, part: ast.expr) -> bool:
    """Return whether ``part`` is ``args.name`` with ``args = parser.parse_args()``, which is the same on all ranks."""
    values = source.values.get(ast.unparse(part.value), ()) if isinstance(part, ast.Attribute) else ()
    calls = [value.func for value in values if isinstance(value, ast.Call)]
    return any(isinstance(func, ast.Attribute) and func.attr in ("parse_args", "parse_known_args") for func in calls)
