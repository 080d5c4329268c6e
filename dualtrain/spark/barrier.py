"""Ranks in Spark's barrier mode: all tasks of a stage start together, and each task runs one rank as a child process.

The task of rank 0 serves the ranks' store. No other file of the package imports pyspark.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from pyspark import BarrierTaskContext, InheritableThread, SparkContext, cloudpickle

from dualtrain.errors import RankFailedError, UserError
from dualtrain.functions.children import GRACE_SECONDS, run_children
from dualtrain.functions.local import rank_environment, refuse_other_backend
from dualtrain.functions.outcome import results_of
from dualtrain.functions.payload import pickled_call
from dualtrain.launchers import World, new_job, spawned, without_launchers
from dualtrain.rendezvous.hosts import identity, listening_address
from dualtrain.rendezvous.store import StoreServer, listen

log = logging.getLogger(__name__)
T = TypeVar("T")

_POLL_SECONDS = 0.2
_CANCEL_SECONDS = 10.0  # longest wait until Spark has ended the tasks of a cancelled job


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` on ``num_proc`` ranks, each in a task of a Spark job; return the results by rank.

    The arguments are the same as for ``horovod.spark.run``. dualtrain must be installed on Spark's workers. In ``fn``,
    ``import horovod.torch as hvd`` loads ``dualtrain.hvd``. If a task fails, Spark ends the other tasks; on a cluster,
    Spark may start all tasks again (``spark.stage.maxConsecutiveAttempts``). Blocks until the Spark job has ended.

    Args:
        fn: a function that cloudpickle can pickle.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks; by default, ``spark.default.parallelism``.
        start_timeout: seconds within which Spark must start all tasks; by default, the value of the environment variable
            HOROVOD_SPARK_START_TIMEOUT, or 600 if that is not set.
        use_mpi, use_gloo, extra_mpi_args, verbose, prefix_output_with_timestamp: ignored.
        env: additional environment variables for the ranks.
        stdout, stderr: not supported: the ranks' output is in the logs of Spark's executors.
        nics: network interfaces; only the first one is used.
        executable: the ranks' Python interpreter; by default, the interpreter of Spark's workers.

    Raises:
        RankFailedError: the function failed on a rank, or a rank's process ended unexpectedly.
        UserError: an argument is wrong, DUALTRAIN_BACKEND is ``horovod``, there is no SparkContext, Spark did not start the
            tasks in time, or the function cannot be pickled.
        Exception: Spark's own error, if the Spark job failed for another reason.
    """
    if stdout is not None or stderr is not None:
        raise UserError(
            "stdout and stderr cannot be redirected to the driver: leave them out, and read the logs of Spark's executors"
        )
    if not callable(fn):
        raise UserError(f"run() was given {fn!r}, which cannot be called: give a function, and its arguments as args")
    refuse_other_backend()
    # pyspark has no public name for the running context, and getOrCreate would start a context if none runs.
    context = SparkContext._active_spark_context
    if context is None:
        raise UserError("there is no SparkContext: start Spark first, as with SparkSession.builder.getOrCreate()")
    size = context.defaultParallelism if num_proc is None else num_proc
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UserError(f"num_proc={num_proc!r} is not a number of ranks: give a whole number from 1")
    # ``env`` may be a copy of the driver's environment, with the driver's own rank.
    variables = without_launchers(env or {})
    for interface in list(nics or ())[:1]:
        variables["GLOO_SOCKET_IFNAME"] = interface
    task = _Task(pickled_call(fn, args, kwargs, cloudpickle), variables, executable)
    timeout = os.environ.get("HOROVOD_SPARK_START_TIMEOUT", "600") if start_timeout is None else start_timeout
    return results_of(_Job(context, task, size).results(_seconds(timeout)))


def _seconds(timeout: object) -> float:
    with suppress(TypeError, ValueError):
        seconds = float(timeout)  # type: ignore[arg-type]
        if seconds > 0:
            return seconds
    raise UserError(
        f"start_timeout or HOROVOD_SPARK_START_TIMEOUT is {timeout!r}, which is not a number above 0: give seconds"
    )


