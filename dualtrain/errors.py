"""The kinds of failure that dualtrain raises itself, below everything else so that all rooms can use them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

#: How torch says, in exceptions of several types, that memory is short or a size does not fit into 64 bits.
_TOO_LARGE = re.compile(r"(allocate|out of|enough) memory|without overflow|overflowed|overflow when unpacking", re.I)


class UserError(ValueError):
    """Something that the person who started the program can mend: the message says the fact, the cause and the cure.

    ``shared`` where every rank raises the same one, so that one of them can speak for all.
    """

    def __init__(self, message: str, *, shared: bool = False) -> None:
        super().__init__(message)
        self.shared = shared


class RanksDifferError(UserError):
    """The ranks were given different settings or data, or only some of them cannot do something; raised on every rank.

    Each of them says so: they may have been started by hand, in different places.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, shared=True)


class BackendError(RuntimeError):
    """A collective operation failed: a mismatch between ranks, a failed peer, a timeout.

    The message names the operation, the rank that reports it and, where it is known, the rank at fault.
    """


@dataclass(frozen=True)
class PeerFailure:
    """Which rank has left the job, and why.

    Attributes:
        rank: its rank in the job.
        reason: one line, then the rank's traceback if it sent one.
        quiet: whether it left in good order: an error only for operations that wait for it.
    """

    rank: int
    reason: str
    quiet: bool = False

    def describe(self) -> str:
        """``rank 3 stopped: ValueError: …``."""
        return f"rank {self.rank} {self.reason}"


class PeerFailedError(BackendError):
    """A collective operation failed because another rank has left the job; ``failure`` says which one, and why."""

    def __init__(self, message: str, failure: PeerFailure) -> None:
        super().__init__(message)
        self.failure = failure

    def __reduce__(self) -> tuple[type[PeerFailedError], tuple[str, PeerFailure]]:
        return type(self), (str(self), self.failure)


class DivergedError(RuntimeError):
    """The loss became infinite or not a number; raised on every rank in the same step, before the weights take it."""


class NotSavedError(RuntimeError):
    """The training ended, and its results could not be written; raised on every rank."""


class StoppedError(RuntimeError):
    """A signal, ``number``, ended the run after everything was saved; raised on every rank after the same step."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


@contextmanager
def enough_memory(cure: str) -> Iterator[None]:
    """Turns the errors of sizes that are too large, and of memory that is short, into a UserError with ``cure``."""
    try:
        yield
    except BackendError:
        raise
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, MemoryError | OverflowError) or _TOO_LARGE.search(reason):
            raise UserError(f"too large for this machine ({reason or type(error).__name__}): {cure}") from error
        raise
