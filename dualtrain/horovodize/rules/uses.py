"""Uses of a sampler or loader: whether anything may read its samples, and whether code outside the program may get it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dualtrain.horovodize.nodes import arms, is_stored, last_name, sampler_of
from dualtrain.horovodize.order import calls_of
from dualtrain.horovodize.source import Function, Source

#: Attributes of a sampler or loader whose use reads no samples.
_DESCRIBED_BY = {"batch_size", "dataset", "epoch", "num_replicas", "num_samples", "rank", "sampler", "set_epoch"}
#: Functions that read no samples from their arguments.
_HARMLESS = {"id", "isinstance", "len", "logger", "print", "repr", "str", "type"}
#: torch's DataLoader. Rules that depend on its arguments test for these names.
LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
_ITERATES = {"cycle", "enumerate", "islice", "iter", "list", "map", "next", "notebook_tqdm", "tqdm", "trange", "zip"}


def is_distributed_sampler(source: Source, call: ast.Call) -> bool:
    """Return whether ``call`` makes a DistributedSampler of torch."""
    name = source.name(call.func)
    return name.startswith("torch.utils.data") and name.endswith(".DistributedSampler")


def is_read(source: Source, call: ast.Call, depth: int = 0) -> bool:
    """Return whether anything may read samples through the sampler or loader that ``call`` makes.

    Also return False if ``call`` is assigned to an attribute of another object, as in ``data.sampler = call``: rules report
    only what is read, and must not report this, because it is unknown how a library uses it.
    """
    if depth > 3:
        return True
    if _is_of_other_object(source, call):
        return False
    name = _name_of(source, call)
    if not name:
        outer = source.parents[call]
        if key := _key_of(outer, call):
            return _reads_entry(source, key)
        outer = source.parents[outer] if isinstance(outer, ast.keyword) else outer
        return not isinstance(outer, ast.Call) or is_read(source, outer, depth + 1)
    found = list(_loads(source, name))
    if not found:  # if the program does not train, another file may import it, and read the samples
        return not any(last_name(other.func) == "backward" for file in source.files for other in file.calls)
    return any(_reads(file, node, depth) for file, node in found)


def leaves_program(source: Source, call: ast.Call) -> bool:
    """Return whether code outside the program's files may get the sampler or loader that ``call`` makes."""
    name = _name_of(source, call)
    target = next((target for target, value, _ in source.assignments if value is call), "")
    if _is_of_other_object(source, call):
        return True
    if not name and (loader := loader_around(source, call)) is not None:
        return leaves_program(source, loader)
    if not name or (target.startswith("self.") and _has_unknown_base(source, call)):
        return True
    return _leaves_program(source, name, depth=0)


def _leaves_program(source: Source, name: str, depth: int) -> bool:
    """Return whether code outside the program's files may get the value of the variable ``name``."""
    for file, use in _loads(source, name):
        node = _with_container(file, use)
        if isinstance(entry := file.parents[node], ast.Subscript) and entry.value is node:
            node = entry
        parent = file.parents[node]
        if node is entry and not isinstance(parent, ast.Call | ast.For | ast.Attribute | ast.Return | ast.keyword):
            return True  # train = loaders["train"], for example; uses of this variable are not examined
        parent = file.parents[parent] if isinstance(parent, ast.keyword) else parent
        if isinstance(parent, ast.Attribute) and parent.attr in ("items", "values"):
            return True
        if isinstance(parent, ast.Assign) and parent.value is node:  # all = {"train": loader}
            copies = {last_name(target) for target in parent.targets} - {name, ""}
            if depth < 3 and any(_leaves_program(source, copy, depth + 1) for copy in copies):
                return True
        if isinstance(parent, ast.Call) and parent.func is not node:
            if _is_loader(parent):
                if leaves_program(file, parent) if _name_of(file, parent) else _is_returned_to_outside(file, parent):
                    return True
            elif not _is_known(file, parent) and _leaves_method(file, parent, node, depth):
                return True
        elif _is_returned_to_outside(file, node):
            return True
    return False


def _with_container(source: Source, node: ast.AST) -> ast.AST:
    """Return the outermost of the nested dicts, lists and tuples that contain ``node``; ``node`` if there is none."""
    while isinstance(source.parents[node], ast.Dict | ast.List | ast.Tuple):
        node = source.parents[node]
    return node


def loader_around(source: Source, call: ast.Call) -> ast.Call | None:
    """Return the loader in ``loader = DataLoader(data, sampler=call)``, if ``call`` is its sampler; else None."""
    above = source.parents[call]
    loader = source.parents[above] if isinstance(above, ast.keyword) else above
    is_sampler = isinstance(loader, ast.Call) and sampler_of(loader) is call
    return loader if is_sampler and _is_loader(loader) and _name_of(source, loader) else None  # type: ignore[arg-type, return-value]


