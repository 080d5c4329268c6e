"""dualtrain/hvd/README.md#rows-and-process-sets: process sets."""

from __future__ import annotations

import time

import pytest
import torch

from tests.forked import wait_until
from tests.hvd.worlds import OURS, OURS_3, PAIR, check, library, ours, same, worlds


def life_of_a_set(backend):
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        everyone = hvd.global_process_set
        assert (everyone.process_set_id, everyone.ranks) == (0, list(range(size)))
        assert (everyone.size(), everyone.rank(), everyone.included()) == (size, me, True)
        unused = hvd.ProcessSet([0])
        assert (unused.process_set_id, unused.size(), unused.rank()) == (None, None, None)
        first, second = hvd.add_process_set([0]), hvd.add_process_set(hvd.ProcessSet([1]))
        assert first.process_set_id != second.process_set_id
        assert 0 not in (first.process_set_id, second.process_set_id)
        mine, other = (first, second) if me == 0 else (second, first)
        assert (mine.size(), mine.rank(), mine.included(), mine.ranks) == (1, 0, True, [me])
        assert (other.size(), other.included()) == (1, False)
        check(
            hvd,
            same("mine", lambda: hvd.allreduce(torch.ones(1), name="a", process_set=mine), [1]),
            same("not mine", lambda: hvd.allreduce(torch.ones(1), name="b", process_set=other), "ValueError"),
            same("root", lambda: hvd.broadcast(torch.ones(1), other.ranks[0], name="c", process_set=mine), "ValueError"),
            same("rank", other.rank, "ValueError"),
            same("again", lambda: hvd.add_process_set([0]), "ValueError"),
            same("everyone", lambda: hvd.add_process_set(range(size)), "ValueError"),
            same("global", lambda: hvd.remove_process_set(everyone), False),
        )
        assert hvd.remove_process_set(first)
        assert (first.process_set_id, first.size()) == (None, None)
        assert not hvd.remove_process_set(first)
        if me == 0:
            with pytest.raises((ValueError, TypeError)):
                hvd.allreduce(torch.ones(1), name="d", process_set=first)
        again = hvd.add_process_set([0])
        if me == 0:
            assert hvd.allreduce(torch.ones(1), name="e", process_set=again).item() == 1
        assert hvd.remove_process_set(again)
        assert hvd.remove_process_set(second)
        assert hvd.allreduce(torch.ones(1), name="f", op=hvd.Sum).item() == size


@PAIR
def test_a_set_is_added_used_and_removed(fresh):
    fresh(life_of_a_set)


def several_sets(backend):
    """Use three sets at the same time. Also try invalid sets, remove a set and reuse its id, and call ``init`` again."""
    with library(backend) as hvd:
        me = hvd.rank()
        for wrong in ([], [0, 0], [-1], [3], [0, 7]):
            with pytest.raises(ValueError, match="different ranks"):
                hvd.add_process_set(wrong)
        with pytest.raises(ValueError, match="list of ranks"):
            hvd.ProcessSet("ab")
        sets = [hvd.add_process_set(ranks) for ranks in ([2, 0], [0, 1], [1, 2])]
        assert [s.process_set_id for s in sets] == [1, 2, 3]
        # Calls of all sets at the same time, with the same name, are independent.
        x = torch.tensor([me + 1.0])
        mine = [s for s in sets if s.included()]
        mine = mine[::-1] if me == 1 else mine
        named = {s.process_set_id: hvd.allreduce_async(x, name="x", op=hvd.Sum, process_set=s) for s in mine}
        unnamed = {s.process_set_id: hvd.allgather_async(x, process_set=s) for s in mine}
        for s in mine:
            assert hvd.synchronize(named[s.process_set_id]).item() == sum(r + 1 for r in s.ranks)
            assert hvd.synchronize(unnamed[s.process_set_id]).tolist() == [r + 1 for r in s.ranks]
        # If ranks disagree on a set, it is not added.
        with pytest.raises(hvd.mpi_ops.HorovodInternalError, match="ranks"):
            hvd.add_process_set([me])
        # A pending call fails when the set is removed.
        handle = hvd.allreduce_async(x, name="left", process_set=sets[0]) if me == 0 else None
        assert hvd.remove_process_set(sets[0])
        if handle is not None:
            with pytest.raises(hvd.mpi_ops.HorovodInternalError, match="removed"):
                hvd.synchronize(handle)
            with pytest.raises(ValueError, match="not in use"):
                hvd.allreduce(x, process_set=sets[0])
        assert hvd.add_process_set([0, 2]).process_set_id == 1  # ids are reused
        one = hvd.ProcessSet([2])
        hvd.init(process_sets=[one])
        assert one.process_set_id == 4
        assert hvd.allreduce(x, op=hvd.Sum).item() == 6
    assert one.process_set_id is None
    assert sets[1].size() is None


