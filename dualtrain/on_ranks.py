"""Run a task on rank 0 or on all ranks, and raise its UserError or OSError as a UserError on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dualtrain.backends import Backend
from dualtrain.errors import RanksDifferError, UserError, one_line
from dualtrain.files import absolute, cure_of

T = TypeVar("T")
#: A UserError's message, and its attributes ``transient`` and ``forbids_restart``.
_Problem = tuple[str, bool, bool]


def on_all_ranks(backend: Backend, what: str, task: Callable[[], T]) -> T:
    """Run ``task()`` on every rank, and return its result after it has succeeded on all ranks. Collective; blocks.

    If the task raises an exception that is neither a UserError nor an OSError, only this rank raises it. The other ranks
    then wait for this rank.

    Raises:
        UserError: on every rank, with the first rank's reason, if the task raised UserError or OSError on all ranks.
        RanksDifferError: on every rank, if the task raised such an error on some ranks only.
    """
    result, problem, trace = None, None, ""
    try:
        result = task()
    except (UserError, OSError) as error:
        problem, trace = _problem(what, error), getattr(error, "trace", "")
    problems = backend.allgather_object(problem, name=what)
    for rank, first in zip(backend.members, problems, strict=True):
        if first is not None:
            if all(other is not None for other in problems):
                raise _shared(first, trace)
            raise RanksDifferError(f"rank {rank}: {first[0]}", trace=trace, transient=first[1])
    return result  # type: ignore[return-value]  # the error of any task was raised above


def on_rank_zero(backend: Backend, what: str, task: Callable[[], T]) -> T:
    """Run ``task()`` on rank 0, and return its result (plain values, tensors) on every rank. Collective; blocks.

    Raises:
        UserError: on every rank, if the task raised UserError or OSError. If the task raised a different exception, rank 0
            raises that exception, and every other rank raises UserError.
    """
    answer: tuple[T | None, _Problem | None] = (None, None)
    failure: Exception | None = None
    if backend.rank == 0:
        try:
            answer = (task(), None)
        except (UserError, OSError) as error:
            answer = (None, _problem(what, error))
        except Exception as error:
            reason = f"{what}: rank 0 failed with {type(error).__name__}: {one_line(error)}"
            failure, answer = error, (None, (reason, False, False))
    result, problem = backend.broadcast_object(answer, name=what)
    if failure is not None:
        raise failure
    if problem is not None:
        raise _shared(problem)
    return result  # type: ignore[no-any-return]


def _problem(what: str, error: UserError | OSError) -> _Problem:
    """Return an error as plain values, for other ranks."""
    if isinstance(error, UserError):
        return str(error), error.transient, error.forbids_restart
    folder = repr(str(absolute(error.filename).parent)) if isinstance(error.filename, str) else "the file"
    cure = cure_of(error, folder, "choose a path in a folder that exists and that you may read and write")
    return f"{what}: {error}; {cure}, then try again", True, False


def _shared(problem: _Problem, trace: str = "") -> UserError:
    reason, transient, forbids_restart = problem
    return UserError(reason, shared=True, trace=trace, transient=transient, forbids_restart=forbids_restart)
