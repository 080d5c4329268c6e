"""Lines of the script that may explain a difference: findings of ``--check`` on code that can change numbers."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dualtrain.files import read_text
from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.rules import Rule, ranks, single_calls, steps, weights, wrapping
from dualtrain.horovodize.source import Source
from dualtrain.horovodize.wrapped_names import make_program

#: Rules on code that can change numbers, the likeliest cause first.
CAUSES: tuple[Rule, ...] = (
    steps.clip_before_synchronize,
    steps.scaler_before_synchronize,
    steps.second_reduction,
    steps.skipped_reduction,
    steps.zero_grad_before_step,
    ranks.collective_on_some_ranks,
    single_calls.half_precision,
    single_calls.adasum,
    single_calls.join_with_other_operations,
    wrapping.predivided_groups,
    weights.never_broadcast,
    weights.loaded_on_some_ranks,
    wrapping.frozen_after_wrapping,
    wrapping.group_after_wrapping,
    wrapping.checkpoint_before_wrapping,
    wrapping.optimizer_state,
)

#: Rules on code that reads or changes gradients while they are averaged: two runs on Horovod may then differ.
RACES: tuple[Rule, ...] = (steps.clip_before_synchronize, steps.scaler_before_synchronize, steps.skipped_reduction)

#: At most this many files of a program are read.
MOST_FILES = 100


def sources_of(program: Sequence[str]) -> dict[Path, Source]:
    """Read the files of a program, by path.

    Args:
        program: the script and its arguments, with ``-m`` before a module. Modules that the script imports from its own
            folder, directly or through other modules, are read too. With ``-m``, they are read from the current folder.

    Leave out files that cannot be read as Python, files whose code is nested too deeply, and files beyond ``MOST_FILES``:
    the comparison does not need their lines.
    """
    first = Path(*program[1].split(".")) if program[0] == "-m" else Path(program[0])
    start = [first.with_name(first.name + ".py"), first / "__main__.py"] if program[0] == "-m" else [first]
    sources = _sources(start, Path() if program[0] == "-m" else first.parent)
    make_program(list(sources.values()))
    return sources


def likely_causes(sources: Mapping[Path, Source], rules: Sequence[Rule] = CAUSES) -> list[str]:
    """Return the findings in a program that may explain a difference, each as "path:line: message".

    Args:
        sources: what :func:`sources_of` has returned.
        rules: the rules whose findings are returned, in this order; by default, the likeliest causes come first.
    """
    found = {path: _findings(source, rules) for path, source in sources.items()}
    return [f"{path}:{each}" for number in range(len(rules)) for path in found for each in found[path][number]]


def _findings(source: Source, rules: Sequence[Rule]) -> list[list[str]]:
    """Return, for each rule, the lines with a finding, and their messages.

    Leave out lines that run only without Horovod or with one rank, or never; return no lines if the code is nested too
    deeply.
    """
    try:
        off = Guards.of(source).lines_without_horovod()
        found = [sorted(rule(source), key=lambda each: each.line) for rule in rules]
    except RecursionError:
        return [[] for _ in rules]
    return [[f"{each.line}: {each.message}" for each in of_rule if each.line not in off] for of_rule in found]


def _sources(start: Sequence[Path], folder: Path) -> dict[Path, Source]:
    """Return the script and the modules that it imports from ``folder``, by path."""
    found: dict[Path, Source] = {}
    waiting = deque(start)
    while waiting and len(found) < MOST_FILES:
        path = waiting.popleft()
        if path in found or not path.is_file():
            continue
        with suppress(OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            found[path] = Source(read_text(path, "utf-8-sig"))
            waiting += _imports(found[path], path, folder)
    return found


def _imports(source: Source, path: Path, folder: Path) -> Iterator[Path]:
    """Yield the files that the imports in ``source`` may load; they need not exist.

    Absolute imports are looked up in ``folder``, and relative ones in the folder of ``path`` or above it.
    """
    for node in source.nodes:
        names: list[Path] = []
        if isinstance(node, ast.Import):
            names = [Path(folder, *alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # A module in a package imports relative to its folder: one dot is this folder, two dots are its parent.
            above = [path, *path.parents][min(node.level, len(path.parents))] if node.level else folder
            module = Path(above, *(node.module or "").split("."))
            names = [module, *(module / alias.name for alias in node.names)]
        for name in names:
            yield from (name.with_name(f"{name.name}.py"), name / "__init__.py") if name.name else ()