@OURS_3
def test_several_sets_are_independent(real):
    real(several_sets)


def equal_sets(backend):
    with library(backend) as hvd:
        first, again = hvd.add_process_set([0]), hvd.ProcessSet([0])
        hvd.init(process_sets=[again])
        assert again.process_set_id == first.process_set_id
        twice = [hvd.ProcessSet([0]), hvd.ProcessSet([0])]
        with pytest.raises(ValueError, match="entry number 1 is a duplicate"):
            hvd.init(process_sets=twice)
        assert [one.process_set_id for one in twice] == [first.process_set_id, None]
        with pytest.raises(ValueError, match="entry number 0 is a duplicate"):
            hvd.init(process_sets=[hvd.ProcessSet(range(hvd.size()))])
        with pytest.raises(ValueError, match="is a duplicate"):
            hvd.init(process_sets=[again, again])
        hvd.init(process_sets=[again])
        with pytest.raises((ValueError, AttributeError)):  # AttributeError: Horovod
            hvd.init(process_sets="static")
        if hvd.rank() == 0:
            assert hvd.allreduce(torch.ones(1), name="a", process_set=again).item() == 1
        assert hvd.remove_process_set(first)


@PAIR
def test_init_gives_a_set_in_use_the_same_id_again_but_refuses_two_equal_sets_in_one_call(fresh):
    fresh(equal_sets)


class Communicator:
    """Stub of an mpi4py communicator. ``allgather`` gathers from the ranks of one ``color``, as after ``Split``.

    ``Get_rank`` and ``Get_size`` return the rank and the size of the world.
    """

    def __init__(self, hvd, color=0):
        self.gather = lambda value: [one for key, one in hvd.allgather_object((color, value)) if key == color]
        self.Get_rank, self.Get_size = hvd.rank, hvd.size

    def allgather(self, value):
        return self.gather(value)


def split_sets(backend):
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        everyone, half = Communicator(hvd), hvd.ProcessSet(Communicator(hvd, me % 2))
        even = hvd.ProcessSet(range(0, size, 2))
        if me % 2 == 0:  # on the other ranks, `even` is no duplicate
            with pytest.raises(ValueError, match="entry number 1 is a duplicate"):
                hvd.init(comm=everyone, process_sets=[half, even])
        else:
            hvd.init(comm=everyone, process_sets=[half, even])
        assert (half.process_set_id, half.ranks) == (1 + me % 2, list(range(me % 2, size, 2)))
        assert hvd.global_process_set.mpi_comm is everyone
        x = torch.tensor([me + 1.0])
        assert hvd.allreduce(x, op=hvd.Sum, process_set=half).item() == sum(rank + 1 for rank in half.ranks)
        hvd.barrier()
    assert hvd.global_process_set.mpi_comm is None


@OURS_3
def test_a_split_communicator_makes_one_process_set_of_each_part(real):
    real(split_sets)


def invalid_communicator(backend):
    with library(backend) as hvd:
        everyone, one = Communicator(hvd), hvd.ProcessSet(Communicator(hvd))
        if hvd.rank() == 1:
            # `len` of a number raises TypeError, after this rank has taken part in the allgather.
            one.mpi_comm.gather = lambda value: hvd.allgather_object((1, value))[len(value)]
        with pytest.raises(ValueError, match="the communicator of a process set is not valid on rank 1"):
            hvd.init(comm=everyone, process_sets=[one])
        hvd.barrier()


@OURS_3
def test_a_communicator_that_is_not_valid_on_one_rank_is_refused_on_all_ranks(real):
    real(invalid_communicator)


def at_init(backend):
    hvd = ours()
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
    for _ in range(2):  # the same ProcessSet objects are used in the next world
        hvd.init(comm=backend, process_sets=sets)
        assert [s.process_set_id for s in sets] == [1, 2]
        if sets[0].included():
            hvd.allreduce(torch.ones(1), process_set=sets[0])
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == backend.size
        hvd.shutdown()
        assert [s.process_set_id for s in sets] == [None, None]


@OURS
def test_sets_can_be_given_to_init(real):
    real(at_init)


def barriers(backend, folder):
    """Enter a barrier of ranks 0 and 1, which waits for these ranks only. Files record the order of events."""
    with library(backend) as hvd:
        me = hvd.rank()
        pair = hvd.add_process_set([0, 1])
        hvd.barrier()
        if me == 1:
            time.sleep(0.15)  # if the barrier did not wait for rank 1, rank 0 would leave it in this time
            (folder / "enters 1").touch()
        if me == 2:
            # Ranks 0 and 1 must leave the barrier of their set before rank 2 enters its next barrier.
            assert wait_until(lambda: all((folder / f"leaves {rank}").exists() for rank in pair.ranks), 30)
            time.sleep(0.15)
            (folder / "enters 2").touch()
        else:
            hvd.barrier(process_set=pair)
            assert (folder / "enters 1").exists()
            (folder / f"leaves {me}").touch()
        hvd.barrier()
        assert (folder / "enters 2").exists()