def _is_of_other_object(source: Source, call: ast.Call) -> bool:
    """Return whether ``call`` is assigned to another object's attribute, as in ``data.sampler = call``."""
    targets = [target for target, value, _ in source.assignments if value is call]
    return any("." in target and target.partition(".")[0] not in ("self", "cls", "args") for target in targets)


def _name_of(source: Source, call: ast.Call) -> str:
    """Return the variable that holds the result of ``call``: its name after the last dot; "" if there is none.

    The variable may also be a dict of such results, as in ``samplers = {part: call for part in ["train", "val"]}``. A dict
    without a key for training does not count.
    """
    for target, value, _ in source.assignments:
        entries = [value.value] if isinstance(value, ast.DictComp) and _has_key_for_training(source, value) else []
        if call in (*entries, *arms(value)):
            return target.rpartition(".")[2] if target.replace(".", "_").isidentifier() else ""
    return ""


def _has_key_for_training(source: Source, comprehension: ast.DictComp) -> bool:
    keys = (part for value in source.possible_values(comprehension.generators[0].iter) for part in ast.walk(value))
    return any(isinstance(key, ast.Constant) and "train" in str(key.value).lower() for key in keys)


def _loads(source: Source, name: str) -> Iterator[tuple[Source, ast.AST]]:
    for file in source.files:
        for node in file.nodes:
            if last_name(node) == name and not is_stored(node):
                yield file, node


def _reads(source: Source, node: ast.AST, depth: int) -> bool:
    """Return whether ``node``, a use of a sampler or loader, may read samples."""
    parent = source.parents[node]
    if isinstance(parent, ast.Attribute):
        return parent.attr not in _DESCRIBED_BY
    if isinstance(parent, ast.Compare):
        return False  # for example, ``sampler is None``
    if key := _key_of(parent, node):
        return _reads_entry(source, key)
    keyword_name = parent.arg if isinstance(parent, ast.keyword) else None
    parent = source.parents[parent] if isinstance(parent, ast.keyword) else parent
    if isinstance(parent, ast.Call) and parent.func is not node:
        if last_name(parent.func) in _HARMLESS:
            return False
        if _is_loader(parent):
            return is_read(source, parent, depth + 1)
        return _reads_argument(source, parent, node, keyword_name, depth)
    return _reads_returned(source, node, depth)


def _key_of(parent: ast.AST, value: ast.AST) -> str:
    """Return "key" if ``parent`` is ``{"key": value}`` or ``d["key"] = value``, else an empty string."""
    key: ast.expr | None = None
    if isinstance(parent, ast.Dict) and value in parent.values:
        key = parent.keys[parent.values.index(value)]
    elif isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Subscript):
        key = parent.targets[0].slice
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""


def _reads_entry(source: Source, key: str) -> bool:
    """Return whether anything may read the entry ``key`` of a dict, by its key, by a computed key, or in a loop."""
    if any(".values()" in file.code or ".items()" in file.code or _has_computed_index(file) for file in source.files):
        return True
    return any(not _is_harmless_key(file, node) for file in source.files for node in file.mentions.get(key, ()))


def _has_computed_index(source: Source) -> bool:
    """Return whether the script reads ``x[index]`` and ``index`` may be a variable key.

    An index that is a constant, a slice, a tuple, or a value with a unary operator, such as ``-1``, does not count.
    """
    reads = (node for node in source.nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load))
    return any(not isinstance(node.slice, ast.Constant | ast.Slice | ast.Tuple | ast.UnaryOp) for node in reads)


def _is_harmless_key(source: Source, key: ast.AST) -> bool:
    """Return whether ``key``, a node that mentions a key, does not read the entry.

    That is so if it writes the entry, as in ``{"key": …}`` and ``d["key"] = …``, or if it is not a string, but a variable
    or an attribute with the same name, for example.
    """
    parent = source.parents[key]
    stored = isinstance(parent, ast.Subscript) and is_stored(parent)
    return not isinstance(key, ast.Constant) or stored or (isinstance(parent, ast.Dict) and key in parent.keys)


def _reads_argument(source: Source, call: ast.Call, node: ast.AST, keyword_name: str | None, depth: int) -> bool:
    """Return whether the function that gets the argument ``node`` may read samples through it."""
    found = [
        (file, file.functions[last_name(call.func)]) for file in source.files if last_name(call.func) in file.functions
    ]
    if len(found) != 1 or depth > 3 or (keyword_name is None and node not in call.args):
        return True
    file, function = found[0]
    if file.is_ambiguous(function.name) or not isinstance(call.func, ast.Name):
        return True
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    number = call.args.index(node) if keyword_name is None else -1  # type: ignore[arg-type]
    name = keyword_name or (names[number] if number < len(names) else "")
    if not name or any(isinstance(one, ast.Starred) for one in call.args):
        return True
    inside = [part for part in ast.walk(function) if isinstance(part, ast.Name) and part.id == name]
    return any(isinstance(part.ctx, ast.Load) and _reads(file, part, depth + 1) for part in inside)


