"""Modules of dualtrain and the names that they define, read from their files, because ``--check`` does not import torch."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from symtable import symtable

from dualtrain.horovodize.names import PUBLIC

_ROOT = Path(__file__).parents[2]
#: Modules of dualtrain.hvd that define its public functions.
_FUNCTION_MODULES = ("basics", "forms", "functions", "gather_ops", "mpi_ops", "optimizer", "process_sets")


def file_of(module: str) -> Path | None:
    """Return the file of ``module``, or ``None`` if there is no such module in dualtrain."""
    path = _ROOT.joinpath(*module.split("."))
    candidates = path / "__init__.py", path.with_suffix(".py")
    return next((file for file in candidates if file.is_file()), None)


@cache
def defined_in(module: str) -> frozenset[str]:
    """Return the names that ``module`` defines or imports; empty if there is no such module."""
    file = file_of(module)
    if file is None:
        return frozenset()
    symbols = symtable(file.read_text(encoding="utf-8"), str(file), "exec").get_symbols()
    names = {one.get_name() for one in symbols if one.is_assigned() or one.is_imported()}
    return frozenset(names | PUBLIC if module == "dualtrain.hvd" else names)  # dualtrain.hvd imports * from mpi_ops


@cache
def parameters() -> dict[str, set[str]]:
    """Return the public functions of ``dualtrain.hvd`` by name, each with the names of its parameters."""
    files = (_ROOT / "dualtrain" / "hvd" / f"{module}.py" for module in _FUNCTION_MODULES)
    nodes = (node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body)
    return {
        node.name: {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.name in PUBLIC
    }
