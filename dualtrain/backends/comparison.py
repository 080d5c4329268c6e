"""Named values that must be the same on every rank, compared in one short exchange.

Each rank sends a hash of its values. If the hashes differ, or no rank could read its values, each rank also sends the
values as text, or its error. So all ranks know the same differences and raise the same error, even if a value is missing or
could not be read on one rank.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dualtrain.backends.agreement import Call, agree
from dualtrain.backends.collectives import Backend
from dualtrain.differences import Difference, fingerprint, ranks_in_words
from dualtrain.errors import BackendError, RanksDifferError, UserError, one_line

_FAILED = -1  # sent instead of a hash if the values could not be read


def compare(backend: Backend, what: str, read: Callable[[], Mapping[str, object]]) -> list[Difference]:
    """Compare the ranks' values; return the differences, the same list on every rank. Collective; blocks.

    Each rank sends 16 bytes if there are no differences. The differences are in the order of rank 0's names, then of
    the names that rank 0 lacks.

    Args:
        backend: the ranks to compare.
        what: noun for error messages, such as ``"settings"``; the same on every rank.
        read: returns this rank's values by name; they are compared by their ``repr``.

    Raises:
        UserError: on every rank, with the reason, if ``read`` raised the same error on all of them.
        RanksDifferError: on every rank, with a reason, if ``read`` raised on some ranks only, or raised different errors.
        BackendError: the ranks make different calls, a rank failed, or the call timed out.
    """
    values: dict[str, str] = {}
    failure: Exception | None = None
    try:
        values = {name: _as_text(value) for name, value in read().items()}
    except Exception as error:  # of any type, since the other ranks wait for this rank
        failure = error
    backend.drain()
    mine = _FAILED if failure is not None else fingerprint(repr(sorted(values.items())))
    hashes = agree(backend, Call("comparison", what), mine)
    if len(set(hashes)) == 1 and _FAILED not in hashes:
        return []
    reason = None if failure is None else _reason(what, failure)
    answers = backend.allgather_object((values, reason), name=f"different {what}")
    _raise_failures([problem for _, problem in answers], backend.members, failure)
    names = dict.fromkeys(name for theirs, _ in answers for name in theirs)
    compared = (Difference(name, tuple(theirs.get(name) for theirs, _ in answers), backend.members) for name in names)
    return [difference for difference in compared if len(set(difference.values)) > 1]


def _as_text(value: object) -> str:
    return "not set" if value is None else repr(value)


def _raise_failures(reasons: Sequence[str | None], members: Sequence[int], failure: Exception | None) -> None:
    failed = [rank for rank, reason in enumerate(reasons) if reason is not None]
    if not failed:
        return
    reason = reasons[failed[0]]
    alike = [rank for rank in failed if reasons[rank] == reason]
    if len(alike) == len(reasons):
        raise UserError(str(reason), shared=True) from failure
    raise RanksDifferError(f"{ranks_in_words(members[rank] for rank in alike)}: {reason}") from failure


def _reason(what: str, error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {one_line(error)}, in {Path(frame.filename).name}:{frame.lineno}"
    return f"the {what} cannot be compared between the ranks ({text})"


def agree_on_list(
    backend: Backend,
    what: str,
    mine: list[str],
    kind: str = "comparison of lists",
    *,
    cure: str = "build the same model and optimizer on every rank",
) -> None:
    """Check that every rank has the same list of descriptions. Collective; blocks.

    Args:
        backend: the ranks.
        what: noun for error messages, such as ``"parameters"``; the same on every rank.
        mine: this rank's descriptions.
        kind: the kind of call, for the error about ranks that make different calls.
        cure: the end of the message if the lists differ.

    Raises:
        BackendError: on every rank, if the lists differ (the message names the first entry in which rank 0 and another rank
            differ); or if the ranks make different calls, a rank failed, or the call timed out.
    """
    backend.drain()
    # First compare short hashes: the lists are usually equal, and then need not be sent.
    hashes = agree(backend, Call(kind, what), fingerprint(repr(mine)))
    if len(set(hashes)) == 1:
        return
    lists = backend.allgather_object(mine, name=what)
    other = next(rank for rank, theirs in enumerate(lists) if theirs != lists[0])
    first, second = (f"rank {backend.members[rank]}" for rank in (0, other))
    different = next(((a, b) for a, b in zip(lists[0], lists[other], strict=False) if a != b), None)
    if different is None:
        difference = f"{first} has {len(lists[0])}, {second} has {len(lists[other])}"
        shorter, longer = sorted((lists[0], lists[other]), key=len)
        difference += f", and only one of them has {longer[len(shorter)]}"
    else:
        difference = f"{different[0]} on {first} and {different[1]} on {second}"
    raise BackendError(f"the ranks do not have the same {what}: {difference}; {cure}")
