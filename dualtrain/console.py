"""Functions for all commands: parsing of flags, printing of output and errors, the end of the process."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO

from dualtrain.cores import too_many_ranks, usable_cores
from dualtrain.errors import UserError
from dualtrain.files import write_json
from dualtrain.launchers import World, torchrun_error_file
from dualtrain.processes import release

#: Control characters except tab and newline, marks that reverse the direction of text, line separators, and halves of
#: surrogate pairs, which represent bytes of a file name that are not UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_DAY = 86_400
_warned = False  # whether show_progress has logged its warning


def printable(text: object) -> str:
    """Escape the characters that control a terminal: names of files and classes may contain them."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), str(text))


def encodable(text: str, stream: TextIO) -> str:
    """Replace each character that the encoding of ``stream`` lacks (in a locale without UTF-8, for example) by ``?``."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def open_closed_streams() -> None:
    """Open standard input, output and error on /dev/null if this process was started without them, as by ``2>&-``.

    Otherwise, the next file that is opened gets the number of the closed stream, and receives what C code prints.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # os.open returns the lowest free descriptor, which is ``number``.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            if getattr(sys, name) is None:  # otherwise the program has its own stream
                setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def refuse_removed_folder() -> None:
    """Check that the current folder exists. Call it before torch is imported: without the folder, MKL ends the process.

    Raises:
        UserError: the folder was removed.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the current folder has been removed: change to an existing one (cd), and start again") from None


def show(text: object, file: TextIO | None = None) -> None:
    """Print ``text``, escaped by :func:`printable`, on standard output or ``file``.

    Writes the whole text at once, even if Python does not buffer, because launchers mix the output of several processes. If
    the pipe is closed, as by ``| head``, this and all later output is discarded: a run continues, and keeps its exit
    status. Text for standard error is discarded if it cannot be written.

    Raises:
        UserError: standard output cannot be written, because of a full disk, for example.
    """
    stream = file or sys.stdout
    with writing(stream):
        print(encodable(f"{printable(text)}\n", stream), end="", file=stream, flush=True)


@contextmanager
def writing(stream: TextIO) -> Iterator[None]:
    """Handle errors of a block that writes to ``stream`` (standard output or error) as :func:`show` does."""
    try:
        yield
    except OSError as error:
        number = stream.fileno()
        original, null = os.dup(number), os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
        with suppress(OSError):
            stream.flush()  # empty the stream's buffer: otherwise flushing it would fail again at exit
        if not isinstance(error, BrokenPipeError):
            os.dup2(original, number)
        os.close(original)
        if not isinstance(error, BrokenPipeError) and stream is not sys.stderr:
            raise UserError(
                f"standard output cannot be written ({error.strerror or error}): free space, or redirect it elsewhere",
                transient=True,
            ) from error


def show_progress(text: object) -> None:
    """Print ``text`` as :func:`show` does. If standard output cannot be written, log a warning, once: the run continues."""
    global _warned
    try:
        show(text)
    except UserError as error:
        if not _warned:
            _warned = True
            logging.getLogger("dualtrain").warning("%s; the run continues", error)


def size_in_words(size: int) -> str:
    """Format a number of bytes in whole MB (2²⁰), KB (2¹⁰) or B, rounded down."""
    units = (1 << 20, "MB"), (1 << 10, "KB")
    return next((f"{size // unit} {name}" for unit, name in units if size >= unit), f"{size} B")


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: its header (the first of ``rows``), a line of hyphens, and the other rows."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UserError, and accepts no abbreviations of flags."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(prog=prog, description=description, epilog=epilog, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but refuse ``--flag=--``, whose value argparse turns into an empty list."""
        words = list(sys.argv[1:] if args is None else args)
        for word in words[: words.index("--") if "--" in words else None]:
            if word.startswith("-") and word.endswith("=--"):
                self.error(f"{word[:-3]} must have a value, not '--'")
        return super().parse_known_args(words, namespace)

    def print_help(self, file: Any = None) -> None:
        """Print the help as :func:`show` does."""
        show(self.format_help().rstrip("\n"), file)

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        one_line = message.replace("\n", r"\n")  # a newline in an argument
        raise UserError(f"{one_line}; see {self.prog} --help")


#: How the command was started, if not as ``python -m dualtrain.NAME``; ``dualtrain.__main__`` sets it.
started_as = ""


def program(module: str) -> str:
    """Return how the command of ``module`` was started, for usage and messages.

    ``module`` may end with an option: ``"dualtrain.horovodize --prove"``.
    """
    name, space, option = module.partition(" ")
    return f"{started_as or f'python -m {name}'}{space}{option}"


