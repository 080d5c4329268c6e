"""Doing what may fail on one rank so that all ranks learn of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dualtrain.backends import Backend
from dualtrain.errors import RanksDifferError, UserError

T = TypeVar("T")


def together(backend: Backend, what: str, task: Callable[[], T]) -> T:
    """``task()`` on every rank, once it is known to have succeeded on all. Collective; blocks.

    Raises:
        UserError: on every rank, with the first rank's reason, if it raised UserError anywhere; RanksDifferError if not
            everywhere.
    """
    result, problem = None, None
    try:
        result = task()
    except (UserError, OSError) as error:
        problem = _reason(what, error)
    problems = backend.allgather_object(problem, name=what)
    for rank, reason in enumerate(problems):
        if reason is not None:
            if all(other is not None for other in problems):
                raise UserError(reason, shared=True)
            raise RanksDifferError(f"rank {rank}: {reason}")
    return result  # type: ignore[return-value]  # every task that raised has ended above


def on_root(backend: Backend, what: str, task: Callable[[], T]) -> T:
    """What ``task()`` gives on rank 0, on every rank: plain values and tensors. Collective; blocks.

    Raises:
        UserError: on every rank, if it raised UserError on rank 0.
    """
    answer: tuple[T | None, str | None] = (None, None)
    if backend.rank == 0:
        try:
            answer = (task(), None)
        except (UserError, OSError) as error:
            answer = (None, _reason(what, error))
    result, problem = backend.broadcast_object(answer, name=what)
    if problem is not None:
        raise UserError(problem, shared=True)
    return result  # type: ignore[no-any-return]


def _reason(what: str, error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{what}: {error}; free or mend that place, then try again"
