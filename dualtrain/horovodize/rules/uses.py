"""Uses of samplers and loaders: whether anything reads them, and whether code in other files may."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dualtrain.horovodize.order import calls_of
from dualtrain.horovodize.source import Function, Source, last_name

#: Attributes and functions of a sampler or loader that read no samples.
_DESCRIBED_BY = {"batch_size", "dataset", "epoch", "num_replicas", "num_samples", "rank", "sampler", "set_epoch"}
_HARMLESS = {"id", "isinstance", "len", "logger", "print", "repr", "str", "type"}
_ITERATES = {"cycle", "enumerate", "islice", "iter", "list", "map", "next", "notebook_tqdm", "tqdm", "trange", "zip"}


def is_read(source: Source, call: ast.Call, depth: int = 0) -> bool:
    """Return whether anything may read samples by the sampler or loader that ``call`` makes."""
    if depth > 3:
        return True
    name = _name_of(source, call)
    if not name:
        outer = source.parents[call]
        outer = source.parents[outer] if isinstance(outer, ast.keyword) else outer
        return not isinstance(outer, ast.Call) or is_read(source, outer, depth + 1)
    found = list(_loads(source, name))
    if not found:  # a program that does not train may be a module that another file imports
        return not any(last_name(other.func) == "backward" for file in source.program for other in file.calls)
    return any(_reads(file, node, depth) for file, node in found)


def leaves_program(source: Source, call: ast.Call) -> bool:
    """Return whether code in other files may get the sampler or loader that ``call`` makes."""
    name = _name_of(source, call)
    target = next((target for target, value, _ in source.assignments if value is call), "")
    if not name and (loader := loader_around(source, call)) is not None:
        return leaves_program(source, loader)
    if not name or (target.startswith("self.") and _has_unknown_base(source, call)):
        return True
    for file, node in _loads(source, name):
        parent = file.parents[node]
        parent = file.parents[parent] if isinstance(parent, ast.keyword) else parent
        if isinstance(parent, ast.Call) and parent.func is not node:
            if _is_loader(file, parent):
                if leaves_program(file, parent) if _name_of(file, parent) else _is_returned(file, parent):
                    return True
            elif not _is_known(file, parent):
                return True
        elif _is_returned(file, node):
            return True
    return False


def loader_around(source: Source, call: ast.Call) -> ast.Call | None:
    """Return the loader in ``loader = DataLoader(data, sampler=call)``, if ``call`` is its sampler; else None."""
    word = source.parents[call]
    loader = source.parents[word] if isinstance(word, ast.keyword) and word.arg == "sampler" else None
    known = isinstance(loader, ast.Call) and _is_loader(source, loader) and _name_of(source, loader)
    return loader if known and isinstance(loader, ast.Call) else None


def _name_of(source: Source, call: ast.Call) -> str:
    """Return the last name of the variable to which ``call`` is assigned, also as a value of ``x if y else None``."""
    for target, value, _ in source.assignments:
        if value is call or (isinstance(value, ast.IfExp) and call in (value.body, value.orelse)):
            return target.rpartition(".")[2] if target.replace(".", "_").isidentifier() else ""
    return ""


def _loads(source: Source, name: str) -> Iterator[tuple[Source, ast.AST]]:
    files = [source, *(file for file in source.program if file.text != source.text)]
    for file in files:
        for node in file.nodes:
            if last_name(node) == name and not isinstance(getattr(node, "ctx", None), ast.Store):
                yield file, node


def _reads(source: Source, node: ast.AST, depth: int) -> bool:
    """Return whether samples may be read by this use of a variable."""
    parent = source.parents[node]
    if isinstance(parent, ast.Attribute):
        return parent.attr not in _DESCRIBED_BY
    if isinstance(parent, ast.Compare):
        return False  # sampler is None
    parent = source.parents[parent] if isinstance(parent, ast.keyword) else parent
    if isinstance(parent, ast.Call) and parent.func is not node:
        if last_name(parent.func) in _HARMLESS:
            return False
        return is_read(source, parent, depth + 1) if _is_loader(source, parent) else True
    return True


def _is_loader(source: Source, call: ast.Call) -> bool:
    return last_name(call.func).lower().endswith(("dataloader", "loader")) and last_name(call.func)[:1].isupper()


def _is_returned(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` is returned by a function that nothing in the script calls."""
    return any(isinstance(above, ast.Return) and not _is_called(source, above) for above in source.above(node))


def _is_known(source: Source, call: ast.Call) -> bool:
    """Return whether ``call`` calls a builtin that iterates, or a function or class of the program."""
    name = last_name(call.func)
    if name in _HARMLESS | _ITERATES or source.name(call.func).startswith(("torch.", "tqdm.")):
        return True
    if isinstance(call.func, ast.Attribute) and last_name(call.func.value) not in ("self", "cls", "super"):
        return False  # a method of any object
    for file in source.program:
        if name in file.functions or any(isinstance(node, ast.ClassDef) and node.name == name for node in file.nodes):
            return True
    return False


def _is_called(source: Source, statement: ast.AST) -> bool:
    scope = source.scope(statement)
    return not isinstance(scope, Function) or any(True for _ in calls_of(source, scope))


def _has_unknown_base(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` is in a class with a base class of another file."""
    own = {one.name for file in source.program for one in file.nodes if isinstance(one, ast.ClassDef)}
    bases = [base for above in source.above(node) if isinstance(above, ast.ClassDef) for base in above.bases]
    return any(last_name(base) not in own | {"object", "Module"} for base in bases)
