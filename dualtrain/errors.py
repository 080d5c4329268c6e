"""Exceptions that dualtrain raises. Imports nothing of the package, so that every module can import it."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

#: Messages of torch's exceptions (of several types) for too little memory, or for a size beyond 64 bits.
_TOO_LARGE = re.compile(r"(allocate|out of|enough) memory|without overflow|overflowed|overflow when unpacking", re.I)

#: Errors of a disk, a network or a busy system, which may be gone when the same command is started again.
_DISK_OR_NETWORK = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.EMFILE, errno.ENFILE),
    *(errno.EAGAIN, errno.EBUSY),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN),
)


class UserError(ValueError):
    """An error that the user can fix. The message states the fact, the cause and the cure.

    ``shared`` is true if every rank raises the same error, so that only one rank needs to print it. ``trace`` is the
    traceback of the user's own code, if this code has failed; it is printed above the message. ``transient`` is true if the
    same command may succeed later, as with a full disk or a folder that is in use. ``forbids_restart`` is true if the run's
    folder records the error, so that later starts with the same settings are refused.
    """

    def __init__(
        self,
        message: str,
        *,
        shared: bool = False,
        trace: str = "",
        transient: bool = False,
        forbids_restart: bool = False,
    ) -> None:
        super().__init__(message)
        self.shared = shared
        self.trace = trace
        self.transient = transient
        self.forbids_restart = forbids_restart


class RanksDifferError(UserError):
    """Ranks differ in their settings, data or environment. Raised on every rank.

    Every rank prints it, although it is ``shared``: the ranks may have been started by hand on different terminals.
    """

    def __init__(self, message: str, *, trace: str = "", transient: bool = False) -> None:
        super().__init__(message, shared=True, trace=trace, transient=transient)


class BackendError(RuntimeError):
    """A collective operation failed or was refused: a mismatch between ranks, a failed rank, or a timeout, for example.

    Most messages name the operation, the rank that reports the error and, if known, the rank at fault.
    """


@dataclass(frozen=True)
class PeerFailure:
    """A rank that has left the job, and the reason.

    Attributes:
        rank: its rank in the job.
        reason: one line, then the rank's traceback if it sent one.
        quiet: true if the rank left normally. Then only operations that wait for this rank fail.
    """

    rank: int
    reason: str
    quiet: bool = False

    def describe(self) -> str:
        """Return text for messages: ``rank 3 stopped: ValueError: …``."""
        return f"rank {self.rank} {self.reason}"


class PeerFailedError(BackendError):
    """A collective operation failed because another rank has left the job; ``failure`` says which rank, and why."""

    def __init__(self, message: str, failure: PeerFailure) -> None:
        super().__init__(message)
        self.failure = failure

    def __reduce__(self) -> tuple[type[PeerFailedError], tuple[str, PeerFailure]]:
        return type(self), (str(self), self.failure)


class RankFailedError(RuntimeError):
    """A function that was started on several ranks failed on one of them, or a rank's process ended unexpectedly.

    Also raised if the function's result cannot be pickled or unpickled.

    Attributes:
        rank: the rank that failed.
        trace: the traceback of the function's exception on that rank; empty if it raised none.
        by_peer: true if a collective operation raised the exception, or an exception that led to it. A different rank may
            be the cause then.
    """

    def __init__(self, message: str, rank: int, trace: str = "", *, by_peer: bool = False) -> None:
        super().__init__(f"{message}\n\n{trace}".rstrip() if trace else message)
        self.rank = rank
        self.trace = trace
        self.by_peer = by_peer
        self._message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), by_peer=self.by_peer), (self._message, self.rank, self.trace)


class DivergedError(RuntimeError):
    """A loss, a gradient that was sent in fp16, or a weight became infinite or NaN.

    Raised on every rank. If it was a training loss or a gradient, the weights are not updated before the error is raised.
    """


def one_line(error: BaseException) -> str:
    """Return the message of ``error`` in one line. If its ``__str__`` raises an exception, say so instead."""
    try:
        return " ".join(str(error).split())
    except Exception as problem:  # a class of the user may raise anything
        return f"its __str__ raised {type(problem).__name__}"


def first_line(error: BaseException) -> str:
    """Return the first line of the message of ``error``, or its type if it has no message. See :func:`one_line`."""
    try:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    except Exception:
        return one_line(error)


def why_not_downloaded(error: Exception) -> str:
    """Return the first line of the reason why a download failed, or the error's type if it has no message."""
    return str(getattr(error, "reason", error)).strip().partition("\n")[0] or type(error).__name__


def is_final(error: BaseException) -> bool:
    """Return whether a restart of a run that ended with ``error`` would end in the same way."""
    return isinstance(error, DivergedError) or (isinstance(error, UserError) and not error.transient)


def is_transient(error: BaseException) -> bool:
    """Return whether the same command may succeed later, because ``error`` has a cause such as a full disk."""
    return isinstance(error, NotSavedError) or (isinstance(error, UserError) and error.transient)


def is_disk_or_network_error(error: BaseException) -> bool:
    """Return whether ``error``, or an error that led to it, is a disk or network error, such as a reset connection."""
    return any(
        isinstance(each, ConnectionError | TimeoutError) or (isinstance(each, OSError) and each.errno in _DISK_OR_NETWORK)
        for each in with_causes(error)
    )


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error``, and then the errors that led to it, including those that ``raise … from None`` hides."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        yield each
        seen.add(id(each))
        each = each.__cause__ or each.__context__


class NotSavedError(RuntimeError):
    """The training ended, but its results could not be written. Raised on every rank."""


class StoppedError(RuntimeError):
    """The signal ``number`` stopped the run, which tried to save a checkpoint. Raised on every rank after the same step."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


def is_too_large(error: BaseException) -> bool:
    """Return whether the cause of an error is a size that is too large, or too little memory."""
    if isinstance(error, MemoryError | OverflowError):
        return True
    if not isinstance(error, RuntimeError | TypeError):
        return False
    return _TOO_LARGE.search(first_line(error)) is not None


def lacks_memory(error: BaseException) -> bool:
    """Return the same as :func:`is_too_large`, but false for an OverflowError, which may have another cause."""
    return is_too_large(error) and not isinstance(error, OverflowError)
