"""Fork a contender's ranks from a process that has imported torch and the contenders' libraries.

A new interpreter needs several seconds of CPU time to import torch. With many ranks on few cores, these imports would take
most of the time of ``bench --scale``. So the ranks are forked after the imports. The libraries connect the ranks after the
fork.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from dualtrain.bench import worker
from dualtrain.bench.plan import Entry
from dualtrain.bench.start_contender import (
    LaunchError,
    LaunchSpec,
    failed_statuses,
    rank_environments,
    reason_in,
    results_in,
)
from dualtrain.bench.virtual_nodes import Node
from dualtrain.rendezvous.hosts import variables

#: Modules that all ranks need. Optimizers import torch._dynamo (private in torch 2.5 to 2.15) in their first step.
#: multiprocessing ignores modules that are not installed.
_IMPORTED = ("torch._dynamo", "dualtrain.bench.workloads", "dualtrain.state")
_ENDING_SECONDS = 5.0


@cache
def fork_server(modules: tuple[str, ...], threads: int) -> BaseContext:
    """Start a fork server that imports the contenders' ``modules``; return a context that forks processes from it.

    A process has only one fork server: after the first call, calls with other arguments have no effect on it.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED, *(f"dualtrain.bench.contenders.{module}" for module in modules)])
    with variables(_common_environment(threads)):
        first = context.Process()  # a process without a task, to start the server with these variables
        first.start()
        first.join()
    return context


def run_forked(
    context: BaseContext, entry: Entry, jobs: Sequence[str], spec: LaunchSpec, step_fraction: float
) -> list[dict[str, Any]]:
    """Run a contender and return the results of all its ranks, in any order. Blocks until its processes have ended.

    Raises:
        LaunchError: a process failed, the timeout expired, or output lines of several ranks are mixed.
        OSError: a file, a process or a socket cannot be made.
    """
    arguments = [entry.module, ",".join(jobs), f"--device={spec.device}", f"--folder={spec.folder.resolve()}"]
    arguments += [f"--step-fraction={step_fraction}", f"--option={entry.option}"]
    with NamedTemporaryFile("r", dir=spec.folder) as log, rank_environments(entry.starter, spec) as ranks:
        arguments.append(f"--launched={time.time()}")
        started: list[Any] = []
        try:
            for number, environment in enumerate(ranks):
                node = spec.nodes[number * len(spec.nodes) // spec.ranks] if spec.nodes else None
                rank_arguments = (arguments, {**_common_environment(spec.threads), **environment}, log.name, node)
                started.append(context.Process(target=_run_rank, args=rank_arguments))  # type: ignore[attr-defined]
                started[-1].start()
            failed = failed_statuses(lambda: [process.exitcode for process in started], spec.timeout)
        finally:
            _end(started)
        text = Path(log.name).read_text(errors="replace")
    if failed:
        raise LaunchError(reason_in(text) or f"it ended with status {failed[0]}")
    return results_in(text)


def _common_environment(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


def _run_rank(arguments: Sequence[str], environment: Mapping[str, str], log: str, node: Node | None) -> None:
    output = open(log, "a", buffering=1)  # noqa: SIM115 - open until the process ends
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = output
    os.environ.update(environment)
    if node is not None:
        node.enter()
    worker.main(arguments)


def _end(processes: Sequence[Any]) -> None:
    """Kill the processes that have not ended by themselves."""
    left = [each for each in processes if each.exitcode is None]
    for each in left:
        each.kill()
    for each in left:
        each.join(_ENDING_SECONDS)
