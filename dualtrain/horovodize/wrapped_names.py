"""Names of the wrapped optimizers in all files of a program: one file may wrap an optimizer that another file uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from dualtrain.horovodize.nodes import last_name
from dualtrain.horovodize.source import Source, connect


def make_program(sources: Sequence[Source]) -> None:
    """Make ``sources`` one program: each of them gets the names of the optimizers that any of them wraps."""
    connect(sources)
    names = _wrapped_names(sources)
    for source in sources:
        source.wrapped = names


def _wrapped_names(sources: Sequence[Source]) -> set[str]:
    """Return the names of the variables of a program that hold an hvd.DistributedOptimizer.

    These are the variables to which an hvd.DistributedOptimizer is assigned. Copies of such a variable (not of an
    attribute) count too, and so do parameters to which it is passed, if the program defines the called function only once.
    But a name to which the program assigns an unwrapped optimizer counts neither as a copy nor as a parameter.
    """
    names = set().union(*(source.wrapped for source in sources))
    plain = {name for source in sources for name in source.plain_optimizers}
    defined: dict[str, list[list[str]]] = {}
    for source in sources:
        for name, parameters in source.definitions:
            defined.setdefault(name, []).append(parameters)
    defined_once = {name: found[0] for name, found in defined.items() if len(found) == 1}
    while True:
        found = {name for source in sources for name in _receiving(source, names, defined_once)} - plain
        if found <= names:
            return names
        names |= found


def _receiving(source: Source, names: set[str], parameters_of: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the parameters to which a call passes one of the variables ``names``, and copies of these variables."""
    for call in source.calls:
        parameters = parameters_of.get(last_name(call.func), [])
        yield from (p for p, value in zip(parameters, call.args, strict=False) if last_name(value) in names)
        keywords = ((word.arg, word.value) for word in call.keywords if word.arg in parameters)
        yield from (name for name, value in keywords if name and last_name(value) in names)
    for target, value, _ in source.assignments:
        if isinstance(value, ast.Name) and value.id in names:
            yield target.rpartition(".")[2]
