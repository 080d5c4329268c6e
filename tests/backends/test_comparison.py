"""Comparison of named values: every rank gets the same differences, or the same error if a rank cannot read its values."""

from __future__ import annotations

from functools import partial

import pytest

from dualtrain.backends.comparison import compare
from dualtrain.differences import Difference, in_words, ranks_in_words
from dualtrain.errors import BackendError, UserError
from tests.threads import run_threads


def found(backend, values) -> list[str] | str:
    """Return the differences as text, or the error, or "not shared" for an error whose ``shared`` is false."""

    def read():
        mine = values[backend.rank]
        if isinstance(mine, Exception):
            raise mine
        return mine

    try:
        return [str(difference) for difference in compare(backend, "settings", read)]
    except UserError as error:
        return str(error) if error.shared else "not shared"


def found_in_group(backend, values):
    group = backend.group([0, 2])
    return found(group, values) if group is not None and backend.rank != 1 else None


def test_messages_name_ranks_of_a_group_by_their_ranks_in_the_job():
    for number, expected in enumerate((["a is 1 on rank 0 and 2 on rank 2"], "rank 2: no such file")):
        values = [{"a": 1}, ({"a": 2}, UserError("no such file"))[number]]
        assert [each for each in run_threads(3, found_in_group, values) if each is not None] == [expected, expected]


class SilentError(Exception):
    """Used as an exception, and as a value to compare. Its text cannot be computed."""

    def __str__(self) -> str:
        raise KeyError("text")

    __repr__ = __str__


#: Values of rank 0 and rank 1; and the expected differences, their number, or the start of the error.
CASES = [
    ([{"a": 1, "b": "x"}, {"b": "x", "a": 1}], []),
    ([{"a": 1}, {"a": 1.0}], ["a is 1 on rank 0 and 1.0 on rank 1"]),
    ([{"a": 1, "b": None}, {"a": 1, "b": "not set"}], ["b is not set on rank 0 and 'not set' on rank 1"]),
    ([{"a": 1}, {}], ["a is 1 on rank 0 and missing on rank 1"]),
    (
        [{}, {"new": 1, "newer": 2}],
        ["new is missing on rank 0 and 1 on rank 1", "newer is missing on rank 0 and 2 on rank 1"],
    ),
    ([{"a": "caf\udce9\x1b[31m"}, {"a": "b"}], [r"a is 'caf\udce9\x1b[31m' on rank 0 and 'b' on rank 1"]),
    # A NUL inside a name does not split the name in two.
    ([{"a": 1, "b": 2}, {"a'\0'b": 2}], 3),
    ([{"a": 1}, UserError("no such file")], "rank 1: no such file"),
    ([UserError("no such file"), {"a": 1}], "rank 0: no such file"),
    ([UserError("no such file"), UserError("no such file")], "no such file"),
    ([{"a": 1}, KeyError("lost")], "rank 1: the settings cannot be compared between the ranks (KeyError: 'lost', in "),
    ([SilentError(), {}], "rank 0: the settings cannot be compared between the ranks (SilentError: its __str__ raised Key"),
    ([{}, {"a": SilentError()}], "rank 1: the settings cannot be compared between the ranks (KeyError: 'text', in "),
]


def all_cases(backend) -> list[list[str] | str]:
    return [found(backend, values) for values, _ in CASES]


def test_every_rank_gets_the_differences_or_the_failure(spmd):
    """Run all cases in one world of two ranks, because no case makes it unusable. Worlds of other sizes run one case."""
    if spmd.size != 2:
        values = [{"a": rank // 2} for rank in range(spmd.size)]
        expected = [] if spmd.size == 1 else ["a is 0 on ranks 0, 1 and 1 on rank 2"]
        assert spmd(found, values) == [expected] * spmd.size
        return
    answers = spmd(all_cases)
    assert answers[0] == answers[1]
    for answer, (values, expected) in zip(answers[0], CASES, strict=True):
        if isinstance(expected, str):
            assert isinstance(answer, str), values
            assert answer.startswith(expected), values
            assert "\n" not in answer
        elif isinstance(expected, int):
            assert len(answer) == expected
        else:
            assert answer == expected


def other_call(backend) -> str:
    call = backend.barrier if backend.rank else partial(compare, backend, "settings", dict)
    with pytest.raises(BackendError) as error:
        call()
    return str(error.value)


def test_a_rank_that_makes_another_call_is_an_error_on_all_ranks():
    one, other = run_threads(2, other_call)
    assert one == other
    assert "comparison of 'settings'" in one
    assert "barrier" in one


def test_a_reader_that_returns_no_mapping_is_an_error_on_all_ranks():
    for message in run_threads(2, found, [{"a": 1}, 7]):
        assert "cannot be compared between the ranks (AttributeError" in str(message)


def test_messages_with_many_differences_are_short():
    many = [Difference(f"--flag-{number}", ("1", "2")) for number in range(20)]
    text = in_words(many)
    assert text.startswith("--flag-0 is 1 on rank 0 and 2 on rank 1; --flag-1 is")
    assert text.endswith("and 17 more: --flag-3, --flag-4, --flag-5, --flag-6, --flag-7, …")
    assert in_words(many[:2]).count(";") == 1
    each = str(Difference("seed", tuple(map(str, range(1000)))))
    assert each.startswith("seed is 0 on rank 0, 1 on rank 1, ")
    assert each.endswith(" and other values on 994 more ranks")
    assert str(Difference("seed", tuple("0123456"))).endswith("5 on rank 5 and other values on 1 more rank")
    # Long values are cut to the part that differs.
    long = str(Difference("text", ("x" * 500 + "one" + "y" * 500, "x" * 500 + "two" + "y" * 500, None)))
    assert len(long) < 400
    assert "xone" in long
    assert "xtwo" in long
    assert "missing on rank 2" in long
    # Two values differ only at their ends, and the third one differs from both at its first character.
    three = str(Difference("text", ("x" * 500 + "one", "x" * 500 + "two", "y")))
    assert len(three) < 400
    assert "xone on rank 0, " in three
    assert "xtwo on rank 1 and y on rank 2" in three


def test_three_or_more_consecutive_ranks_are_written_as_a_range():
    assert [ranks_in_words(ranks) for ranks in ([3], [0, 2], [0, 1], [0, 1, 2, 5, 7, 8, 9])] == [
        "rank 3",
        "ranks 0, 2",
        "ranks 0, 1",
        "ranks 0-2, 5, 7-9",
    ]
