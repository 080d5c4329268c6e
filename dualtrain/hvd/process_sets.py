"""Process sets: subsets of the ranks, for calls that only these ranks make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dualtrain.hvd.engine import Engine
from dualtrain.rendezvous.meeting_point import parts_of

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
_engine: Engine | None = None
_attached: list[ProcessSet] = []


class ProcessSet:
    """A subset of the ranks. It can be used after ``init`` or ``add_process_set`` has given it an id.

    Attributes:
        process_set_id: the set's id; ``None`` while the set is not usable. The global set always has the id 0.
        ranks: the ranks in ascending order, in the world's numbering; ``None`` for a set made from a communicator until
            ``init`` makes it usable for the first time.
        mpi_comm: the mpi4py communicator that the set was made from, or ``None``.

    Raises:
        ValueError: the argument is neither a list of ``int`` nor an mpi4py communicator.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        if hasattr(ranks_or_comm, "Get_rank"):
            self.mpi_comm = ranks_or_comm
            return
        try:
            ranks = sorted(ranks_or_comm)
        except TypeError:
            ranks = [None]
        if not all(isinstance(rank, int) for rank in ranks):
            raise ValueError(f"a process set is made from a list of ranks or an mpi4py communicator, not {ranks_or_comm!r}")
        self.ranks = ranks

    def size(self) -> int | None:
        """Return the number of ranks; ``None`` while the set is not usable.

        Raises:
            ValueError: this is the global set, and this process is not in a world.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        _connected()
        return len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's rank in the set; ``None`` while the set is not usable.

        Do not use it as the ``root_rank`` of a broadcast, which is a rank of the world.

        Raises:
            ValueError: this process is not in the set, or not in a world.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        if not self.included():
            raise ValueError(f"this process is not in {self}: call included() first")
        return self.ranks.index(_connected().backend.rank)

    def included(self) -> bool | None:
        """Return whether this process is in the set; ``None`` while the set's ranks are not known.

        Raises:
            ValueError: the ranks are known, and this process is not in a world.
        """
        return None if self.ranks is None else _connected().backend.rank in self.ranks

    def usable_id(self) -> int:
        """Return the id. Raises ValueError while the set is not usable."""
        if self.process_set_id is None:
            raise ValueError(f"{self} is not in use: pass it to hvd.init or hvd.add_process_set first")
        return self.process_set_id

    def _invalidate(self) -> None:
        self.process_set_id = None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


def check_is_set(process_set: object) -> None:
    """Raise ValueError if ``process_set`` is not a ``ProcessSet``."""
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set={process_set!r} is not a ProcessSet: pass what hvd.add_process_set has returned")


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def _connected() -> Engine:
    """Return the engine. Raises ValueError outside of a world."""
    if _engine is None:
        raise ValueError(NOT_INITIALIZED)
    return _engine


def attach(engine: Engine, sets: Sequence[ProcessSet], comm: Any = None) -> None:
    """Make ``sets`` usable in the world of ``engine``. Collective.

    If a set in use has the same ranks as one of ``sets``, both have the same id.

    Args:
        engine: the engine of this process.
        sets: the sets, in the same order on all ranks. A communicator may have different ranks on different processes
            (``Split``): then each process gets its part, and an id is given to each of the parts.
        comm: the mpi4py communicator that ``init`` was given, or ``None``.

    Raises:
        ValueError: in these cases:

            - Two of the ``sets`` have the same ranks (the second one cannot be used), or one of them has all ranks (it
              cannot be used). All other sets can be used.
            - A communicator is not valid.
            - A set has no ranks, a rank twice, or a rank that does not exist.
        HorovodInternalError: the ranks' sets differ, a rank failed, or Horovod was shut down.
    """
    global _engine
    _engine = engine
    global_process_set.ranks = list(range(engine.backend.size))
    if comm is not None and comm.Get_size() == engine.backend.size:  # else this is a later call of init, with another comm
        global_process_set.mpi_comm = global_process_set.mpi_comm or comm
    ids: dict[tuple[int, ...], int | None] = {tuple(ranks): set_id for set_id, ranks in ids_and_ranks().items()}
    seen: set[int | None] = {0}
    duplicates: list[str] = []
    for index, one in enumerate(sets):
        parts = [one.ranks or []]
        if one.mpi_comm is not None:
            one.ranks, parts = parts_of(one.mpi_comm, global_process_set.mpi_comm)
        for ranks in parts:
            if tuple(ranks) not in ids:
                ids[tuple(ranks)] = _add(engine, ProcessSet(ranks)).process_set_id
        one.process_set_id = ids[tuple(one.ranks or ())]
        if one.process_set_id in seen:
            duplicates.append(f"process_sets entry number {index} is a duplicate: {one}")
            if one not in _attached:
                one._invalidate()
            continue
        seen.add(one.process_set_id)
        if one not in _attached:
            _attached.append(one)
    if duplicates:  # not before all sets are added: other ranks may have no duplicate
        raise ValueError(f"Horovod could not be initialized because {duplicates[0]}")


def detach() -> None:
    """Make all added sets unusable, because the world has ended."""
    global _engine
    _engine = None
    global_process_set.mpi_comm = None
    for one in _attached:
        one._invalidate()
    _attached.clear()


def ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of each set that is in use, by the set's id."""
    return {
        one.process_set_id: list(one.ranks or [])
        for one in [global_process_set, *_attached]
        if one.process_set_id is not None
    }


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set usable and return it. Collective over all ranks; blocks.

    Raises:
        ValueError: in these cases:

            - A set of exactly these ranks exists already.
            - There are no ranks, a rank is given twice or does not exist, or the argument is not a list of ranks.
            - This process is not in a world.
            - New sets are not allowed. HOROVOD_DYNAMIC_PROCESS_SETS=1 or ``init(process_sets="dynamic")`` allows them.
        NotImplementedError: the set was made from an MPI communicator, and was never given to ``init``.
        HorovodInternalError: the ranks' calls do not match, a rank failed, or Horovod was shut down.
    """
    engine = _engine_with_dynamic_sets("adding")
    one = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if one.ranks is None:
        raise NotImplementedError("pass a process set made from an MPI communicator to hvd.init(process_sets=…)")
    return _add(engine, one)


def _engine_with_dynamic_sets(what: str) -> Engine:
    """Return the engine. Raises ValueError if there is none, or if sets cannot be added and removed after ``init``."""
    engine = _connected()
    if not engine.settings.dynamic_sets:
        raise ValueError(f"Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {what} process sets after Horovod initialization.")
    return engine


def _add(engine: Engine, one: ProcessSet) -> ProcessSet:
    """Give a new set an id. Collective over all ranks; blocks.

    Raises:
        ValueError: the set's ranks are not valid, or a set of exactly these ranks is in use.
        HorovodInternalError: as :func:`add_process_set`.
    """
    if not one.ranks or len(set(one.ranks)) < len(one.ranks) or one.ranks[0] < 0 or one.ranks[-1] >= engine.backend.size:
        raise ValueError(
            f"a process set needs one or more different ranks from 0 to {engine.backend.size - 1}, not {one.ranks}"
        )
    if one.ranks == global_process_set.ranks or any(one.ranks == other.ranks for other in _attached):
        raise ValueError(f"Attempted to add a duplicate process set: {one}")
    one.process_set_id = engine.submit("add_process_set", ranks=one.ranks).wait()
    _attached.append(one)
    return one


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, and return True. Collective over all ranks; blocks.

    Calls on the set that still wait for another rank's call fail.

    Return False at once for the global set, which cannot be removed, and for a set that is not in use.

    Raises:
        ValueError: removals are not allowed. HOROVOD_DYNAMIC_PROCESS_SETS=1 or ``init(process_sets="dynamic")`` allows
            them.
        HorovodInternalError: the ranks' calls do not match, a rank failed, or Horovod was shut down.
    """
    number = process_set.process_set_id
    if not number:
        return False
    _engine_with_dynamic_sets("removing")
    removed = bool(_connected().submit("remove_process_set", ranks=[number]).wait())
    for one in [process_set, *_attached]:  # not before: if the call fails, the set can still be used, and removed later
        if one.process_set_id == number:
            one._invalidate()
    _attached[:] = [one for one in _attached if one.process_set_id is not None]
    return removed
