"""Script files as bytes and as text, with the encoding that they declare."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Sequence
from typing import NamedTuple

from dualtrain.errors import UserError
from dualtrain.files import open_regular
from dualtrain.horovodize.run_script import refuse_notebook
from dualtrain.horovodize.source import Source
from dualtrain.horovodize.wrapped_names import make_program


class ScriptFile(NamedTuple):
    """A script's content: ``text`` is ``data.decode(encoding)``."""

    name: str
    data: bytes
    encoding: str
    text: str


def read_script(name: str) -> ScriptFile:
    """Read a script.

    Raises:
        UserError: the script cannot be read, is a notebook, or is not text.
    """
    refuse_notebook(name)
    try:
        with open_regular(name) as file:
            data = file.read()
    except OSError as error:
        raise UserError(f"cannot read the script {name!r} ({error.strerror}): check its path") from None
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeError, LookupError):  # LookupError: not an encoding of text, such as hex
        raise UserError(
            f"the script {name!r} is not text in UTF-8, or in the encoding that its first lines declare: name a Python "
            "source file"
        ) from None
    return ScriptFile(name, data, encoding, text)


def parse_scripts(names: Sequence[str]) -> dict[str, tuple[ScriptFile, Source]]:
    """Read and parse all scripts of a program.

    Raises:
        UserError: a script cannot be read, is a notebook, is not text, or is not valid Python.
    """
    files = {name: read_script(name) for name in names}
    sources = {name: _parse(file) for name, file in files.items()}
    make_program(list(sources.values()))
    return {name: (file, sources[name]) for name, file in files.items()}


def _parse(file: ScriptFile) -> Source:
    """Parse a script. Raise UserError if it is not valid Python."""
    try:
        return Source(file.text)
    except SyntaxError as error:
        line = "" if error.lineno is None else f":{error.lineno}"  # the error about a null byte has no line number
        raise UserError(f"{file.name}{line} is not valid Python ({error.msg}): fix it first") from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or "it is nested too deeply"
        raise UserError(f"{file.name} is not valid Python ({reason}): fix it first") from None
