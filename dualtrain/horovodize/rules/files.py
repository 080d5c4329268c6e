"""Rules on files that several ranks write at the same time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.edits import Edit
from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.names import COLLECTIVES
from dualtrain.horovodize.nodes import (
    argument_at,
    arms,
    first_argument,
    given_values,
    is_bool,
    keyword,
    last_name,
    names_in,
)
from dualtrain.horovodize.order import ENTRY_POINTS, arguments, calls_of, nodes_after, runs_on_driver
from dualtrain.horovodize.rules.paths import depends_on_process, is_option, nodes_of, origins
from dualtrain.horovodize.source import Finding, Function, Source

#: Functions that write a file, each with the position and the name of its path argument.
_WRITERS = {
    "torch.save": (1, "f"),
    "numpy.save": (0, "file"),
    "numpy.savez": (0, "file"),
    "numpy.savez_compressed": (0, "file"),
    "numpy.savetxt": (0, "fname"),
    "matplotlib.pyplot.savefig": (0, "fname"),
}


def saved_by_all_ranks(source: Source) -> Iterator[Finding]:
    """A file that every rank writes."""
    if not (source.wraps or source.hvd_calls("init")):
        return
    guards = Guards.of(source)
    for call in source.calls:
        file = _written(source, call)
        if file is None or runs_on_driver(source, call):
            continue
        if source.name(call.func) != "torch.save" and not runs_after_init(source, call):
            continue
        if depends_on_process(source, file) or _may_run_on_some_ranks(source, guards, call):
            continue
        edits = _save_on_rank_zero(source, call, file)
        message = "all ranks write this file, perhaps at the same time; write it on rank 0 only: `if hvd.rank() == 0:`"
        yield Finding(call.lineno, "trap", message, tuple(edits))


def _written(source: Source, call: ast.Call) -> ast.expr | None:
    """Return the argument of ``call`` that is the file to write; None if ``call`` writes no file, or appends."""
    name = source.name(call.func)
    if isinstance(call.func, ast.Name) and call.func.id == "open" and not name:
        mode = argument_at(call, 1, "mode")
        writes = isinstance(mode, ast.Constant) and isinstance(mode.value, str) and "w" in mode.value
        return first_argument(call, "file") if writes else None
    if isinstance(call.func, ast.Attribute) and call.func.attr == "to_csv" and not name:
        mode, path = keyword(call, "mode"), first_argument(call, "path_or_buf")
        appends = isinstance(mode, ast.Constant) and "a" in str(mode.value)
        return path if path is not None and _has_text(path) and not appends else None
    if name not in _WRITERS:
        return None
    file = argument_at(call, *_WRITERS[name])
    return file if name == "torch.save" or (file is not None and _is_path(source, file)) else None


def _is_path(source: Source, file: ast.expr) -> bool:
    """Return whether ``file`` is a path, and not a file that is already open."""
    opened = (item.optional_vars for item in source.with_items(file))
    if ast.unparse(file) in [ast.unparse(variable) for variable in opened if variable is not None]:
        return False
    return any(_has_text(value) for value in (file, *origins(source, file)))


def _has_text(value: ast.expr) -> bool:
    return any(isinstance(node, ast.Constant) and isinstance(node.value, str) for node in ast.walk(value))


def _save_on_rank_zero(source: Source, call: ast.Call, file: ast.expr) -> list[Edit]:
    block = _block_of_file(source, call)
    statement = block or source.statement(call)
    path = _written(source, block.items[0].context_expr) or file if block else file  # type: ignore[arg-type]
    saves = _only_saves(source, block) if block else source.name(call.func) == "torch.save" and not _is_open(source, file)
    rank = source.spell("rank", call)
    alone = block is not None or (isinstance(statement, ast.Expr) and statement.value is call)
    gathers = any(source.hvd(node) in COLLECTIVES for node in ast.walk(statement))
    if not saves or not alone or gathers or not rank or not source.hvd_calls("init"):
        return []
    if any(statement in nodes_after(source, shutdown) for shutdown in source.hvd_calls("shutdown")):
        return []  # rank() would raise an error
    if _is_read_by_all(source, path):
        return []  # without a common file system, each host needs the file
    return source.layout.wrap(statement, f"if {rank}() == 0:")


def _block_of_file(source: Source, call: ast.Call) -> ast.With | None:
    """Return the ``with open(path, "wb") as file:`` that ``call``, an ``open`` or ``torch.save``, belongs to, or None."""
    statement = source.statement(call)
    block = statement if isinstance(statement, ast.With) else source.parents[statement]
    if not isinstance(block, ast.With) or len(block.items) != 1:
        return None
    opened, variable = block.items[0].context_expr, block.items[0].optional_vars
    file = argument_at(call, 1, "f")
    mine = opened is call or (variable is not None and file is not None and ast.unparse(file) == ast.unparse(variable))
    return block if mine and isinstance(opened, ast.Call) and _written(source, opened) is not None else None


def _only_saves(source: Source, block: ast.With) -> bool:
    """Return whether ``block`` consists of calls of torch.save."""
    calls = [part.value if isinstance(part, ast.Expr) else part for part in block.body]
    return all(isinstance(call, ast.Call) and source.name(call.func) == "torch.save" for call in calls)


def _is_open(source: Source, file: ast.expr) -> bool:
    """Return whether ``file`` is perhaps an open file.

    If so, it is not enough to save on rank 0 only: the other ranks still open the file, and so erase what rank 0 writes.
    """
    return any(isinstance(value, ast.Call) and last_name(value.func) == "open" for value in (file, *origins(source, file)))


def _is_read_by_all(source: Source, file: ast.expr) -> bool:
    """Return whether perhaps all ranks read the file."""
    words = _words(source, file)
    return any(
        bool(words & _words(one, read)) and not Guards.of(one).looks_like_one_rank(call)
        for one in source.files
        for call in one.calls
        for read in _read_path(one, call)
    )


def _read_path(source: Source, call: ast.Call) -> list[ast.expr]:
    """Return the expressions that may be the path if ``call`` needs an existing file; otherwise an empty list.

    The path is ``path`` in ``path.rename(new)``, or the first positional argument, or any keyword argument if ``call`` has
    no positional one.
    """
    func, number = call.func, len(call.args)
    if isinstance(func, ast.Attribute) and not source.name(func) and (func.attr, number) in _METHODS:
        return [func.value]
    reads = _READS.search(last_name(func)) or _MOVES.match(source.name(func))
    return (call.args[:1] or given_values(call)) if reads else []


#: Names of functions that read a file, or send it elsewhere.
_READS = re.compile(r"(^|_)(load|restore|resume|upload|log_artifact)(?!_state_dict)(_|$)|from_pretrained$")
#: Methods of pathlib.Path that need the file, with their numbers of arguments. ``str.replace``, which has two arguments,
#: does not match.
_METHODS = {("rename", 1), ("replace", 1), ("stat", 0), ("unlink", 0)}
#: Functions that need an existing file as their first argument.
_MOVES = re.compile(r"shutil\.(copy\w*|move)$|os\.(link|remove|rename|renames|replace|symlink|unlink|path\.getsize)$")


def _words(source: Source, path: ast.expr) -> set[str]:
    """Return the names and string constants in the expression of a path.

    Leave out ``os``, ``join`` and other common names, and the variable with the parsed options.
    """
    nodes = nodes_of(source, path)
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return texts | {last_name(node) for node in nodes if last_name(node)} - {"args", "os", "path", "join", "format", "self"}


def _may_run_on_some_ranks(source: Source, guards: Guards, node: ast.AST, depth: int = 0) -> bool:
    """Return whether ``node`` perhaps runs on some ranks only.

    Also True if no call of its function is found, unless this function is one of ``ENTRY_POINTS``.
    """
    if guards.looks_like_one_rank(node) or _is_in_own_folder(source, node) or _is_under_unknown_flag(source, node):
        return True
    scope = source.scope(node)
    if not isinstance(scope, Function):
        return False
    flags = {name for test in guards.tests(node) for name in names_in(test)} & source.parameters(node)
    given = (value for name in flags for call in calls_of(source, scope) for value in arguments(source, scope, call, name))
    if any(map(guards.names_one_rank, given)):
        return True
    defined = (source.functions.get(last_name(one)) for one in scope.decorator_list)
    if any(_RANK_DECORATOR.search(ast.unparse(one)) for one in (*scope.decorator_list, *defined) if one is not None):
        return True
    calls = list(calls_of(source, scope))
    own = source.parents[scope]
    if isinstance(own, ast.ClassDef):
        if _is_overridden(source, scope) or not _runs_in_objects_of_all_ranks(source, guards, node, own):
            return True
        calls = [call for call in calls if guards.runs_whenever(call, source.scope(call))]
    elif scope.name in ENTRY_POINTS and not calls:
        return False  # passed to a launcher, which calls it on all ranks
    return not calls or depth > 3 or all(_may_run_on_some_ranks(source, guards, call, depth + 1) for call in calls)


def _runs_in_objects_of_all_ranks(source: Source, guards: Guards, node: ast.AST, cls: ast.ClassDef) -> bool:
    """Return whether no condition decides if objects of ``cls`` are made, or if the method around ``node`` runs ``node``.

    The method must be ``__init__``, or its name must be unique. A condition such as ``if self.saver:`` gives False: it
    often holds on one rank only, although it does not name the rank.
    """
    function = source.scope(node)
    name = getattr(function, "name", "")
    if not guards.runs_whenever(node, function) or not (name == "__init__" or source.is_only(name)):
        return False
    made = [call for call in source.calls if last_name(call.func) == cls.name]
    return all(guards.runs_whenever(call, source.scope(call)) for call in made)


def _is_overridden(source: Source, function: Function) -> bool:
    """Return whether ``function`` is a method that a subclass, or another class with the same name, defines too.

    The program may use Horovod only with objects of the subclass. These objects perhaps do not run ``function``, or run it
    by ``super()`` on some ranks only.
    """
    own = source.parents[function]
    if not isinstance(own, ast.ClassDef):
        return False
    classes = [node for file in source.files for node in file.classes]
    below = {own.name}
    while more := {one.name for one in classes if below & {last_name(base) for base in one.bases}} - below:
        below |= more
    methods = [part.name for one in classes if one.name in below for part in one.body if isinstance(part, Function)]
    return methods.count(function.name) > 1


def _is_in_own_folder(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` is in a ``with`` statement by which Ray Tune gives each rank its own folder."""
    return any("distributed_checkpoint_dir" in ast.unparse(item.context_expr) for item in source.with_items(node))


