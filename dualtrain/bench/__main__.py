"""``python -m dualtrain.bench [--quick]``: compare the speed of the libraries on this machine.

The contenders are torch's DDP, Horovod over Gloo and MPI, dualtrain on both backends, and, if they are installed,
Accelerate, Lightning Fabric and ignite. They run in rounds, in fresh processes. Contenders that are compared with each
other run shortly after each other.
This takes about 20 minutes, or 3 with --quick, which measures fewer contenders and workloads. It takes longer if contenders
hang in the first round. Run nothing else meanwhile.
The results are in bench.json, bench.html and bench.svg in the folder --out. The last line of the output answers whether to
move from Horovod to torch.
--jobs virtual measures the cost of --virtual-ranks instead: steps of the trainer with and without virtual ranks.
--targets also shows the targets of dualtrain's developers. The exit status is then 1 if a target is not met, not judged
(after fewer than 7 rounds) or not measured. Targets of optional contenders that are not installed do not count.
Without --targets, the exit status is 1 if all contenders failed.
--scale shows instead how costs grow with the number of ranks on this host (about 10 minutes; --ranks 2,4 takes 3).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dualtrain.bench.host_facts import host_facts, load, now
from dualtrain.bench.measure import Plan, Results, measure
from dualtrain.bench.plan import (
    COMPARISONS,
    COSTS,
    DEFAULT,
    ENTRIES,
    EPOCH_SAMPLES,
    FALLBACKS,
    GROUPS,
    JOBS,
    QUICK,
    ROUNDS,
    jobs_of,
    missing_package,
)
from dualtrain.bench.result_files import CHART, JSON, PAGE, write_files
from dualtrain.bench.rows import NOT_MET, Row, rows_of, sweep_of
from dualtrain.bench.scale_plan import layouts_of
from dualtrain.bench.start_contender import LaunchSpec
from dualtrain.console import given_path, parser_of, print_error, ranks_of_host, show, whole
from dualtrain.errors import UserError
from dualtrain.launchers import refuse_launcher

_WITHOUT_SCALE = ("quick", "nproc", "launch", "contenders", "jobs", "targets")  # options that --scale does not use
LIMIT_SECONDS, QUICK_SECONDS = 19.75 * 60.0, 172.0  # time limits for all rounds, without and with --quick


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("dualtrain.bench", str(__doc__))
    parser.add_argument("--quick", action="store_true", help="about 3 minutes: fewer contenders and workloads")
    parser.add_argument("--nproc", type=ranks_of_host, default=2, metavar="N", help="ranks on this host (default: 2)")
    parser.add_argument(
        "--launch",
        metavar="COMMAND",
        help="start every contender with this command: 'mpirun -np 8 --host a,b'; all hosts must share --out",
    )
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="auto: GPUs if there are any")
    parser.add_argument("--contenders", metavar="A,B", help=f"only these of {', '.join(ENTRIES)}")
    parser.add_argument("--jobs", metavar="A,B", help=f"only these of {', '.join((*JOBS, *GROUPS))}")
    parser.add_argument(
        "--pairs",
        type=whole(1, 10_000),
        metavar="N",
        help=f"number of rounds, if time permits; a round starts every contender once (default: {ROUNDS}; with --scale, "
        "the more ranks, the fewer rounds)",
    )
    parser.add_argument(
        "--targets",
        action="store_true",
        help="show the developers' targets; exit status 1 if one is not met, not judged or not measured",
    )
    parser.add_argument("--scale", action="store_true", help="how costs grow with the number of ranks on this host")
    parser.add_argument(
        "--ranks",
        metavar="A,B",
        help="with --scale: the numbers of ranks, or NxM for N virtual nodes of M ranks, which needs root (default: "
        "2,4,8,16,32,2x4,4x4)",
    )
    parser.add_argument(
        "--out", type=given_path, metavar="FOLDER", help="folder of the results (default: a new one below runs/)"
    )
    given = parser.parse_args(arguments)
    if given.ranks is not None and not given.scale:
        raise UserError("--ranks has no effect without --scale: use --nproc N for the other measurements")
    if given.launch is not None and given.nproc != parser.get_default("nproc"):
        raise UserError("--nproc has no effect with --launch, whose command sets the number of ranks: leave --nproc out")
    fixed = [f"--{name}" for name in _WITHOUT_SCALE if getattr(given, name) != parser.get_default(name)]
    if given.scale and fixed:
        raise UserError(f"--scale cannot be combined with {fixed[0]}: leave one of them out")
    return given


def _chosen(
    flag: str, text: str | None, known: Sequence[str], default: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    if text is None:
        return tuple(default)
    names = [name for given in text.split(",") for name in groups.get(given, (given,))]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"{flag}: {unknown[0]!r} is not known: choose from {', '.join((*known, *groups))}")
    return tuple(name for name in known if name in names)


def _prefix(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"--launch {text!r} cannot be split into words ({error}): fix its quotes") from None
    if not words:  # as after --launch "$UNSET": without this error, the bench would measure this host alone
        raise UserError("--launch has no command: give the command that starts your jobs, or leave --launch out")
    if shutil.which(words[0]) is None:
        raise UserError(f"--launch: there is no program {words[0]!r}: give the command that starts your jobs")
    return words


@contextmanager
def _folder(text: str | None) -> Iterator[Path]:
    """Make the folder of the results. After an error in the block, remove the folders that were made and are empty."""
    folder = Path(text) if text is not None else Path("runs", f"bench-{time.strftime('%Y%m%d-%H%M%S')}")
    missing: list[Path] = []
    try:
        with _writing(folder):
            missing += (path for path in (folder, *folder.parents) if not path.exists())
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        yield folder
    except BaseException:
        for path in missing:
            with suppress(OSError):  # a folder with files stays; a folder whose name is too long was not made
                path.rmdir()
        raise


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Convert OSError in the block to a UserError: the folder of the results cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--out {str(folder)!r} cannot be written ({error.strerror}): name another folder") from error


def _missing(names: Sequence[str], spec: LaunchSpec) -> dict[str, str]:
    """Return the contenders that cannot be started on this machine or by --launch, each with the reason."""
    found = {}
    for name in names:
        entry = ENTRIES[name]
        if reason := missing_package(entry):
            found[name] = reason
        elif spec.prefix and entry.ranks is not None:
            found[name] = f"its number of ranks is {entry.ranks}, but --launch sets the number for all contenders"
        elif spec.prefix and entry.starter != "ranks" and (reason := _why_not_started(spec.prefix, entry.starter)):
            found[name] = f"{reason}: give --launch '{entry.starter} …'"
    return found


def _fallbacks(spec: LaunchSpec, jobs: Sequence[str]) -> dict[str, str]:
    """Return the fallbacks (see ``measure.Plan``) that can be started here and have a job to measure."""
    missing = _missing(list(FALLBACKS.values()), spec)
    return {
        name: fallback
        for name, fallback in FALLBACKS.items()
        if fallback not in missing and jobs_of(ENTRIES[fallback], jobs)
    }


def _why_not_started(prefix: Sequence[str], starter: str) -> str:
    """Return why ``prefix`` might not start Horovod with the controller that ``starter`` names; "" if it will."""
    program, flag = Path(prefix[0]).name, starter.split()[1]
    if program == "horovodrun":
        # Without a flag, horovodrun chooses: MPI if Horovod was built with MPI, otherwise Gloo.
        return "" if flag in prefix else f"horovodrun without {flag} may use another controller"
    return "" if program in ("mpirun", "mpiexec") and flag == "--mpi" else f"{prefix[0]} cannot start it"


def _machine(spec: LaunchSpec, results: Results, began: tuple[str, str]) -> dict[str, str]:
    """Return facts about the machine and the measurement. ``began`` has the time and the load at the start."""
    ranks = next((s.ranks for column in results.samples.values() for s in column if s is not None), spec.ranks)
    divided = "dualtrain.main" if spec.prefix else "dualtrain.main and the tutorial script"
    return {
        "measured": f"{began[0]} to {now()}, in {results.rounds} round{'s' * (results.rounds != 1)}",
        "ranks": f"{ranks}, {f'started by {shlex.join(spec.prefix)}' if spec.prefix else 'on this host'}",
        **host_facts(
            spec.device,
            began[1],
            f"one intra-op thread per rank; in {divided}, the host's cores divided by its ranks",
        ),
    }


def _files(results: Results, rows: Sequence[Row], machine: dict[str, str], *, targets: bool) -> Iterator[tuple[str, str]]:
    """Yield names and contents of the files; no chart if it would be empty.

    The JSON file is first, so that the results are not lost if a chart fails.
    """
    from dualtrain.bench.bench_charts import chart_groups, picture
    from dualtrain.bench.bench_page import page
    from dualtrain.bench.table import answer

    plain: dict[str, Any] = {
        "machine": machine,
        "answer": answer(results, rows),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    fields = dataclasses.asdict(dataclasses.replace(results, interrupted=None))
    del fields["interrupted"]
    plain |= {"rounds": results.rounds, "allreduce": sweep_of(results), **fields}
    yield JSON, json.dumps(plain, indent=1)
    yield PAGE, page(results, rows, machine, targets=targets)
    reference, groups = chart_groups(results)
    if groups:
        yield CHART, picture(reference, groups)


def _run(given: argparse.Namespace) -> int:
    """Measure and print the results; return the exit status."""
    refuse_launcher("the bench", "its contenders")
    if given.scale:
        from dualtrain.bench.scale import run_scale

        layouts = layouts_of(given.ranks)
        with _folder(given.out) as folder:
            return run_scale(layouts, folder, given.device, given.pairs)
    jobs = _chosen("--jobs", given.jobs, JOBS, QUICK if given.quick else DEFAULT, GROUPS)
    default = [name for name, entry in ENTRIES.items() if (entry.quick or not given.quick) and jobs_of(entry, jobs)]
    names = _chosen("--contenders", given.contenders, list(ENTRIES), default, {})
    prefix = _prefix(given.launch)
    with _folder(given.out) as folder:
        # The work folder is always new, because it is deleted with its contents at the end.
        began = (now(), load())
        with tempfile.TemporaryDirectory(prefix="work-", dir=folder, ignore_cleanup_errors=True) as work:
            spec = LaunchSpec(given.nproc, given.device, Path(work), prefix)
            results = _measure(given, jobs, names, spec)
        if results.interrupted is not None and results.is_empty:
            raise results.interrupted
        return _conclude(folder, results, _machine(spec, results, began), targets=given.targets)


def _measure(given: argparse.Namespace, jobs: tuple[str, ...], names: tuple[str, ...], spec: LaunchSpec) -> Results:
    """Measure the contenders that can be started with this launch specification.

    Raises:
        UserError: none can be started, none has any of the jobs, or the folder of the results cannot be written.
    """
    fallbacks = _fallbacks(spec, jobs) if given.contenders is None else {}
    missing = _missing(names, spec)
    names = tuple(dict.fromkeys(fallbacks.get(name, name) if name in missing else name for name in names))
    if names and missing.keys() >= set(names):
        reasons = "; ".join(f"{ENTRIES[name].title}: {reason}" for name, reason in missing.items())
        raise UserError(f"no chosen contender can be started ({reasons}): choose others, or a different --launch")
    for name, reason in missing.items():
        show(f"{ENTRIES[name].title}: left out: {reason}", sys.stderr)
    entries = [name for name in names if name not in missing and jobs_of(ENTRIES[name], jobs)]
    if not entries:
        chosen = f"contenders ({', '.join(names)}) has any of the chosen jobs ({', '.join(jobs)})"
        raise UserError(f"none of the chosen {chosen}: choose others")
    if any({"feed", "epoch"} & {*jobs_of(ENTRIES[name], jobs)} for name in entries):
        from dualtrain.bench.mnist_files import write_mnist

        with _writing(spec.folder.parent):
            write_mnist(spec.folder, EPOCH_SAMPLES, EPOCH_SAMPLES // 6)
    seconds = QUICK_SECONDS if given.quick else LIMIT_SECONDS
    plan = Plan(entries, jobs, given.pairs or ROUNDS, 0.5 if given.quick else 1.0, seconds, fallbacks)
    results = measure(plan, spec, lambda line: show(line, sys.stderr))
    results.missing = {**missing, **results.missing}
    return results


def _conclude(folder: Path, results: Results, machine: dict[str, str], *, targets: bool) -> int:
    """Write the results to ``folder`` and print them; return the exit status.

    If the measurement was interrupted, raise the exception that interrupted it.
    """
    from dualtrain.bench.table import text

    rows = rows_of(results)
    try:
        write_files(folder, _files(results, rows, machine, targets=targets))
    finally:  # a measurement of 20 minutes must not be lost
        show(text(results, rows, machine, targets=targets))
    if results.interrupted is not None:
        raise results.interrupted
    if not targets:
        return 1 if results.is_empty else 0
    with_target = [row for row in rows if row.target is not None]
    missing = {
        name
        for name in results.missing.keys() & _with_targets()
        if not results.count(name) and not _lacks_optional_package(name)
    }
    return 1 if missing or not with_target or any(row.verdict in ("", NOT_MET) for row in with_target) else 0


def _lacks_optional_package(name: str) -> bool:
    """Return whether the contender needs a package other than Horovod, and the package is not installed."""
    entry = ENTRIES[name]
    return entry.needs != "horovod" and missing_package(entry) != ""


def _with_targets() -> set[str]:
    """Return the entries whose comparisons or costs have a target."""
    compared = {name for each in COMPARISONS if each.targets for name in each.entries}
    return compared | {name for cost in COSTS if cost.target is not None for name in (cost.one, cost.other)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the results. Return the exit status.

    0 for success; 1 if a target of --targets is not met, not judged or not measured, or if nothing could be measured;
    2 for an error that the user can fix; 130 after Ctrl-C.
    """
    try:
        return _run(_parse(arguments))
    except UserError as error:
        print_error(error)
        return 2
    except KeyboardInterrupt:
        print_error("interrupted")
        return 128 + signal.SIGINT


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # SystemExit runs the code that ends the ranks
    sys.exit(main())
