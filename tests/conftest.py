"""Hooks of pytest, and fixtures such as ``spmd``, which run a test body on all ranks of a world."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from tests.pool import Pool, in_turn, named, reference

LOCAL = [("local", 1)]
THREADS = [("threads", 2), ("threads", 3)]
REAL = [(name, size) for name in ("torch", "horovod") for size in (2, 3, 4)]
SHARED = [("shm", size) for size in (2, 3)]  # torch, with reductions through shared memory
WORLDS = LOCAL + THREADS + REAL + SHARED
# SPREAD and TYPICAL have one size per kind of world; the fixture `real` has all sizes on torch and on Horovod.
SPREAD = [*LOCAL, ("threads", 3), ("torch", 3), ("horovod", 2), ("shm", 2)]
TYPICAL = [*LOCAL, ("threads", 3), ("torch", 2), ("horovod", 2), ("shm", 3)]
Cases = list[tuple[Any, ...]]
PREFIXES = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "MPI_LOCAL")
NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}

# A waiting OpenMP thread sleeps, so that another rank can use the core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadgroup``, distribute the tests to the processes of pytest-xdist in whole files or groups."""
    from tests.distribution import ByFile

    return ByFile(config, log) if config.option.dist == "loadgroup" else None


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        from tests.distribution import send_fewer_messages

        send_fewer_messages(config)


def pytest_collection(session: pytest.Session) -> None:
    """Load torch in the processes that run tests, and not in the process of pytest-xdist that only starts them."""
    if not session.config.getoption("numprocesses", None):
        import torch

        torch.set_num_threads(1)  # as in the pool's processes, so that sums have the same bits here


def pytest_runtest_logfinish() -> None:
    """Use one intra-op thread again after a test that has changed the number: the next test may compare bits."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Exclude the objects that exist now from garbage collection, to save the time of visiting them."""
    gc.collect()
    gc.freeze()