@OURS_3
def test_a_barrier_waits_only_for_members_of_its_set(real, tmp_path):
    real(barriers, tmp_path)


def optimizer_of_a_set(backend):
    with library(backend) as hvd:
        me = hvd.rank()
        pair = hvd.add_process_set([0, 2])
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], process_set=pair)
        for _ in range(2):
            optimizer.zero_grad()
            (p.sum() * (me + 1)).backward()
            optimizer.step()
        assert p.tolist() == [-4.0, -4.0]  # two steps by 2: the mean of 1 and 3 on ranks 0 and 2, and rank 1's own gradient
        predivided = hvd.DistributedOptimizer(
            torch.optim.SGD([p], 1.0), [("p", p)], gradient_predivide_factor=2.0, process_set=pair
        )
        predivided.zero_grad()
        (p.sum() * (me + 2)).backward()
        predivided.step()
        assert p.tolist() == [-7.0, -7.0]
        if me != 1 and backend.name == "torch":
            predivided.zero_grad()
            p.data = p.data.double() if me == 2 else p.data
            (p.sum() * me).backward()
            # The error names the rank in the job, not rank 1 of the set.
            with pytest.raises(hvd.HorovodInternalError, match=r"^rank 2: parameter 'p' was float32"):
                predivided.step()
        # No rank may shut down before all have stepped: if a step makes a process group, all ranks must take part.
        hvd.barrier()


@OURS_3
def test_an_optimizer_combines_gradients_in_its_set_only(real):
    real(optimizer_of_a_set)


def optimizer_before_its_set(backend):
    with library(backend) as hvd:
        me = hvd.rank()
        adasum = [{"op": hvd.Adasum}] if backend.name == "torch" else []  # Horovod has no Adasum over Gloo
        for options in [{}, {"gradient_predivide_factor": 2.0}, {"op": hvd.Max}, *adasum]:
            pair = hvd.ProcessSet([0, 1])
            p = torch.nn.Parameter(torch.zeros(2))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], process_set=pair, **options)

            def step(p=p, optimizer=optimizer):
                optimizer.load_state_dict(optimizer.state_dict())  # loading a state discards a failed step
                optimizer.zero_grad()
                (p.sum() * (me + 1)).backward()
                optimizer.step()
                return p.tolist()

            if me < 2:
                with pytest.raises((TypeError, ValueError), match=None if backend.name == "horovod" else "not in use"):
                    step()
                assert p.tolist() == [0, 0]
            if backend.name == "horovod":
                return
            hvd.add_process_set(pair)
            moved = step()
            if me < 2:
                assert hvd.allgather_object(moved, process_set=pair) == [moved] * 2
                assert options.get("op") == hvd.Adasum or moved == [-2.0 if options.get("op") == hvd.Max else -1.5] * 2
            hvd.barrier()
            assert hvd.remove_process_set(pair)
            if me < 2:
                with pytest.raises(ValueError, match="not in use"):
                    step()
                assert p.tolist() == moved


@worlds(("torch", 3), ("horovod", 2))
def test_an_optimizer_whose_set_is_not_in_use_raises_instead_of_stepping_alone(fresh):
    fresh(optimizer_before_its_set)


def optimizer_of_one_rank(backend):
    with library(backend) as hvd:
        sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
        used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
        sgd = torch.optim.SGD([used, unused], 1.0, weight_decay=0.5)
        optimizer = hvd.DistributedOptimizer(sgd, [("used", used), ("unused", unused)], process_set=sets[hvd.rank()])
        (used.sum() * (hvd.rank() + 1)).backward()
        optimizer.step()
        hvd.barrier()
        return used.tolist(), unused.tolist(), unused.grad.tolist()


@PAIR
def test_in_a_set_of_one_rank_weight_decay_changes_parameters_without_gradient(fresh):
    assert fresh(optimizer_of_one_rank) == [([-0.5 - rank] * 2, [0.5, 0.5], [0, 0]) for rank in range(2)]


def adasum_outside(backend):
    with library(backend) as hvd:
        pair = hvd.add_process_set([0, 1])
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], op=hvd.Adasum, process_set=pair)
        (p.sum() * (hvd.rank() + 1)).backward()
        optimizer.step()
        hvd.barrier()
        return p.tolist()


@OURS_3
def test_with_adasum_a_rank_outside_of_the_set_steps_alone(real):
    first, second, outside = real(adasum_outside)
    assert first == second
    assert outside == [-3, -3]
