"""Exceptions that dualtrain raises. Imports nothing of the package, so that every module can import it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

#: Messages of torch's exceptions, of several types, for too little memory or a size beyond 64 bits.
_TOO_LARGE = re.compile(r"(allocate|out of|enough) memory|without overflow|overflowed|overflow when unpacking", re.I)


class UserError(ValueError):
    """An error that the user can fix. The message states the fact, the cause and the cure.

    ``shared`` is true if every rank raises the same error, so that one rank is enough to print it.
    """

    def __init__(self, message: str, *, shared: bool = False) -> None:
        super().__init__(message)
        self.shared = shared


class RanksDifferError(UserError):
    """Ranks differ in their settings, data or abilities. Raised on every rank.

    Every rank prints it, because the ranks may have been started by hand on different terminals.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, shared=True)


class BackendError(RuntimeError):
    """A collective operation failed: a mismatch between ranks, a failed rank, or a timeout.

    The message names the operation, the rank that reports the error and, if known, the rank at fault.
    """


@dataclass(frozen=True)
class PeerFailure:
    """A rank that has left the job, and the reason.

    Attributes:
        rank: its rank in the job.
        reason: one line, then the rank's traceback if it sent one.
        quiet: whether it left in good order, which is an error only for operations that wait for it.
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
    """The loss became infinite or NaN. Raised on every rank in the same step, before the weights are updated."""


class NotSavedError(RuntimeError):
    """The training ended, but its results could not be written. Raised on every rank."""


class StoppedError(RuntimeError):
    """The signal ``number`` ended the run after a checkpoint was written. Raised on every rank after the same step."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


@contextmanager
def enough_memory(cure: str) -> Iterator[None]:
    """Convert errors from too large sizes or too little memory into a UserError whose message ends with ``cure``."""
    try:
        yield
    except BackendError:
        raise
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, MemoryError | OverflowError) or _TOO_LARGE.search(reason):
            raise UserError(f"too large for this machine ({reason or type(error).__name__}): {cure}") from error
        raise