def _reads_returned(source: Source, node: ast.AST, depth: int) -> bool:
    """Return whether anything may read samples through ``node``, which a function returns.

    Return True if ``node`` is not in a ``return`` statement.
    """
    above, number = source.parents[node], None
    if isinstance(above, ast.Tuple):
        number, above = above.elts.index(node), source.parents[above]  # type: ignore[arg-type]
    function = source.scope(node)
    if not isinstance(above, ast.Return) or not isinstance(function, Function) or depth > 3:
        return True
    calls = [(file, call) for file in source.files for call in file.calls if last_name(call.func) == function.name]
    if not calls or source.is_ambiguous(function.name):
        return True
    return any(_reads_result(file, call, number, depth) for file, call in calls)


def _reads_result(source: Source, call: ast.Call, number: int | None, depth: int) -> bool:
    """Return whether anything may read samples through the result of ``call``, or through its element ``number``."""
    statement = source.parents[call]
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return not isinstance(statement, ast.Expr)
    target = statement.targets[0]
    if number is not None:
        if not isinstance(target, ast.Tuple) or any(isinstance(part, ast.Starred) for part in target.elts):
            return True
        if number >= len(target.elts):
            return True
        target = target.elts[number]
    if not isinstance(target, ast.Name):
        return True
    return any(_reads(file, node, depth + 1) for file, node in _loads(source, target.id) if _sees(file, node, target))


def _sees(source: Source, node: ast.AST, target: ast.AST) -> bool:
    """Return whether ``node`` may be the variable that ``target`` assigns, and not a variable of another function."""
    if target not in source.parents:
        return True  # ``target`` is in another file
    home, user = source.scope(target), source.scope(node)
    if not isinstance(node, ast.Name) or home is user:
        return True
    if isinstance(home, Function) and home not in source.above(user):
        return False
    stores = (one for one in ast.walk(user) if isinstance(one, ast.Name) and is_stored(one))
    return node.id not in source.parameters(node) and all(one.id != node.id for one in stores)


def _is_loader(call: ast.Call) -> bool:
    """Return whether ``call`` makes a loader, perhaps of another library than torch."""
    return last_name(call.func).lower().endswith(("dataloader", "loader")) and last_name(call.func)[:1].isupper()


def _is_returned_to_outside(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` is returned by a function that nothing in the script calls."""
    return any(isinstance(above, ast.Return) and not _is_called(source, above) for above in source.above(node))


def _is_known(source: Source, call: ast.Call) -> bool:
    """Return whether ``call`` calls code of the program, of torch or tqdm, or a function in _HARMLESS or _ITERATES."""
    name = last_name(call.func)
    if name in _HARMLESS | _ITERATES or source.name(call.func).startswith(("torch.", "tqdm.")):
        return True
    if isinstance(call.func, ast.Attribute) and last_name(call.func.value) not in ("self", "cls", "super"):
        return False  # a method of an object whose class may be unknown
    return any(name in file.functions or any(node.name == name for node in file.classes) for file in source.files)


def _leaves_method(source: Source, call: ast.Call, node: ast.AST, depth: int) -> bool:
    """Return whether code outside the program may get the argument ``node`` of ``call``, perhaps through a method.

    Return False only if ``call`` calls a method of one of the script's classes, and this method keeps ``node`` in the
    program.
    """
    owner, name = getattr(call.func, "value", call.func), last_name(call.func)
    methods = [
        (file, part)
        for file in source.files
        for one in file.classes
        if source.is_instance(owner, one)
        for part in one.body
        if isinstance(part, Function) and part.name == name
    ]
    if len(methods) != 1 or depth > 2 or _has_unknown_base(*methods[0]):
        return True
    file, method = methods[0]
    found = [each for each in file.positional(method) if file.argument(method, call, each) is node]
    return not found or _leaves_program(file, found[0], depth + 1)


def _is_called(source: Source, statement: ast.AST) -> bool:
    scope = source.scope(statement)
    return not isinstance(scope, Function) or any(True for _ in calls_of(source, scope))


def _has_unknown_base(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` is in a class with a base class that is neither ``object``, ``Module`` nor in the program."""
    known = {one.name for file in source.files for one in file.classes} | {"object", "Module"}
    bases = [base for above in source.around(node, ast.ClassDef) for base in above.bases]
    return any(last_name(base) not in known for base in bases)
