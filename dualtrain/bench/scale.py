"""Measurement of ``bench --scale``: each contender with each layout of ranks, in fresh processes."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path

from dualtrain.bench.forked_ranks import fork_server, run_forked
from dualtrain.bench.host_facts import host_facts, load, now
from dualtrain.bench.plan import missing_package
from dualtrain.bench.result_files import CHART, JSON, PAGE, write_files
from dualtrain.bench.scale_page import charted_layouts, milliseconds_of, page, picture, ratios_of, text
from dualtrain.bench.scale_plan import (
    CONTENDERS,
    JOBS,
    Layout,
    ScaleResults,
    expected_seconds,
    rounds_with,
    step_fraction,
    timeout_of,
    times_of,
)
from dualtrain.bench.start_contender import LaunchError, LaunchSpec
from dualtrain.bench.virtual_nodes import NodesError, virtual_nodes
from dualtrain.console import show
from dualtrain.cores import usable_cores


def measure_layouts(
    results: ScaleResults, names: Sequence[str], rounds: int | None, spec: LaunchSpec, log: Callable[[str], None]
) -> None:
    """Measure the contenders ``names`` with each layout, and record the times in ``results``.

    ``log`` gets a line with the expected time, a line for each start, and a line for each layout that is left out.
    A start that fails or exceeds its time limit is recorded, and the next start follows. Every second round starts the
    contenders in reverse order. If ``rounds`` is ``None``, the number of rounds depends on the number of ranks. A layout
    whose virtual nodes cannot be made is left out.
    """
    counts = {layout: rounds or rounds_with(layout.ranks) for layout in results.layouts}
    cores = usable_cores()
    seconds = sum(expected_seconds(layout.ranks, len(names), number, cores) for layout, number in counts.items())
    minutes = max(1, round(seconds / 60))
    log(f"this will take roughly {minutes} minute{'s' * (minutes > 1)} on {cores} core{'s' * (cores > 1)}")
    context = fork_server(tuple(CONTENDERS[name].module for name in names), spec.threads)
    for layout, count in counts.items():
        bounded = replace(spec, ranks=layout.ranks, timeout=timeout_of(layout.ranks))
        run = partial(_measure_layout, results, layout, names, count, context, log=log)
        if layout.nodes == 1:
            run(bounded)
            continue
        try:
            with virtual_nodes(layout.nodes, spec.folder) as nodes:
                run(replace(bounded, nodes=tuple(nodes)))
        except NodesError as error:
            results.unavailable[layout] = str(error)
            log(f"{layout.title}: not measured: {error}")


def _measure_layout(
    results: ScaleResults,
    layout: Layout,
    names: Sequence[str],
    rounds: int,
    context: BaseContext,
    spec: LaunchSpec,
    log: Callable[[str], None],
) -> None:
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            began = time.monotonic()
            title = f"{layout.title}, round {number + 1} of {rounds}: {CONTENDERS[name].title}"
            try:
                found = run_forked(context, CONTENDERS[name], JOBS, spec, step_fraction(layout.ranks))
                if not found:
                    raise LaunchError("its ranks printed no results")
            except (LaunchError, OSError) as error:  # OSError: a socket on a virtual node, for example
                results.failures[layout, name] = str(error)
                log(f"{title}: failed: {error}")
            else:
                results.rounds.setdefault((layout, name), {})[number] = times_of(found)
                log(f"{title}, {time.monotonic() - began:.1f} s")


def run_scale(layouts: Sequence[Layout], folder: Path, device: str, rounds: int | None) -> int:
    """Measure, write the results to ``folder`` and print them. Return the exit status: 1 if nothing could be measured.

    Without ``rounds``, layouts with more ranks get fewer rounds. After Ctrl-C or SIGTERM, the results so far are
    written and printed before the exception is raised again.

    Raises:
        UserError: the results cannot be written; they are printed nevertheless.
    """
    missing = {name: reason for name, entry in CONTENDERS.items() if (reason := missing_package(entry))}
    results, began, before = ScaleResults(layouts, missing=missing), now(), load()
    names = [name for name in CONTENDERS if name not in results.missing]
    try:
        with tempfile.TemporaryDirectory(prefix="work-", dir=folder, ignore_cleanup_errors=True) as work:
            spec = LaunchSpec(layouts[0].ranks, device, Path(work))
            measure_layouts(results, names, rounds, spec, lambda line: show(line, sys.stderr))
    finally:
        machine = {"measured": f"{began} to {now()}", **host_facts(device, before, "one intra-op thread per rank")}
        _conclude(folder, results, machine)
    return 0 if results.rounds else 1


def _conclude(folder: Path, results: ScaleResults, machine: Mapping[str, str]) -> None:
    try:
        write_files(folder, _files(results, machine))
    finally:
        show(text(results, machine))


def _files(results: ScaleResults, machine: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield names and contents of the files. The JSON file is first, so that it is not lost if the chart fails."""
    values = {
        "machine": machine,
        "milliseconds": milliseconds_of(results),
        "ratios": ratios_of(results),
        "missing": results.missing,
        "unavailable": {str(layout): reason for layout, reason in results.unavailable.items()},
    }
    yield JSON, json.dumps(values, indent=1)
    yield PAGE, page(results, machine)
    if charted_layouts(results):
        yield CHART, picture(results)
