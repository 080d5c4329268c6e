"""Modules of dualtrain and the names that they define, read from their files: ``--check`` does not import torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from symtable import symtable

from dualtrain.horovodize.names import PUBLIC

_ROOT = Path(__file__).parents[2]


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