def parser_of(module: str, docstring: str) -> Parser:
    """Make a parser for the command of ``module``.

    ``docstring`` gives the description (its first paragraph, after the command and the colon) and the epilog (the rest).
    """
    first, _, more = docstring.partition("\n\n")
    return Parser(program(module), first.partition("``: ")[2].capitalize(), more)


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return a function that converts text to a whole number from ``low`` to ``high``, for argparse."""

    def convert(text: str) -> int:
        with suppress(ValueError):
            if low <= (number := int(text)) <= high:
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")

    return convert


def ranks_of_host(text: str) -> int:
    """Convert a number of ranks to start on this host, for argparse: at most ``cores.RANKS_PER_CORE`` per usable core."""
    number = whole(1, 10_000)(text)
    if (reason := too_many_ranks(number, usable_cores())) is not None:
        raise argparse.ArgumentTypeError(f"{number} ranks are too many for this host: {reason}")
    return number


def given_path(text: str) -> str:
    """Return a path, for argparse. Refuse an empty path, as from an unset variable: it would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty: name a file or a folder")
    return text


def seconds(text: str) -> float:
    """Convert a number of seconds, for argparse: more than 0, and a day at most."""
    with suppress(ValueError):
        if 0 < (number := float(text)) <= _DAY:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and up to {_DAY}")


@contextmanager
def ending_by_signals(consequence: str) -> Iterator[None]:
    """Inside the block, make SIGINT, SIGTERM and SIGHUP raise SystemExit, so that the block's jobs end before this process.

    One line names the signal and the ``consequence``. Later signals are ignored. SIGHUP stays ignored under nohup.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    numbers += [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]

    def end(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, lambda *_: None)
        what = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        print_error(f"{what}; {consequence}")
        raise SystemExit(128 + number)

    earlier = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def print_error(what: object, rank: int = 0, size: int = 1, *, final: bool = False) -> None:
    """Print an error as one line on standard error; with the rank, if there are several ranks.

    If the user's own code has failed, its traceback comes first. ``final`` means that a restart would repeat the error.
    """
    where = f" (rank {rank} of {size})" if size > 1 else ""
    trace = f"{what.trace}\n" if isinstance(what, UserError) and what.trace else ""
    show(f"{trace}dualtrain: error{where}: {'do not restart: ' if final else ''}{what}", sys.stderr)


def record_for_torchrun(reason: str) -> None:
    """Under torchrun, make ``reason`` the cause of this process's failure in the summary that torchrun prints.

    ``record`` of torch.distributed.elastic does the same, but imports torch. This function needs no torch.
    """
    file = torchrun_error_file()
    if file is not None:
        more = {"py_callstack": printable(reason), "timestamp": str(int(time.time()))}
        with suppress(OSError):
            write_json(file, {"message": {"message": reason.rpartition("\n")[2], "extraInfo": more}})


class _StderrHandler(logging.Handler):
    """Handler that prints log records on the current ``sys.stderr``."""

    def emit(self, record: logging.LogRecord) -> None:
        show(f"dualtrain: {record.levelname.lower()}: {record.getMessage()}", sys.stderr)


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Inside the block, print dualtrain's log records from level WARNING on, on stderr: ``dualtrain: warning: …``."""
    handler, log = _StderrHandler(logging.WARNING), logging.getLogger("dualtrain")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def refuse_on_all(error: UserError, world: World) -> int:
    """Print an error that most likely occurs on all ranks, and return the exit status. If possible, only rank 0 prints it.

    The other ranks wait for 3 s. In this time the launcher stops them, because rank 0 has exited. A rank that still runs
    after that prints its error too: its command line may differ from that of rank 0.
    """
    if world.rank != 0:
        time.sleep(3.0)
    # Only torchrun restarts ranks with the same command line. Under torchrun, say that a restart would not help.
    print_error(error, world.rank, world.size, final=world.launcher == "torchrun")
    return 2


@contextmanager
def loading() -> Iterator[None]:
    """Disable GC while the block imports modules, and exclude the modules from later collections.

    This shortens the start by a fifth.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave(status: int) -> NoReturn:
    """Exit this process with ``status``; if that is not 0, without waiting for other ranks."""
    with suppress(OSError):  # a full disk, or a closed pipe
        sys.stdout.flush()
        sys.stderr.flush()
    if status:
        release()
        # Not sys.exit: exit handlers of communication libraries would wait for ranks that have exited.
        os._exit(status)
    sys.exit(0)
