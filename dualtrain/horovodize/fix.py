"""``python -m dualtrain.horovodize --fix [--diff] SCRIPT…``: make the safe repairs, and list the remaining findings."""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dualtrain.console import print_error, show, writing
from dualtrain.errors import UserError
from dualtrain.files import rewrite
from dualtrain.horovodize.check import findings, status, summary
from dualtrain.horovodize.edits import Edit, apply, line_count
from dualtrain.horovodize.import_lines import import_edits
from dualtrain.horovodize.script_file import ScriptFile, parse_scripts
from dualtrain.horovodize.source import Finding, Source


class Repaired(NamedTuple):
    """A repaired script: its new source, the repaired findings with original line numbers, and the remaining findings.

    ``origins`` has the original line number of each line of the new source.
    """

    source: Source
    fixed: list[Finding]
    left: list[Finding]
    origins: list[int]


def fix(arguments: Sequence[str]) -> int:
    """Repair all files, or print the changes with ``--diff``. Return the exit status, which is 2 after an error."""
    options = [word for word in arguments if word.startswith("-")]
    names = [word for word in arguments if not word.startswith("-")]
    try:
        unknown = [word for word in options if word != "--diff"]
        if unknown or not names:
            what = f"unknown option {unknown[0]!r}" if unknown else "--fix was given no script"
            raise UserError(f"{what}: name the scripts to change, or see --help")
        scripts = parse_scripts(names)
        initialized = any(source.hvd_calls("init") for _, source in scripts.values())
        repaired = {name: repair(source, initialized) for name, (_, source) in scripts.items()}
        data = {name: _encoded(scripts[name][0], result) for name, result in repaired.items()}
        written: list[str] = []
        for name, (file, _) in scripts.items():
            if options:
                _show_diff(file, data[name])
            elif data[name] != file.data:
                _write(file, data[name], written)
                written.append(name)
        return _report(repaired, diff=bool(options))
    except UserError as error:
        print_error(error)
        return 2


def repair(source: Source, initialized: bool = True) -> Repaired:
    """Make all safe repairs, one after another; each removes findings and adds none. Then change the imports, if possible.

    Args:
        source: the script.
        initialized: whether any file of the script's program calls ``init``.
    """
    origins = list(range(1, line_count(source.text) + 2))
    fixed: list[Finding] = []
    refused: set[tuple[int, str]] = set()
    found = findings(source)
    while (finding := next((one for one in found if one.edits and one[:1] + one[2:3] not in refused), None)) is not None:
        better = _improved(source, found, finding)
        if better is None:
            refused.add((finding.line, finding.message))
            continue
        fixed.append(finding._replace(line=origins[finding.line - 1], edits=()))
        _move_lines(source.text, origins, finding.edits)
        source, found = better
        refused.clear()  # a repair that was not possible before may be possible now
    changed, unchanged = import_edits(source, initialized)
    for finding in changed:
        fixed.append(finding._replace(line=origins[finding.line - 1], edits=()))
    if changed:
        source = source.with_text(apply(source.text, [edit for one in changed for edit in one.edits]))
    return Repaired(source, sorted(fixed), [*findings(source), *unchanged], origins)


def _improved(source: Source, found: list[Finding], finding: Finding) -> tuple[Source, list[Finding]] | None:
    """Return the script after the edits of ``finding``, with the remaining findings.

    Return None if the edits add a finding, remove none, or make the script invalid.
    """
    try:
        after = source.with_text(apply(source.text, finding.edits))
        compile(after.text, "script", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    left = findings(after)
    remaining, earlier = Counter(one[1:3] for one in left), Counter(one[1:3] for one in found)
    return (after, left) if remaining < earlier else None


def _move_lines(text: str, origins: list[int], edits: Sequence[Edit]) -> None:
    """Update ``origins``, the original line number of each line, for the lines that ``edits`` insert or remove."""
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        before, removed = text[: edit.start], text[edit.start : edit.end]
        index, old, new = line_count(before), line_count(removed), line_count(edit.new)
        origins[index:index] = [origins[min(index, len(origins) - 1)]] * (new - old)
        whole_lines = before[-1:] in "\r\n" and removed[-1:] in "\r\n"  # '' is in every string
        first = index if whole_lines else index + 1
        del origins[first + new : first + old]


def _encoded(file: ScriptFile, result: Repaired) -> bytes:
    """Return the repaired script as bytes. Raises UserError if the encoding cannot reproduce the script's bytes."""
    try:
        if file.text.encode(file.encoding) == file.data:
            return result.source.text.encode(file.encoding)
    except UnicodeError:  # idna, for example, cannot encode long words
        pass
    raise UserError(f"{file.name} cannot be written again byte for byte in {file.encoding}: save it as UTF-8 first")


def _write(file: ScriptFile, data: bytes, written: Sequence[str]) -> None:
    """Write a script; an error also names the scripts that were ``written`` before."""
    try:
        rewrite(Path(file.name), data)
    except OSError as error:
        others = f" (repaired already: {', '.join(map(repr, written))})" if written else ""
        cure = "check its permissions" if isinstance(error, PermissionError) else "free space, or check the file system"
        raise UserError(f"cannot write {file.name!r} ({error.strerror}): it is unchanged{others}; {cure}") from None


def _show_diff(file: ScriptFile, data: bytes) -> None:
    """Print a unified diff with the script's own bytes, because ``patch`` compares bytes."""
    before, after = file.data.splitlines(keepends=True), data.splitlines(keepends=True)
    name = file.name.encode("utf-8", "surrogateescape")
    with writing(sys.stdout):
        sys.stdout.flush()
        for line in difflib.diff_bytes(difflib.unified_diff, before, after, name, name):
            sys.stdout.buffer.write(line if line.endswith((b"\n", b"\r")) else line + b"\n\\ No newline at end of file\n")
        sys.stdout.buffer.flush()


def _report(repaired: dict[str, Repaired], *, diff: bool) -> int:
    """Print repaired and remaining findings and a summary; with ``diff``, to standard error. Return the exit status.

    Line numbers of remaining findings are those of the repaired file; with ``diff``, those of the file, which is unchanged.
    """
    output = sys.stderr if diff else sys.stdout
    for name, result in repaired.items():
        for finding in result.fixed:
            show(f"{name}:{finding.line}: [{'fixable' if diff else 'fixed'}] {finding.message}", output)
        for finding in result.left:
            line = result.origins[finding.line - 1] if diff else finding.line
            show(f"{name}:{line}: [{finding.level}] {finding.message}", output)
    left = [finding for result in repaired.values() for finding in result.left]
    number = sum(len(result.fixed) for result in repaired.values())
    sources = [result.source for result in repaired.values()]
    show(f"{summary(sources, left)}; {number} {'would be ' if diff else ''}fixed", output)
    return status(left)