def _is_under_unknown_flag(source: Source, node: ast.AST) -> bool:
    """Return whether the write depends on a variable such as ``save`` that the script does not assign.

    Its value may depend on the rank. The script's own options (``args.save``) do not count.
    """
    tests = [test.operand if isinstance(test, ast.UnaryOp) else test for test in Guards.of(source).tests(node)]
    parts = [part for test in tests for part in (test.values if isinstance(test, ast.BoolOp) else [test])]
    unknown = [
        part for part in parts if isinstance(part, ast.Name | ast.Attribute) and ast.unparse(part) not in source.values
    ]
    return any(_WRITES.search(last_name(part)) for part in unknown if not is_option(source, part))


_WRITES = re.compile(r"save|log|writ|dump|record|checkpoint|ckpt", re.IGNORECASE)
_RANK_DECORATOR = re.compile(r"rank|master|main_process", re.IGNORECASE)


def runs_after_init(source: Source, node: ast.AST) -> bool:
    """Return whether the source shows that ``node`` runs after ``hvd.init()``."""
    return node in source.once(_nodes_after_init)


def _nodes_after_init(source: Source) -> frozenset[ast.AST]:
    return frozenset(later for init in source.hvd_calls("init") for later in nodes_after(source, init))


def events_of_all_ranks(source: Source) -> Iterator[Finding]:
    """SummaryWriters of all ranks that write to the same folder."""
    guards = Guards.of(source)
    for target, call, _ in source.assignments:
        if not isinstance(call, ast.Call) or not _SUMMARY.match(source.name(call.func)) or not source.wraps:
            continue
        folder = [*call.args[:1], *(word.value for word in call.keywords)]
        if any(depends_on_process(source, value) for value in folder) or _may_run_on_some_ranks(source, guards, call):
            continue
        added = [other for other in source.calls if _adds_to(other, target)]
        everywhere = [other for other in added if not _may_run_on_some_ranks(source, guards, other)]
        if everywhere and len(source.values[target]) == 1 and runs_after_init(source, call):
            message = (
                "every rank writes its own values to this folder, and TensorBoard shows them as one run; create the "
                "SummaryWriter and add values on rank 0 only"
            )
            yield Finding(call.lineno, "trap", message)


