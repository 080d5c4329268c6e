"""What the commands have in common: how they read their flags, say what is wrong, and end."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO

from dualtrain.errors import UserError
from dualtrain.launchers import World
from dualtrain.processes import release

#: Control characters but tab and newline, marks that reverse the direction of text, line separators, and halves of
#: surrogate pairs, which stand for bytes of a file name that are no UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    """``text`` with the characters escaped that control a terminal: names of files and classes may hold them."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), str(text))


def show(text: object, file: TextIO | None = None) -> None:
    """Prints ``text``, made :func:`printable`, on standard output or ``file``."""
    print(printable(text), file=file or sys.stdout, flush=True)


def size_in_words(size: int) -> str:
    """Format a number of bytes in whole MB (2²⁰), KB (2¹⁰) or B, rounded down."""
    return next(f"{size // unit} {name}" for unit, name in ((1 << 20, "MB"), (1 << 10, "KB"), (1, "B")) if size >= unit)


class Parser(argparse.ArgumentParser):
    """argparse, with errors raised as UserError, and without abbreviations of flags."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(prog=prog, description=description, epilog=epilog, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See argparse, which drops the value of ``--flag=--`` and gives a list in its place."""
        words = list(sys.argv[1:] if args is None else args)
        for word in words[: words.index("--") if "--" in words else None]:
            if word.startswith("-") and word.endswith("=--"):
                self.error(f"{word[:-3]} must have a value, not '--'")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(f"{message}; see {self.prog} --help")


def parser_of(module: str, about: str) -> Parser:
    """A parser for ``python -m module`` with the words of its docstring ``about``."""
    first, _, more = about.partition("\n\n")
    return Parser(f"python -m {module}", first.partition("``: ")[2].capitalize(), more)


def say(what: object, rank: int = 0, size: int = 1) -> None:
    """One line on standard error; in a world of several, with the rank."""
    where = f" (rank {rank} of {size})" if size > 1 else ""
    show(f"dualtrain: error{where}: {what}", sys.stderr)


class _StderrHandler(logging.Handler):
    """Prints log records on what is standard error at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        show(f"dualtrain: {record.levelname.lower()}: {record.getMessage()}", sys.stderr)


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Inside the block, print the library's warnings as lines of the command that runs."""
    handler, log = _StderrHandler(logging.WARNING), logging.getLogger("dualtrain")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def refuse_on_all(error: UserError, world: World) -> int:
    """Print an error that all ranks most likely have, on rank 0 alone; return the exit status.

    A launcher stops all processes when the first one exits. A rank that still runs after 3 s prints its error too: its
    command line may be another one.
    """
    if world.rank != 0:
        time.sleep(3.0)
    say(error, world.rank, world.size)
    return 2


@contextmanager
def loading() -> Iterator[None]:
    """For what loads a program's modules. They are no garbage: to look through them all the while, and among them later,
    takes up to a fifth of a start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave(status: int) -> NoReturn:
    """Ends this process. A failed one does not wait for others."""
    with suppress(OSError):  # a full disk or a closed pipe behind them
        sys.stdout.flush()
        sys.stderr.flush()
    if status:
        release()
        # Not sys.exit: the libraries' exit handlers would wait for ranks that are gone.
        os._exit(status)
    sys.exit(0)
