"""``python -m dualtrain.horovodize --check SCRIPT…``: print the lines that work differently, or are mistakes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from dualtrain.console import show
from dualtrain.errors import UserError
from dualtrain.files import read_text
from dualtrain.horovodize.rules import RULES
from dualtrain.horovodize.source import Finding, Source

_LEVELS = ("trap", "unsupported", "differs")


def check(files: Sequence[str]) -> int:
    """Print the findings in all files. Return the exit status."""
    options = [name for name in files if name.startswith("-")]
    try:
        if options or not files:
            what = f"unknown option {options[0]!r}" if options else "--check was given no script"
            raise UserError(f"{what}: name the scripts to read, or see --help")
        texts = {name: _read(name) for name in files}
        # The files are parts of one program: one may wrap the optimizer that another one steps.
        wrapped = set().union(*(_parse(name, text).own_wrapped for name, text in texts.items()))
        sources = {name: _parse(name, text, wrapped) for name, text in texts.items()}
    except UserError as error:
        show(f"dualtrain: error: {error}", sys.stderr)
        return 2
    levels: Counter[str] = Counter()
    for name, source in sources.items():
        for finding in findings(source):
            show(f"{name}:{finding.line}: [{finding.level}] {finding.message}")
            levels[finding.level] += 1
    show(_summary(sources, levels))
    return 1 if levels["trap"] or levels["unsupported"] else 0


def findings(source: Source) -> list[Finding]:
    """Return the findings of all rules in one script, sorted by line, without duplicates."""
    return sorted({finding for rule in RULES for finding in rule(source)})


def _summary(sources: dict[str, Source], levels: Counter[str]) -> str:
    read = f"{len(sources)} file{'s' * (len(sources) > 1)} read"
    if not any(source.uses_horovod for source in sources.values()):
        return f"{read}: no use of Horovod found"
    counted = {"trap": f"{levels['trap']} trap{'s' * (levels['trap'] != 1)}"}
    found = [counted.get(level, f"{levels[level]} {level}") for level in _LEVELS if levels[level]]
    return f"{read}: {', '.join(found) or 'nothing found'}"


def _read(name: str) -> str:
    try:
        return read_text(name, "utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read the script {name!r} ({error.strerror}): check its path") from None
    except UnicodeDecodeError:
        raise UserError(f"the script {name!r} is not text in UTF-8: name a Python source file") from None


def _parse(name: str, text: str, wrapped: set[str] | None = None) -> Source:
    try:
        return Source(text, wrapped or ())
    except (SyntaxError, ValueError) as error:
        where = f"{name}:{error.lineno}" if isinstance(error, SyntaxError) else name
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UserError(f"{where} is not valid Python ({reason}): fix it first") from None
