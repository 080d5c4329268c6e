"""Find values that differ between ranks, describe them, and refuse to continue with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dualtrain.errors import UserError

_SHOWN = 3  # differences that a message describes with their values
_NAMED = 5  # further differences that a message names
_GROUPS = 6  # different values that a message shows for one name
_WIDTH = 100  # characters that a message shows of a value


def fingerprint(text: str) -> int:
    """Return a hash of ``text``, below 2**63, by which ranks compare texts."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class Difference:
    """A name with different values on different ranks.

    Attributes:
        name: the name.
        values: each rank's value as text, in rank order; ``None`` on a rank without a value.
        ranks: the numbers by which messages name the ranks, in the same order; ``None`` for 0, 1, …
    """

    name: str
    values: tuple[str | None, ...]
    ranks: Sequence[int] | None = None

    def __str__(self) -> str:
        return f"{self.name} is {by_value(self.values, self.ranks)}"


def in_words(differences: Sequence[Difference]) -> str:
    """Return text with the first differences (see :func:`by_value`), and the names of some further differences."""
    text = "; ".join(map(str, differences[:_SHOWN]))
    rest = [difference.name for difference in differences[_SHOWN:]]
    if rest:
        names = ", ".join(rest[:_NAMED]) + (", …" if len(rest) > _NAMED else "")
        text += f"; and {len(rest)} more: {names}"
    return text


def by_value(values: Sequence[str | None], ranks: Sequence[int] | None = None) -> str:
    """Return text such as ``cpu on ranks 0, 2 and cuda on rank 1``.

    Shows up to six different values, and only a part of long ones. ``values`` must not all be equal. For both arguments,
    see :class:`Difference`.
    """
    groups: dict[str | None, list[int]] = {}
    for rank, value in zip(range(len(values)) if ranks is None else ranks, values, strict=True):
        groups.setdefault(value, []).append(rank)
    shown = _excerpts(list(groups)[:_GROUPS])
    parts = [f"{text} on {ranks_in_words(group)}" for text, group in zip(shown, groups.values(), strict=False)]
    more = sum(len(group) for group in list(groups.values())[_GROUPS:])
    parts += [f"other values on {more} more rank{'s' * (more > 1)}"] if more else []
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def refuse_unlike(what: str, values: Sequence[str], cure: str) -> None:
    """Refuse to continue if ``values``, one per rank in rank order, are not all the same.

    Raises:
        UserError: the values differ. The message shows up to six values, the ranks with each of them, and the ``cure``.
    """
    if len(set(values)) > 1:
        raise UserError(f"the ranks do not have the same {what} ({by_value(values)}): {cure}")


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, ``ranks 0, 2`` or ``ranks 0-6, 9`` for ascending numbers."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    # Two consecutive ranks are written as two numbers, not as a range.
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (sum(map(len, runs)) > 1)} {', '.join(parts)}"


def _excerpts(values: Sequence[str | None]) -> list[str]:
    """Return ``values``, no two of which are equal, as text; "missing" for ``None``.

    If any value is long, return only the part of each value around the first difference. A single text is cut at its end.
    """
    texts = [value for value in values if value is not None]
    long = max(map(len, texts), default=0) > _WIDTH
    excerpts = [_cut(value, _start(texts) if long and len(texts) > 1 else 0) for value in texts]
    if len(set(excerpts)) < len(texts):  # some texts differ only in a later part
        excerpts = [_cut(one, max(_start([one, other]) for other in texts if other != one)) for one in texts]
    found = dict(zip(texts, excerpts, strict=True))
    return ["missing" if value is None else found[value] for value in values]


def _start(texts: Sequence[str]) -> int:
    """Return where to begin the excerpts of texts, so that the place at which they begin to differ is in the middle."""
    # In sorted order, the common prefix of the first and the last text is the common prefix of all texts.
    low, high = min(texts), max(texts)
    common = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return max(0, common - _WIDTH // 2)


def _cut(text: str, start: int) -> str:
    part = text[start : start + _WIDTH]
    return f"{'…' * (start > 0)}{part}{'…' * (start + _WIDTH < len(text))}"
