"""Change a script's imports of Horovod to imports of dualtrain: all of them, or none.

Exception: a guarded import (``is_guarded``) of a module other than ``horovod.torch`` stays, unless the ``try`` that guards
it also contains an import of ``horovod.torch``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.edits import Edit
from dualtrain.horovodize.imports import ENGINES, replacement_of
from dualtrain.horovodize.nodes import last_name, loaded_module
from dualtrain.horovodize.order import starts_ranks
from dualtrain.horovodize.rules.environment import IMPORT_ERRORS, is_guarded
from dualtrain.horovodize.source import Finding, Source

#: Statements that import modules, and calls of importlib.import_module.
_Import = ast.Import | ast.ImportFrom | ast.Call
_IMPORTS = ast.Import, ast.ImportFrom, ast.Call
#: Libraries that import Horovod themselves.
_IMPORTERS = re.compile(r"(ignite|lightning|pytorch_lightning)(\.|$)")


def import_edits(source: Source, initialized: bool) -> tuple[list[Finding], list[Finding]]:
    """Return two lists: findings with edits of the imports, and the finding that says why the imports must not change.

    At least one of the lists is empty.

    Args:
        source: the script.
        initialized: whether one of the given files calls ``init``. If not, the program has more files, one of which calls
            it. The imports then stay unchanged, because all files must import the same library.
    """
    imports = [node for node in source.nodes if isinstance(node, _IMPORTS) and _imports_horovod(node)]
    tried = {block for node in imports if _is_of_torch(node) for block in source.around(node, ast.Try)}
    lines = [
        node
        for node in imports
        if _is_of_torch(node) or not is_guarded(source, node) or source.catching_try(node, IMPORT_ERRORS) in tried
    ]
    changes = [(node, list(_edits(source, node))) for node in lines]
    stays = next((node for node, edits in changes if not edits), None)
    if not lines:
        return [], []
    as_one_process = any(map(starts_ranks, source.files))
    if any(_IMPORTERS.match(name) for name in source.imported_names):
        why = "a library that the script uses imports Horovod itself"
    elif not initialized:
        why = "hvd.init() is called in another file; give all files of the program at once"
    elif any(map(_asks_for_horovod, source.files)):
        why = "the program checks whether Horovod is installed, and may not call hvd.init() without it"
    elif stays is not None:
        why = f"`{ast.unparse(stays)}` has no certain replacement"
    else:
        how = "as one process" if as_one_process else "with plain torchrun (under horovodrun, dualtrain.hvd uses Horovod)"
        message = f"import dualtrain in place of Horovod, and start the script {how}"
        return [Finding(node.lineno, "differs", message, tuple(edits)) for node, edits in changes], []
    how = "as one process: python -m dualtrain.horovodize" if as_one_process else "with torchrun -m dualtrain.horovodize"
    message = f"the import of Horovod is not changed: {why}; start the script {how}"
    return [], [Finding((stays or lines[0]).lineno, "differs", message)]


def _asks_for_horovod(source: Source) -> bool:
    """Return whether the file checks if Horovod is installed: by a guarded ``import horovod``, or by looking it up."""
    for node in source.nodes:
        if isinstance(node, ast.Import) and any(alias.name == "horovod" for alias in node.names):
            if is_guarded(source, node):
                return True
        elif isinstance(node, ast.Constant) and node.value in ("horovod", "horovod.torch"):
            parent = source.parents[node]
            parent = source.parents[parent] if isinstance(parent, ast.keyword) else parent
            called = last_name(parent.func) if isinstance(parent, ast.Call) else ""
            if _ASKS.search(called) or (isinstance(parent, ast.Compare) and "sys.modules" in ast.unparse(parent)):
                return True
    return False


#: Names of functions that look for a module or package.
_ASKS = re.compile(r"find_(spec|loader|module)|version|distribution|require|available|installed", re.IGNORECASE)


def _is_of_torch(node: _Import) -> bool:
    return "horovod.torch" in ast.unparse(node) or "from horovod import torch" in ast.unparse(node)


def _imports_horovod(node: _Import) -> bool:
    if isinstance(node, ast.Call):
        return loaded_module(node) == "horovod.torch"
    if isinstance(node, ast.ImportFrom):
        return not node.level and (node.module or "").partition(".")[0] == "horovod"
    return any(alias.name.partition(".")[0] == "horovod" for alias in node.names)


def _edits(source: Source, node: _Import) -> Iterator[Edit]:
    """Yield the edits of one import; no edits if it has no certain replacement."""
    if isinstance(node, ast.Call):
        name = source.layout.segment(node.args[0])
        if "horovod.torch" in name:  # false if the string is written in parts: "horovod" ".torch"
            yield source.layout.replace(node.args[0], name.replace("horovod.torch", "dualtrain.hvd"))
        return
    if isinstance(node, ast.ImportFrom):
        yield from _edits_of_from(source, node)
        return
    replaced = []
    for alias in node.names:
        target = replacement_of(alias.name)
        if alias.name.partition(".")[0] != "horovod":
            continue
        as_written = source.layout.segment(alias).startswith(alias.name)  # not so in ``horovod . torch``
        if target is None or not as_written or (alias.asname is None and _uses_package(source)):
            return
        end = source.layout.start(alias) + len(alias.name)
        replaced.append(Edit(source.layout.start(alias), end, target))
    yield from replaced


def _edits_of_from(source: Source, node: ast.ImportFrom) -> Iterator[Edit]:
    layout, module = source.layout, node.module or ""
    start = layout.start(node)
    found = re.compile(rf"from\s+({re.escape(module)})\s+import\b").match(layout.segment(node))
    target = replacement_of(module)
    missing = module in ENGINES and any(alias.name != ENGINES[module][1] for alias in node.names)
    if found is None or missing:
        return
    if target is not None:
        yield Edit(start + found.start(1), start + found.end(1), target)
    elif module == "horovod" and [alias.name for alias in node.names] == ["torch"]:
        [alias] = node.names
        yield Edit(start + found.start(1), start + found.end(1), "dualtrain")
        yield layout.replace(alias, f"hvd as {alias.asname or 'torch'}")


def _uses_package(source: Source) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "horovod" for node in source.nodes)
