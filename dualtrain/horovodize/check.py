"""``python -m dualtrain.horovodize --check FILE…``: list mistakes, and lines that work differently than on Horovod."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from dualtrain.console import print_error, show
from dualtrain.errors import UserError
from dualtrain.horovodize.folders import find_sources
from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.rules import RULES
from dualtrain.horovodize.source import Finding, Source
from dualtrain.horovodize.unused import lines_of_unused

#: Enough for ast.unparse, which makes a few nested calls for each level of an expression. The class ``Source`` accepts
#: expressions of about 1000 levels at most.
_RECURSION_LIMIT = 20_000
_LEVELS = ("trap", "unsupported", "differs")


def check(files: Sequence[str]) -> int:
    """Print the findings in ``files``; for a folder, in its files that import horovod or its replacement.

    Return the exit status, which is 2 after an error.
    """
    options = [name for name in files if name.startswith("-")]
    try:
        if options or not files:
            what = f"unknown option {options[0]!r}" if options else "--check was given no script"
            raise UserError(f"{what}: name the scripts to read, or see --help")
        return _print_findings(*find_sources(files))
    except UserError as error:
        print_error(error)
        return 2


def _print_findings(sources: Mapping[str, Source], without_horovod: int, unreadable: Sequence[str]) -> int:
    """Print the findings, a line about the skipped files if there are any, and the summary. Return the exit status."""
    found: dict[str, list[Finding]] = {}
    for name, source in sources.items():
        found[name] = findings(source)
        for finding, others in merged(found[name]):
            show(f"{name}:{finding.line}: [{finding.level}] {finding.message}{_also(others)}")
    everything = [finding for of_file in found.values() for finding, _ in merged(of_file)]
    repairs = sum(len({finding[1:3] for finding in of_file if finding.edits}) for of_file in found.values())
    more = f"; --fix repairs {repairs} of them" if repairs else ""
    if without_horovod or unreadable:
        show(_skipped(without_horovod, unreadable))
    show(f"{summary(sources.values(), everything)}{more}")
    return status(everything)


def _skipped(without_horovod: int, unreadable: Sequence[str]) -> str:
    """Return a line that says how many files of the folders were skipped, and why."""
    parts = [f"{without_horovod} without an import of horovod"] if without_horovod else []
    if unreadable:
        parts.append(f"{len(unreadable)} that cannot be read ({', '.join(unreadable)})")
    total = without_horovod + len(unreadable)
    return f"{total} file{'s' * (total != 1)} skipped: {' and '.join(parts)}"


def merged(found: Sequence[Finding]) -> list[tuple[Finding, list[int]]]:
    """Combine the findings of one file that have the same level and message.

    For each level and message, return the first finding, and the lines of the others.
    """
    same: dict[tuple[str, str], list[Finding]] = {}
    for finding in found:
        same.setdefault((finding.level, finding.message), []).append(finding)
    return [(first, [other.line for other in others]) for first, *others in same.values()]


def _also(lines: Sequence[int]) -> str:
    """Return the end of a message that also applies to ``lines``, such as " (also lines 5, 9)"; "" without lines."""
    if not lines:
        return ""
    return f" (also line{'s' * (len(lines) > 1)} {', '.join(str(line) for line in lines)})"


def findings(source: Source) -> list[Finding]:
    """Return the findings of all rules in one script, sorted by line, without duplicates.

    Lines that never run, or run only without Horovod or with one rank, have no findings. Functions that nothing uses have
    only findings of the level "unsupported". A script that does not import Horovod has none, unless a file of its program
    wraps an optimizer. No finding has edits if another module may have horovod.torch's name (``may_have_stub``).
    """
    if not source.uses_horovod and not source.wrapped:
        return []
    with _deep_recursion():
        off, unused = Guards.of(source).lines_without_horovod(), lines_of_unused(source)
        found = {finding[:3]: finding for rule in RULES for finding in rule(source) if finding.line not in off}
    if source.may_have_stub:  # the other module may lack the functions that repairs call
        found = {key: finding._replace(edits=()) for key, finding in found.items()}
    return sorted(each for each in found.values() if each.level == "unsupported" or each.line not in unused)


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Allow the recursion that ast.unparse needs for a sum of several hundred terms."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _RECURSION_LIMIT))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def status(found: Iterable[Finding]) -> int:
    """Return the exit status: 1 if a finding has a level other than "differs", otherwise 0."""
    return 1 if any(finding.level != "differs" for finding in found) else 0


def summary(sources: Iterable[Source], found: Iterable[Finding]) -> str:
    """Return a line with the number of files and of the findings of each level, or that says that no file uses Horovod."""
    sources, levels = list(sources), Counter[str](finding.level for finding in found)
    read = f"{len(sources)} file{'s' * (len(sources) != 1)} read"
    if not any(source.uses_horovod for source in sources):
        return f"{read}: no use of Horovod found"
    counted = {"trap": f"{levels['trap']} trap{'s' * (levels['trap'] != 1)}"}
    parts = [counted.get(level, f"{levels[level]} {level}") for level in _LEVELS if levels[level]]
    return f"{read}: {', '.join(parts) or 'nothing found'}"