_SUMMARY = re.compile(r"(torch\.utils\.tensorboard|tensorboardX)\.(\w+\.)*SummaryWriter$")


def _adds_to(call: ast.Call, writer: str) -> bool:
    func = call.func
    return isinstance(func, ast.Attribute) and func.attr.startswith("add_") and ast.unparse(func.value) == writer


def downloaded_by_all_ranks(source: Source) -> Iterator[Finding]:
    """A data set of torchvision that all ranks download to the same folder; at most one finding."""
    guards = Guards.of(source)
    downloads = [call for call in source.calls if _downloads(source, call)]
    nodes = (node for call in downloads for node in (call, *_called(source, call), *_callers(source, call)))
    if any(map(guards.looks_like_one_rank, nodes)):
        return  # most likely, one rank downloads first, and the other ranks find its files
    for call in downloads:
        folder = first_argument(call, "root")
        if folder is None or depends_on_process(source, folder) or _is_locked(source, call) or not source.wraps:
            continue
        if (
            runs_after_init(source, call)
            and not runs_on_driver(source, call)
            and not _may_run_on_some_ranks(source, guards, call)
        ):
            message = (
                "all ranks download to the same folder at the same time if the files are missing; download on local rank "
                "0 first, and call hvd.barrier() on all ranks"
            )
            yield Finding(call.lineno, "trap", message)
            return


