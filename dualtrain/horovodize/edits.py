"""Edits of a script's text at the positions of nodes of its syntax tree. All other text stays unchanged."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")  # lines end only where Python's parser ends them
#: Comments that separate cells of an exported notebook.
_CELL = re.compile(r"#\s*(%%|COMMAND|MAGIC|In\[|\+|-)")
_COMMENT = re.compile(r"\s*(#.*)?")


class Edit(NamedTuple):
    """Replacement of ``text[start:end]`` by ``new``; an insertion if ``start == end``."""

    start: int
    end: int
    new: str


def apply(text: str, edits: Iterable[Edit]) -> str:
    """Return ``text`` with all edits, which must not overlap."""
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        text = text[: edit.start] + edit.new + text[edit.end :]
    return text


def line_count(text: str) -> int:
    """Return the number of line ends in ``text``."""
    return len(re.findall(r"\r\n|\r|\n", text))


class Layout:
    """Positions of nodes in a script's text, and edits that respect its lines and indentation.

    Args:
        text: source code of the script.
        tree: its syntax tree.
    """

    def __init__(self, text: str, tree: ast.Module) -> None:
        self.text = text
        self.lines = _LINE.findall(text)
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))
        ends = re.findall(r"\r\n|\r|\n", text)
        self._line_end = Counter(ends).most_common(1)[0][0] if ends else "\n"
        self._unit = _indentation(tree)

    def start(self, node: ast.AST) -> int:
        """Return the offset of the first character of ``node``, or of its first decorator."""
        first = min([node, *getattr(node, "decorator_list", [])], key=lambda part: part.lineno)
        if first is not node:  # ``first`` is the decorator's expression, without the @
            return self.text.rindex("@", 0, self._offset(first.lineno, first.col_offset))
        return self._offset(node.lineno, node.col_offset)

    def end(self, node: ast.AST) -> int:
        """Return the offset after the last character of ``node``."""
        return self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def segment(self, node: ast.AST) -> str:
        """Return the source code of ``node``."""
        return self.text[self.start(node) : self.end(node)]

    def replace(self, node: ast.AST, code: str) -> Edit:
        """Return the edit that replaces ``node`` by ``code``."""
        return Edit(self.start(node), self.end(node), code)

    def insert_before(self, statement: ast.stmt, code: str) -> list[Edit]:
        """Return the edit that inserts the simple statement ``code`` before ``statement`` and the comments above it.

        If other code precedes ``statement`` on its line (``if x:``, or a semicolon), ``code; `` is put between them. Return
        no edits before ``elif``, and before a compound statement that does not begin its line.
        """
        start = self.start(statement)
        number, prefix = self._line_of(start)
        if self._begins_line(number, prefix):
            if self.text.startswith("elif", start):
                return []
            while number and self._is_comment_above(self.lines[number - 1], prefix):
                number -= 1
            return [Edit(self._starts[number], self._starts[number], f"{prefix}{code}{self._line_end}")]
        return [] if _is_compound(statement) else [Edit(start, start, f"{code}; ")]

    def insert_after(self, statement: ast.stmt, code: str) -> list[Edit]:
        """Return the edit that inserts ``code`` on a new line after ``statement``.

        Return no edits if the lines of ``statement`` contain other code, or the last of them has no line end.
        """
        _, prefix = self._line_of(self.start(statement))
        last, _ = self._line_of(self.end(statement))
        if not self._has_own_lines(statement) or not self.lines[last].endswith(("\r", "\n")):
            return []
        return [Edit(self._starts[last + 1], self._starts[last + 1], f"{prefix}{code}{self._line_end}")]

    def wrap(self, statement: ast.stmt, header: str) -> list[Edit]:
        """Return the edits that put ``statement`` into a block under ``header``.

        Return no edits if the lines of ``statement`` contain other code, or for a compound statement that contains a
        multi-line string, since some of its lines must be indented, and those of the string must not.
        """
        first, prefix = self._line_of(self.start(statement))
        last, _ = self._line_of(self.end(statement))
        keeps_lines = self._has_multiline_string(statement)
        if not self._has_own_lines(statement) or (keeps_lines and _is_compound(statement)):
            return []
        indented = range(first, first + 1 if keeps_lines else last + 1)
        unit = "\t" if prefix.endswith("\t") else " " * self._unit
        edits = [Edit(self._starts[i], self._starts[i], unit) for i in indented if self.lines[i].strip()]
        return [edits[0]._replace(new=f"{prefix}{header}{self._line_end}{unit}"), *edits[1:]]

    def add_keywords(self, call: ast.Call, keywords: Sequence[str]) -> list[Edit]:
        """Return the edit that adds keyword arguments to ``call``.

        Return no edits if the only argument is a generator expression, or the last argument is in parentheses.
        """
        arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        close = self.end(call) - 1
        if not arguments:
            return [Edit(close, close, ", ".join(keywords))]
        if isinstance(arguments[0], ast.GeneratorExp) and len(arguments) == 1:
            return []
        end = max(self.end(part) for part in arguments)
        if re.sub(r"#[^\r\n]*", "", self.text[end:close]).strip() not in ("", ","):
            return []  # parentheses around the last argument
        last = max(arguments, key=self.end)
        number, prefix = self._line_of(self.start(last))
        own_line = not prefix.strip() and self._starts[number] > self.start(call)
        separator = f",{self._line_end}{prefix}" if own_line else ", "
        return [Edit(end, end, separator + separator.join(keywords))]

    def _offset(self, line: int, column: int) -> int:
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return self._starts[line - 1] + len(text.encode("utf-8", "surrogatepass")[:column].decode("utf-8", "surrogatepass"))

    def _line_of(self, offset: int) -> tuple[int, str]:
        """Return the index of the line that contains ``offset``, and the line's text before ``offset``."""
        number = min(bisect_right(self._starts, offset), len(self.lines)) - 1
        return number, self.text[self._starts[number] : offset]

    def _has_own_lines(self, statement: ast.stmt) -> bool:
        end = self.end(statement)
        last, _ = self._line_of(end)
        rest = self.text[end : self._starts[last + 1]].strip("\r\n")
        return self._begins_line(*self._line_of(self.start(statement))) and bool(_COMMENT.fullmatch(rest))

    def _begins_line(self, number: int, prefix: str) -> bool:
        continued = number > 0 and self.lines[number - 1].rstrip("\r\n").endswith("\\")
        return not prefix.strip() and not continued

    @staticmethod
    def _is_comment_above(line: str, prefix: str) -> bool:
        return line.startswith(f"{prefix}#") and not _CELL.match(line.strip())

    def _has_multiline_string(self, statement: ast.stmt) -> bool:
        """Return whether ``statement`` contains a multi-line string, which indentation would change."""
        return any(
            isinstance(node, ast.JoinedStr | ast.Constant)
            and node.end_lineno != node.lineno
            and re.search(r"'''|\"\"\"|\\\s*$", self.segment(node), re.MULTILINE)
            for node in ast.walk(statement)
        )


def _is_compound(statement: ast.stmt) -> bool:
    return hasattr(statement, "body") or isinstance(statement, ast.Match)


def _indentation(tree: ast.Module) -> int:
    """Return the most frequent indentation width of the script; 4 if no block is indented."""
    widths: Counter[int] = Counter()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.stmt) and isinstance(body, list) and body[0].lineno > node.lineno:
            widths[body[0].col_offset - node.col_offset] += 1
    return widths.most_common(1)[0][0] if widths else 4
