"""Named values that must be the same on every rank, compared in one short exchange.

Each rank sends a hash of its values. The values themselves travel, as text, only where the hashes differ: so all ranks
know the same differences and raise the same error, also where a value is missing or could not be read on one of them.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dualtrain.backends.agreement import Call, agree
from dualtrain.errors import RanksDifferError, UserError

if TYPE_CHECKING:
    from dualtrain.backends.collectives import Backend

_FAILED = -1  # in place of a hash
_SHOWN = 3  # differences that a message describes; it names the others
_NAMED = 5
_GROUPS = 6  # different values of one name that a message shows
_WIDTH = 100  # characters of a value


@dataclass(frozen=True)
class Difference:
    """A name whose value is not the same on every rank: the values as text, in rank order, ``None`` where it is missing."""

    name: str
    values: tuple[str | None, ...]

    def __str__(self) -> str:
        return f"{self.name} is {by_value(self.values)}"


def compare(backend: Backend, what: str, read: Callable[[], Mapping[str, object]]) -> list[Difference]:
    """The differences between the ranks' values, the same list on every rank. Collective; blocks.

    One exchange of 16 bytes where there are none. The order is that of rank 0's names.

    Args:
        backend: the ranks.
        what: the same on every rank, for errors: ``"settings"``.
        read: gives this rank's values: plain ones, which are compared as ``repr`` writes them.

    Raises:
        UserError: on every rank, if ``read`` raised on one, with the reason; RanksDifferError if not on all.
        BackendError: the ranks make different calls, a rank was lost, or the time ran out.
    """
    values: dict[str, str] = {}
    failure: Exception | None = None
    try:
        values = {name: _as_text(value) for name, value in read().items()}
    except Exception as error:  # whatever it is: the other ranks wait for this one
        failure = error
    backend.settle()
    hashes = agree(backend, Call("comparison", what), _FAILED if failure is not None else _hash(values))
    if len(set(hashes)) == 1 and _FAILED not in hashes:
        return []
    reason = None if failure is None else _reason(what, failure)
    answers = backend.allgather_object((values, reason), name=f"different {what}")
    _raise_failures([problem for _, problem in answers], failure)
    names = dict.fromkeys(name for theirs, _ in answers for name in theirs)
    found = (Difference(name, tuple(theirs.get(name) for theirs, _ in answers)) for name in names)
    return [difference for difference in found if len(set(difference.values)) > 1]


def in_words(differences: Sequence[Difference]) -> str:
    """The first differences with each rank's value, and the names of some more."""
    text = "; ".join(map(str, differences[:_SHOWN]))
    rest = [difference.name for difference in differences[_SHOWN:]]
    if rest:
        names = ", ".join(rest[:_NAMED]) + (", …" if len(rest) > _NAMED else "")
        text += f"; and {len(rest)} more: {names}"
    return text


def by_value(values: Sequence[str | None]) -> str:
    """``cpu on ranks 0, 2 and cuda on rank 1``: of values in rank order that are not all the same."""
    groups: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    shown = _excerpts(list(groups)[:_GROUPS])
    parts = [f"{text} on {ranks_in_words(ranks)}" for text, ranks in zip(shown, groups.values(), strict=False)]
    more = sum(len(ranks) for ranks in list(groups.values())[_GROUPS:])
    parts += [f"others on {more} more"] if more else []
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def refuse_unlike(what: str, values: Sequence[str], cure: str) -> None:
    """Refuses ranks whose values, in rank order, are not all the same.

    Raises:
        UserError: names each rank's value, and the ``cure``.
    """
    if len(set(values)) > 1:
        raise UserError(f"the ranks do not have the same {what} ({by_value(values)}): {cure}")


def ranks_in_words(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 2``, ``ranks 0-6, 9``: of ascending numbers."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    # Two neighbours are written as two numbers.
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (sum(map(len, runs)) > 1)} {', '.join(parts)}"


def _as_text(value: object) -> str:
    return "not set" if value is None else repr(value)


def _hash(values: Mapping[str, str]) -> int:
    text = "\0".join(f"{name}\0{values[name]}" for name in sorted(values))
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big") >> 1


def _raise_failures(reasons: Sequence[str | None], own: Exception | None) -> None:
    failed = [rank for rank, reason in enumerate(reasons) if reason is not None]
    if not failed:
        return
    reason = reasons[failed[0]]
    alike = [rank for rank in failed if reasons[rank] == reason]
    if len(alike) == len(reasons):
        raise UserError(str(reason), shared=True) from own
    raise RanksDifferError(f"{ranks_in_words(alike)}: {reason}") from own


def _reason(what: str, error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {' '.join(str(error).split())}, in {Path(frame.filename).name}:{frame.lineno}"
    return f"the {what} cannot be compared between the ranks ({text})"


def _excerpts(values: Sequence[str | None]) -> list[str]:
    """The values as a message shows them: of long ones, the part where they begin to differ."""
    texts = [value for value in values if value is not None]
    start = 0
    if len(texts) > 1 and max(map(len, texts)) > _WIDTH:
        low, high = min(texts), max(texts)  # what these two begin with, all begin with
        alike = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
        start = max(0, alike - _WIDTH // 2)
    return ["missing" if value is None else _cut(value, start) for value in values]


def _cut(text: str, start: int) -> str:
    part = text[start : start + _WIDTH]
    return f"{'…' * (start > 0)}{part}{'…' * (start + _WIDTH < len(text))}"