@dataclass(frozen=True)
class _Task:
    """The function that each Spark task calls."""

    payload: bytes
    variables: Mapping[str, str]
    executable: str | None
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    job: str = field(default_factory=new_job)

    def __call__(self, partition: Iterator[int]) -> Iterator[bytes]:
        """Run this task's rank; yield its pickled result."""
        context = BarrierTaskContext.get()
        rank, size = context.partitionId(), len(context.getTaskInfos())
        world = World().placed(rank, context.allGather(str(identity())))
        store: StoreServer | None = None
        address = ""
        try:
            if rank == 0:
                listening = listen(listening_address(world), [0], size)
                address = json.dumps(listening.getsockname()[:2])
                store = StoreServer(listening, size, self.secret)
            host, port = json.loads(context.allGather(address)[0])
            local = world.local_rank, world.local_size
            rank_variables = spawned(rank, size, (host, port), self.secret, self.job, local, "spark")
            env = rank_environment(world.local_size) | dict(self.variables) | rank_variables
            results = run_children([rank], size, [env], self.payload, self.executable)
            context.barrier()  # the store must serve until all ranks have ended
        except RankFailedError as error:
            if error.by_peer:
                # Spark reports the task that fails first. That must be the task of the rank that caused the failure.
                time.sleep(GRACE_SECONDS)
            raise error from None
        finally:
            if store is not None:
                store.close()
        yield from results


class _Job:
    """A Spark job in a thread, so that the caller can stop waiting for the job."""

    def __init__(self, context: SparkContext, task: _Task, size: int) -> None:
        self._context = context
        self._task = task
        self._size = size
        self._group = f"dualtrain-{task.job}"
        self._ended: Future[list[bytes]] = Future()

    def results(self, start_timeout: float) -> list[bytes]:
        """Return the tasks' results by rank. Blocks until all tasks have ended.

        On an error, cancel the Spark job. The errors are those of :func:`run`, and KeyboardInterrupt.
        """
        thread = InheritableThread(target=self._collect, name=self._group, daemon=True)
        thread.start()
        deadline: float | None = time.monotonic() + start_timeout
        try:
            while not self._ended.done():
                if deadline is not None and self._has_started():
                    deadline = None
                if deadline is not None and time.monotonic() > deadline:
                    self._refuse(start_timeout)
                self._wait(_POLL_SECONDS)
            return self._ended.result()
        except BaseException as error:
            self._context.cancelJobGroup(self._group)
            self._wait(_CANCEL_SECONDS)
            failure = _failure(str(error))
            if failure is None:
                raise
            raise failure from error

    def _collect(self) -> None:
        try:
            self._context.setJobGroup(self._group, f"dualtrain: {self._size} ranks", interruptOnCancel=True)
            tasks = self._context.parallelize(range(self._size), self._size).barrier()
            self._ended.set_result(tasks.mapPartitions(self._task).collect())
        except BaseException as error:
            self._ended.set_exception(error)

    def _wait(self, seconds: float) -> None:
        concurrent.futures.wait([self._ended], seconds)

    def _has_started(self) -> bool:
        return self._active() >= self._size

    def _active(self) -> int:
        """Return the number of tasks that run or have completed."""
        tracker = self._context.statusTracker()
        jobs = (tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._group))
        stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
        return sum(stage.numActiveTasks + stage.numCompletedTasks for stage in stages if stage is not None)

    def _refuse(self, seconds: float) -> NoReturn:
        raise UserError(
            f"Spark started {self._active()} of {self._size} tasks within {seconds:g} s, and ranks must start together; "
            f"Spark has {self._context.defaultParallelism} task slots (spark.default.parallelism): give a smaller "
            "num_proc, or a longer start_timeout if executors are started on demand"
        )


def _failure(text: str) -> RankFailedError | None:
    """Return a rank's failure that Spark's error contains, without Spark's stack trace; ``None`` if no rank failed."""
    found = re.search(r"RankFailedError: (rank (\d+) of \d+ [^\n]*)\n?(.*)", text, re.DOTALL)
    if found is None:
        return None
    trace, _, _ = found[3].partition("\n\tat ")
    return RankFailedError(found[1], int(found[2]), trace.strip())
