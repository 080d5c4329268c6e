"""Compare the ranks' calls, and describe calls and their differences in error messages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from dualtrain.hvd.arithmetic import NAMES

Message = dict[str, Any]
Key = tuple[int, str, str | None]  # process set, kind, name

#: Fields that must be the same in every rank's call, and their names in error messages.
EQUAL = {
    "op": "reduction",
    "pre": "prescale factor",
    "post": "postscale factor",
    "root": "root rank",
    "shape": "shape of the sparse tensor",
    "ranks": "ranks",
    "transport": "DUALTRAIN_TRANSPORT",
}
#: Kinds of calls in which the tensors' first dimension may differ from rank to rank.
FREE_ROWS = {"allgather", "grouped_allgather", "alltoall", "objects"}


def disagreement(key: Key, calls: dict[int, Message]) -> str | None:
    """Return why the ranks' ``calls`` cannot be executed together; ``None`` if they can.

    If some ranks refuse the call, the reason is that of the first of them in ``calls``. Otherwise, it is the first
    difference that is found between the first call in ``calls`` and another one.
    """
    for rank, call in calls.items():
        if call.get("refused") is not None:
            return f"rank {rank}: {call['refused']}"
    title, (first_rank, first), others = title_of(key), next(iter(calls.items())), list(calls.items())[1:]
    for rank, other in others:
        for name, meaning in EQUAL.items():
            if first.get(name) != other.get(name):
                one, two = _readable(name, first.get(name)), _readable(name, other.get(name))
                return f"{title}: {meaning} {one} on rank {first_rank}, {two} on rank {rank}"
        if first.get("layout") != other.get("layout"):
            pairs = zip_longest(first["layout"], other["layout"], fillvalue="nothing")
            one, two = next((a, b) for a, b in pairs if a != b)
            if sorted(first["layout"]) == sorted(other["layout"]):
                order = f"the order of the parameters differs: {one} on rank {first_rank}, {two} on rank {rank}"
                return f"{title}: {order}: pass named_parameters in the same order on every rank"
            return f"{title}: the parameters or options differ: {one} on rank {first_rank}, {two} on rank {rank}"
        differing = set(first.get("frozen", [])) ^ set(other.get("frozen", []))
        if differing:
            name = min(differing)
            frozen, trained = (first_rank, rank) if name in first.get("frozen", []) else (rank, first_rank)
            return (
                f"parameter {name!r} is frozen on rank {frozen} and trained on rank {trained}, so that their weights would "
                "differ: freeze the same parameters on every rank (if drawn at random, from the same seed)"
            )
        first_tensors, other_tensors = first.get("tensors", []), other.get("tensors", [])
        if len(first_tensors) != len(other_tensors):
            return f"{title}: {len(first_tensors)} tensors on rank {first_rank}, {len(other_tensors)} on rank {rank}"
        for (dtype, shape, device), (dtype2, shape2, device2) in zip(first_tensors, other_tensors, strict=True):
            if dtype != dtype2:
                return f"{title}: dtype {dtype} on rank {first_rank}, {dtype2} on rank {rank}"
            if device != device2:
                return f"{title}: a tensor on {device} on rank {first_rank}, on {device2} on rank {rank}"
            free = key[1] in FREE_ROWS
            if len(shape) != len(shape2) or shape[free:] != shape2[free:]:
                return f"{title}: shape {tuple(shape)} on rank {first_rank}, {tuple(shape2)} on rank {rank}"
    return None


def describe_deadlock(calls: dict[int, tuple[Key, Message]]) -> str:
    """Describe the calls of two deadlocked ranks."""
    (one, (key, first)), (two, (other_key, second)) = calls.items()
    of_gradients = all(kind == "channel" or str(name).startswith("gradients.") for _, kind, name in (key, other_key))
    difference = disagreement(key, {one: first, two: second}) if of_gradients and key[1] == other_key[1] else None
    fact = difference or f"{title_of(key)} on rank {one} and {title_of(other_key)} on rank {two} wait for each other"
    same = "have the same parameters, and step the same optimizers" if of_gradients else "make the same calls"
    return f"{fact}; every rank must {same} in the same order"


def _readable(name: str, value: Any) -> str:
    return NAMES.get(value, str(value)) if name == "op" else str(value)


def line_of(key: Key) -> str:
    """Return the name of the call's line on the timeline."""
    return f"channel.{key[2]}" if key[1] == "channel" else title_of(key)


def title_of(key: Key) -> str:
    """Return the name of the call in messages."""
    if key[1] == "channel":
        return f"the first gradients of the optimizer with the parameter {str(key[2]).rpartition('-')[0]!r}"
    return f"{key[1]}.{key[2] if key[2] is not None else 'noname'}" + (f" in process set {key[0]}" if key[0] else "")


def rows_of(shape: list[int]) -> int:
    """Return the number of rows of a tensor; a tensor without dimensions is one row."""
    return shape[0] if shape else 1


def name_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 1" or "ranks 0, 2"."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
