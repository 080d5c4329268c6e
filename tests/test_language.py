"""No identifier, docstring, comment or page uses a banned word, and no docstring starts with a word like "How"."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from functools import cache

from dualtrain.version import __version__
from tests.pool import ROOT

#: Files and folders in which banned words are still allowed.
UNFINISHED: tuple[str, ...] = ()

#: Deprecated names that still work: the version that removes each, and the files that define or test it.
ALIASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "carry": ("0.3.0", ("dualtrain/optimizer.py", "dualtrain/gradients/reducer.py", "tests/gradients/test_optimizer.py")),
    "cargo": ("0.3.0", ("dualtrain/optimizer.py", "dualtrain/gradients/reducer.py", "tests/gradients/test_optimizer.py")),
    "news": ("0.3.0", ("dualtrain/trainer/step.py", "dualtrain/trainer/trainer.py", "tests/training/test_trainer.py")),
    "settle": (
        "0.3.0",
        ("dualtrain/backends/calls.py", "dualtrain/backends/watch.py", "tests/backends/test_watch.py"),
    ),
}

IDENTIFIERS = (
    "asked bell cargo carry dealt ear farewell graves hand_out heard judge mended mourn move_in news patience settle spoke "
    "stand_in star stranger taken tell thaw thawed tick_off ticked wish"
)
IN_NAMES = re.compile(rf"(?<![a-z0-9])({IDENTIFIERS.replace(' ', '|')})(?![a-z0-9])")
IN_PROSE = re.compile(
    r"\b(cargo|farewell|mourn(s|ed|ing)?|graves|strangers?|mended|thaw(s|ed|ing)?|ticked\s+off)\b", re.IGNORECASE
)
#: Words with which no docstring starts, because it starts with a verb or a noun phrase.
NO_START = re.compile(r"\A(Whether|How|Where|When|What|Who|Has)\b")
NO_START_IN_TEXT = re.compile(NO_START.pattern.replace(r"\A", r'"""\s*'))
#: Names with banned words that may follow a dot, because they are Python's own: ``file.tell()``, ``ast.TryStar``.
FOREIGN = {"tell", "TryStar"}


def checked_files(pattern: str) -> list[str]:
    paths = sorted(
        path.relative_to(ROOT).as_posix() for top in ("dualtrain", "tests") for path in (ROOT / top).rglob(pattern)
    )
    return [
        path for path in paths if not path.startswith(tuple(f"{name}/" for name in UNFINISHED)) and path not in UNFINISHED
    ]


FILES = [path for path in checked_files("*.py") if path != "tests/test_language.py"]
PAGES = ["README.md", "CONTRIBUTING.md", "docker/README.md", "launch/README.md", *checked_files("*.md")]


@cache
def banned(name: str) -> list[str]:
    """Return the banned words in an identifier; ``StandIn`` and ``stand_in`` are the same words."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return [match[0] for match in IN_NAMES.finditer(snake)]


def allowed(path: str, word: str) -> bool:
    return path in ALIASES.get(word, ("", ()))[1]


def findings(path: str, text: str) -> list[str]:
    """Return one line for each finding in a Python file: banned words in its name, identifiers, docstrings and comments.

    A docstring that starts as in ``NO_START``, with "Whether" for example, is a finding too.
    """
    found = [f"{path}: its name: {word}" for word in banned(path.removesuffix(".py").replace("/", "_"))]
    shown = re.sub(r"\\[a-z]", " ", text)  # the n of the escape \n is not part of the next word
    words = any(map(banned, set(re.findall(r"\w+", text))))
    if not (words or IN_PROSE.search(shown) or NO_START_IN_TEXT.search(text)):
        return found  # nothing in the whole text matches, so nothing in a name, comment or docstring does
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        where = f"{path}:{token.start[0]}"
        if token.type == tokenize.NAME and not (before == "." and token.string in FOREIGN):
            found += [f"{where}: {token.string}: {word}" for word in banned(token.string) if not allowed(path, word)]
        elif token.type == tokenize.COMMENT:
            found += [f"{where}: comment: {match[0]}" for match in IN_PROSE.finditer(token.string)]
        before = token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name, docstring = getattr(node, "name", "module"), ast.get_docstring(node) or ""
            found += [f"{path}: docstring of {name}: {match[0]}" for match in IN_PROSE.finditer(docstring)]
            found += [f"{path}: docstring of {name} starts with: {word}" for word in NO_START.findall(docstring)]
    return found


def test_the_check_finds_words_in_identifiers_comments_and_docstrings():
    text = (
        '"""A stranger."""\n# mourn\nclass StandIn:\n    """Farewell."""\n    def move_in(self, wish): return self.wish\n'
    )
    found = [line.rpartition(": ")[2] for line in findings("dualtrain/graves.py", text)]
    assert sorted(found) == ["Farewell", "graves", "mourn", "move_in", "stand_in", "stranger", "wish", "wish"]
    assert findings("a.py", "start = near = file.tell()\nlikewise = 'a wish'  # strange, carried away\n") == []
    assert findings("a.py", "tell = HttpEar\n") == ["a.py:1: tell: tell", "a.py:1: HttpEar: ear"]
    assert findings("a.py", 'def a():\n    """How it is."""\n    """When"""\n') == ["a.py: docstring of a starts with: How"]
    assert findings("dualtrain/optimizer.py", "carry = tell\n") == ["dualtrain/optimizer.py:1: tell: tell"]


def test_no_file_uses_a_banned_word():
    assert len(FILES) > 300
    found = [line for path in FILES for line in findings(path, (ROOT / path).read_text())]
    assert found == [], "\n".join(found)


def test_no_page_uses_a_banned_word():
    found = [(path, match[0]) for path in PAGES for match in IN_PROSE.finditer((ROOT / path).read_text())]
    assert found == []


def test_an_alias_is_removed_in_the_version_that_was_announced():
    now = version(__version__)
    assert [alias for alias, (removal, _) in ALIASES.items() if now >= version(removal)] == []


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))