class Spmd:
    """Callable: ``spmd(fn, *args)`` runs ``fn(backend, *args)`` on all ranks, and returns the values in rank order.

    ``fn`` must be a module-level function.
    """

    def __init__(self, name: str, size: int, pool: Pool | None) -> None:
        self.name = name
        self.size = size
        self._pool = pool

    def __call__(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        reference(fn)  # refuses a local function on every kind of world
        if self._pool is not None:
            self._pool.connect(self.name, self.size)
            return self._pool.run(fn, *args)
        if self.name == "threads":
            from tests.threads import run_threads

            return run_threads(self.size, fn, *args)
        from dualtrain import connect

        with connect("local") as backend:
            return [fn(backend, *args)]

    def each(self, fn: Callable[..., Any], cases: Iterable[tuple[Any, ...]], on_horovod: Cases | None = None) -> None:
        """Run ``fn(backend, *case)`` on all ranks for each case; a world of processes runs all cases in one call.

        ``on_horovod``, if given, replaces ``cases`` on Horovod, where an operation takes ten times as long as on torch.
        """
        chosen = on_horovod if on_horovod is not None and self.name == "horovod" else list(cases)
        if self._pool is not None:
            self(in_turn, fn, chosen)
            return
        # Open a new world for each case. Otherwise, a thread could begin the next case and change globals that other
        # threads still use in this case.
        for case in chosen:
            with named(case):
                self(fn, *case)

    def leave(self) -> None:
        """Close the world of processes. Tests that make the world unusable call this."""
        if self._pool is not None:
            self._pool.disconnect()


def require_horovod() -> None:
    """Skip the test if Horovod is missing; in CI, fail it instead."""
    if importlib.util.find_spec("horovod") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs Horovod: bash launch/setup.sh")


#: The pool of processes, once a test has requested it.
_POOLS: list[Pool] = []


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Yield the worker processes, in which all worlds of processes are opened."""
    pool = Pool(max(size for _, size in WORLDS))
    _POOLS.append(pool)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def no_idle_world(request: pytest.FixtureRequest) -> None:
    """Close an open world before a test without a world of processes.

    Such a test may start ranks, which need the cores that the open world's threads use for polling.
    """
    if not _in_processes(request.node):
        for pool in _POOLS:
            pool.disconnect()


def _spmd(request: pytest.FixtureRequest) -> Spmd:
    name, size = request.param
    if name == "horovod":
        require_horovod()
    return Spmd(name, size, request.getfixturevalue("pool") if (name, size) in REAL + SHARED else None)


def _worlds(worlds: list[tuple[str, int]]) -> dict[str, Any]:
    return {"params": worlds, "ids": [f"{name}-{size}" for name, size in worlds]}


@pytest.fixture(**_worlds(SPREAD))
def spmd(request: pytest.FixtureRequest) -> Spmd:
    """A world of each kind, with the sizes of ``SPREAD``."""
    return _spmd(request)


@pytest.fixture(**_worlds(TYPICAL))
def typical(request: pytest.FixtureRequest) -> Spmd:
    """A world of each kind, with the sizes of ``TYPICAL``; for tests with many cases."""
    return _spmd(request)


@pytest.fixture(**_worlds(SPREAD[1:]))
def many(request: pytest.FixtureRequest) -> Spmd:
    """A world of each kind that has several ranks, for tests in which the ranks differ."""
    return _spmd(request)


@pytest.fixture(**_worlds([("torch", 3), ("horovod", 2)]))
def processes(request: pytest.FixtureRequest) -> Spmd:
    """A world of processes on torch, and one on Horovod, for tests that take seconds."""
    return _spmd(request)


@pytest.fixture(**_worlds(SHARED))
def shared(request: pytest.FixtureRequest) -> Spmd:
    """Worlds of processes that sum through shared memory."""
    return _spmd(request)


@pytest.fixture(**_worlds(REAL))
def real(request: pytest.FixtureRequest) -> Spmd:
    """Worlds of processes of all sizes, on torch and on Horovod."""
    return _spmd(request)


def _world_index(item: pytest.Item) -> int:
    """Return the index of a test's world in ``WORLDS``, or -1 if it has none.

    A test that uses only ``pool`` has the index of ``REAL[0]``.
    """
    params = getattr(getattr(item, "callspec", None), "params", {})
    used = [params[name] for name in ("spmd", "typical", "many", "processes", "real", "shared", "world") if name in params]
    if used:
        return WORLDS.index(used[0])
    return WORLDS.index(REAL[0]) if "pool" in getattr(item, "fixturenames", ()) else -1


def _in_processes(item: pytest.Item) -> bool:
    """Return whether the test has a world of processes."""
    return _world_index(item) >= WORLDS.index(REAL[0])


def pytest_itemcollected(item: pytest.Item) -> None:
    """Put the tests of all worlds of processes into one group of pytest-xdist's ``--dist loadgroup``.

    Tests of one group run in one process, one after another, so that two worlds never compete for the cores. The marks must
    be set in this hook, because xdist reads them as soon as all tests are collected.
    """
    if _in_processes(item):
        item.add_marker(pytest.mark.xdist_group("processes"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by world, because opening a world takes time.

    Under pytest-xdist, the longest tests come first, so that all of xdist's processes have tests until the end: the group
    ``processes``, then tests/launch. The other tests keep the order of their files.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        items.sort(key=_world_index)
        return

    def key(item: pytest.Item) -> tuple[int, int]:
        return (0, _world_index(item)) if _in_processes(item) else (1 if "launch" in item.path.parts else 2, 0)

    items.sort(key=key)


def _launcher_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in NAMES or name.startswith(PREFIXES)}


@pytest.fixture(autouse=True)
def no_environment_leaks() -> Iterator[None]:
    """Fail a test that leaves launcher variables changed, and restore them, because the next test would read them."""
    before = _launcher_variables()
    yield
    after = _launcher_variables()
    if after != before:
        for name in after:
            del os.environ[name]
        os.environ.update(before)
        changed = sorted(name for name, _ in before.items() ^ after.items())
        pytest.fail(f"the test leaves launcher variables changed: {', '.join(changed)}")


@pytest.fixture
def import_hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make ``import horovod`` import dualtrain, on torch's backend, even if an earlier test has imported Horovod."""
    from dualtrain.horovodize import imports

    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("DUALTRAIN_BACKEND", "torch")
    imports.install()
    yield
    imports.uninstall()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print, for each failed test, the command that repeats it."""
    reports = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    names = sorted({re.sub(r"@\w+$", "", report.nodeid) for report in reports})  # xdist adds @ and the group
    if names:
        terminalreporter.section("commands that repeat a failed test")
    for name in names:
        terminalreporter.line(f"bash launch/test.sh {shlex.quote(name)}")
