"""Definitions of ``dualtrain.hvd.mpi_ops``: a text search for ``def NAME`` finds every function."""

from __future__ import annotations

import ast
import inspect

import pytest

from tests.hvd.worlds import ours
from tests.pool import ROOT

FOLDER = ROOT / "dualtrain" / "hvd"
DEFINED = {
    node.name: path
    for path in sorted(FOLDER.glob("*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef)
}
FAMILY = ["allreduce", "allreduce_async", "allreduce_", "allreduce_async_"]


def functions():
    module = ours().mpi_ops
    return {name: value for name in module.__all__ if inspect.isfunction(value := getattr(module, name))}


def test_every_public_function_has_a_def_of_the_same_name():
    found = functions()
    assert {"broadcast_async_", "grouped_allgather", "join", "rank"} <= set(found)
    for name, value in found.items():
        assert name in DEFINED, f"no 'def {name}' in {FOLDER}"
        assert inspect.getsource(value).startswith(f"def {name}("), (
            f"{name} is an alias of a function with a different name"
        )


@pytest.mark.parametrize("name", [*FAMILY, *(f"grouped_{name}" for name in FAMILY)])
def test_allreduce_functions_are_defined_in_mpi_ops_with_horovods_parameters(name):
    assert functions()[name].__module__ == "dualtrain.hvd.mpi_ops"
    expected = ["average", "name", "compression", "op", "prescale_factor", "postscale_factor", "process_set"]
    if "async" in name or name.endswith("_"):
        expected.remove("compression")
    assert list(inspect.signature(functions()[name]).parameters)[1:] == expected  # the parameters are in Horovod's order
