"""Outcome of a function on one rank: its result or its exception, pickled for the process that collects the outcomes."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dualtrain.errors import BackendError, RankFailedError, one_line, with_causes
from dualtrain.functions.payload import dumps, loads

_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True)
class Outcome:
    """Result or exception of the function on one rank.

    Attributes:
        result: the pickled result; ``None`` if the function raised or its result cannot be pickled.
        reason: the exception's class and message, or why the result cannot be pickled, in one line; else empty.
        trace: the exception's traceback; empty if the function returned.
        error: the pickled exception; ``None`` if the function returned, or if what it raised cannot be pickled and
            unpickled, or is not an ``Exception`` (SystemExit, for example).
        by_peer: true if a collective operation failed. The cause may then be a different rank.
    """

    result: bytes | None = None
    reason: str = ""
    trace: str = ""
    error: bytes | None = None
    by_peer: bool = False

    def failure(self, rank: int, size: int) -> RankFailedError:
        """Return the exception for the caller of ``dualtrain.run``; its cause is the function's exception, if known."""
        message = f"rank {rank} of {size} failed: {self.reason}"
        failed = RankFailedError(message, rank, self.trace, by_peer=self.by_peer)
        try:
            failed.__cause__ = None if self.error is None else loads(self.error)
        except Exception:  # this process may be unable to import the exception's class, for example
            failed.__cause__ = None
        return failed


def outcome_of(call: Callable[[], Any]) -> Outcome:
    """Call ``call`` and return its outcome. SystemExit and KeyboardInterrupt count as failures, too."""
    try:
        result = call()
    except BaseException as error:
        return _failed(error)
    try:
        return Outcome(result=dumps(result))
    except Exception as error:
        return Outcome(reason=f"its result cannot be pickled ({_in_one_line(error)}): return numbers, text or tensors")


def results_of(pickled: Sequence[bytes]) -> list[Any]:
    """Unpickle the results of all ranks (see :class:`Outcome`); return them in rank order.

    Raises:
        RankFailedError: a result cannot be unpickled in this process.
    """
    results = []
    for rank, data in enumerate(pickled):
        try:
            results.append(loads(data))
        except Exception as error:  # unpickling may call the user's code
            reason = f"its result cannot be unpickled ({_in_one_line(error)}): return numbers, text or tensors"
            raise RankFailedError(f"rank {rank} of {len(pickled)} failed: {reason}", rank) from error
    return results


def _failed(error: BaseException) -> Outcome:
    trace = "".join(traceback.format_exception(_without_own_frames(error)))
    try:
        pickled = dumps(error) if isinstance(error, Exception) else None
        if pickled is not None:
            pickle.loads(pickled)  # calls the constructor with the exception's args, which it may not accept
    except Exception:
        pickled = None
    by_peer = any(isinstance(each, BackendError) for each in with_causes(error))
    return Outcome(reason=_in_one_line(error), trace=trace, error=pickled, by_peer=by_peer)


def _in_one_line(error: BaseException) -> str:
    name, text = type(error).__name__, one_line(error)
    return f"{name}: {text}" if text else name


def _without_own_frames(error: BaseException) -> BaseException:
    """Remove the frames of ``dualtrain.functions`` from the beginning of the error's traceback; return the error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(_FOLDER):
        trace = trace.tb_next
    return error.with_traceback(trace)
