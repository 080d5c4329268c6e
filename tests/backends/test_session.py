"""Agreement of the ranks on a session (the name of an attempt), in a store that still has keys of failed attempts."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dualtrain.errors import UserError
from dualtrain.rendezvous import session
from dualtrain.rendezvous.session import agree_on_session


def limit(seconds=20.0):
    return seconds, time.monotonic() + seconds


def attempt(store, size):
    """Run all ranks of an attempt; return the session of each rank."""
    with ThreadPoolExecutor(size) as executor:
        return list(executor.map(lambda rank: agree_on_session(store, rank, size, limit()), range(size)))


def times_out(store, rank, size):
    """Run a rank that times out before all ranks have joined."""
    with pytest.raises(UserError, match=r"within 0\.1 s"):
        agree_on_session(store, rank, size, limit(0.1))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_attempt_has_a_session_of_its_own(size):
    store = dist.HashStore()
    sessions = [attempt(store, size) for _ in range(4)]
    assert all(len(set(each)) == 1 for each in sessions)
    assert len({each[0] for each in sessions}) == 4


@pytest.mark.parametrize("failed_ranks", [[0], [1], [2], [0, 1], [1, 2]], ids=str)
def test_keys_of_failed_attempts_are_not_used(failed_ranks):
    store = dist.HashStore()
    before = set(attempt(store, 3))
    with ThreadPoolExecutor(3) as executor:
        list(executor.map(lambda rank: times_out(store, rank, 3), failed_ranks))
    sessions = set(attempt(store, 3))
    assert len(sessions) == 1
    assert not sessions & before


def test_ranks_ignore_a_failed_attempt_with_another_world_size():
    store = dist.HashStore()
    times_out(store, 1, 4)
    times_out(store, 0, 4)
    assert len(set(attempt(store, 2))) == 1


def test_ranks_with_different_world_sizes_do_not_join():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as executor:
        both = [executor.submit(agree_on_session, store, rank, size, limit(1.0)) for rank, size in ((0, 2), (1, 4))]
        assert all(isinstance(each.exception(), UserError) for each in both)


def test_ranks_wait_for_a_late_rank():
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as executor:
        early = [executor.submit(agree_on_session, store, rank, 3, limit()) for rank in (0, 1)]
        time.sleep(0.1)
        late = executor.submit(agree_on_session, store, 2, 3, limit())
        assert len({each.result() for each in (*early, late)}) == 1


def test_a_rank_that_does_not_join_is_named():
    with pytest.raises(UserError, match=r"rank 1 of 3 did not join within 0\.1 s"):
        agree_on_session(dist.HashStore(), 0, 3, limit(0.1))
    with pytest.raises(UserError, match=r"rank 0 of 3 did not answer rank 2 within 0\.1 s"):
        agree_on_session(dist.HashStore(), 2, 3, limit(0.1))


def test_after_an_answer_of_rank_0_the_error_names_the_missing_rank(monkeypatch):
    monkeypatch.setattr(session.secrets, "token_hex", lambda _: "number")
    store = dist.HashStore()
    store.set("answer/1/number", "name")
    with pytest.raises(UserError, match=r"rank 2 of 3 did not join within 0\.1 s"):
        agree_on_session(store, 1, 3, limit(0.1))


def test_an_older_rank_0_that_still_runs_is_refused():
    """The other ranks use the new rank 0's session, even if the older rank 0 answered first."""
    store, old = dist.HashStore(), []

    def older():
        try:
            agree_on_session(store, 0, 3, limit())
        except UserError as error:
            old.append(str(error))

    thread = threading.Thread(target=older)
    thread.start()
    with ThreadPoolExecutor(3) as executor:
        first = executor.submit(agree_on_session, store, 1, 3, limit())
        time.sleep(0.1)  # the older rank 0 answers rank 1
        others = [executor.submit(agree_on_session, store, rank, 3, limit()) for rank in (0, 2)]
        assert len({each.result() for each in (first, *others)}) == 1
    thread.join(20)
    assert old == [
        "another process is rank 0 of 3 now: a process of a failed attempt still runs, or two processes were "
        "started as this rank: end them, and start the job again"
    ]


def test_only_one_of_two_processes_with_the_same_rank_joins():
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as executor:
        both = [executor.submit(agree_on_session, store, 1, 2, limit(2.0)) for _ in range(2)]
        leader = executor.submit(agree_on_session, store, 0, 2, limit())
        sessions, errors = set(), []
        for each in both:
            try:
                sessions.add(each.result())
            except UserError as error:
                errors.append(str(error))
        assert sessions == {leader.result()}
    assert len(errors) == 1
    # The second process gets no answer if it starts after all ranks have joined.
    assert all("rank 1 of 2 has joined already" in error or "did not answer" in error for error in errors)


def test_a_second_process_with_the_same_rank_and_random_number_does_not_join(monkeypatch):
    monkeypatch.setattr(session.secrets, "token_hex", lambda _: "same")
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as executor:
        all_three = [executor.submit(agree_on_session, store, rank, 2, limit()) for rank in (0, 1, 1)]
        errors = [str(each.exception()) for each in all_three if each.exception() is not None]
    assert ["rank 1 of 2 has joined already" in error for error in errors] == [True]