def _callers(source: Source, node: ast.AST) -> list[ast.Call]:
    """Return the calls of the function that contains ``node``."""
    scope = source.scope(node)
    return list(calls_of(source, scope)) if isinstance(scope, Function) else []


def _downloads(source: Source, call: ast.Call) -> bool:
    if not is_bool(argument_at(call, 4, "download"), True):
        return False
    return any(source.name(value).startswith("torchvision.datasets.") for value in _called(source, call))


def _called(source: Source, call: ast.Call) -> list[ast.expr]:
    """Return what ``call`` may call: the expression, or the values of a variable.

    For a local variable, the values in its function count; for a parameter, also what the function's calls pass.
    """
    func, scope = call.func, source.scope(call)
    found = [func, *source.local_values(func)]
    if isinstance(scope, Function) and isinstance(func, ast.Name) and func.id in source.parameters(call):
        given = [source.argument(scope, each, func.id) for each in _callers(source, call)]
        found = [*found[1:], *(value for each in given for value in source.possible_values(each))]
    return [arm for value in found for arm in arms(value)]


def _is_locked(source: Source, call: ast.Call) -> bool:
    items = map(ast.unparse, source.with_items(call))
    return any(re.search(r"lock|first|rank|main|once", item, re.IGNORECASE) for item in items)
