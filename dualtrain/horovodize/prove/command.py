"""``dualtrain horovodize --prove``: run a script on both libraries, and compare weights and speed.

The unmodified script runs several times under real Horovod and under torchrun with dualtrain. The first run on each side
has --steps optimizer steps, and the later ones may have fewer. With up to 3 --rounds, the optimizer steps of all runs
add up to less than three times --steps (less than 150 if --steps is below 50), or to more if the weights differ only near
the end, or if dualtrain reproduced defects of Horovod. The command compares the weights after each step on each rank, the
number of steps and the exit status, and measures the speed of both sides.

The exit status is 0 if the script gives the same result, 1 if not, and 2 if the script cannot be run. If the script meets
a defect of Horovod, there is also a run in which dualtrain reproduces the defect. The result is the same if this run, or
a run without the defect, has the same bits as the run on Horovod. If two runs on Horovod differ from each other, twice
their difference is the tolerance for the comparison with dualtrain. With --against, the difference of two runs with
dualtrain is used instead.

If Horovod is on another machine, use --record FOLDER there and --against FOLDER here. If that machine has no dualtrain,
copy the recorder to it: dualtrain horovodize --recorder > record.py. If the record was made on another platform (processor,
GPU, version of torch or number of threads), weights may differ by 0.001 (relative), but by no more than a tenth of the
distance by which training has moved them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualtrain.console import (
    ending_by_signals,
    given_path,
    parser_of,
    print_error,
    printable,
    ranks_of_host,
    seconds,
    show,
    text_table,
    whole,
)
from dualtrain.errors import UserError
from dualtrain.files import check_named, read_text, write_json, write_whole
from dualtrain.horovodize import recorder
from dualtrain.horovodize.prove.causes import RACES, likely_causes, sources_of
from dualtrain.horovodize.prove.collect import collect
from dualtrain.horovodize.prove.evidence import Evidence
from dualtrain.horovodize.prove.launch import Job, RunError, require_horovod
from dualtrain.horovodize.prove.reader import read_record
from dualtrain.horovodize.prove.records import RunRecord
from dualtrain.horovodize.prove.results import facts, table
from dualtrain.horovodize.prove.verdict import Verdict, verdict_of
from dualtrain.horovodize.prove.workspace import workspace


def print_recorder(arguments: Sequence[str]) -> int:
    """Print the recorder's source, for a cluster without dualtrain. Return the exit status."""
    try:
        if arguments:
            raise UserError(
                f"--recorder only prints a program, and takes no argument {arguments[0]!r}: leave the argument out, save "
                "the output as record.py, and run record.py with the script"
            )
        show(read_text(Path(recorder.__file__)).rstrip("\n"))
    except UserError as error:
        print_error(error)
        return 2
    return 0


def prove(arguments: Sequence[str]) -> int:
    """Run ``--prove`` with these arguments. Return the exit status; raise SystemExit after ``--help`` or a signal."""
    try:
        args = _parse(arguments)
        with ending_by_signals("the script's runs are ended, and nothing was compared"):
            return _prove(args)
    except UserError as error:
        print_error(error)
        return 2
    except RunError as error:
        if error.traceback:
            show(error.traceback.rstrip("\n"), sys.stderr)
        print_error(error)
        return 2


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments. Raise UserError if they are wrong, and SystemExit after ``--help``."""
    parser = parser_of("dualtrain.horovodize --prove", str(__doc__))
    parser.add_argument("--nproc", type=ranks_of_host, help="ranks on this host (default: 2, or as many as were recorded)")
    parser.add_argument(
        "--steps",
        type=whole(1, 1_000_000),
        help="optimizer steps of the longest runs (default: 50, or as many as recorded)",
    )
    parser.add_argument(
        "--rounds", type=whole(1, 1000), default=3, help="runs on each side (default: 3); later runs may take fewer steps"
    )
    parser.add_argument(
        "--seed", type=whole(0, 2**32 - 1), help="seed torch, numpy and random on each rank before the script starts"
    )
    parser.add_argument(
        "--timeout", type=seconds, default=300.0, help="seconds without a step after which a run is ended (default: 300)"
    )
    parser.add_argument(
        "--record", type=_given_path, metavar="FOLDER", help="run on Horovod alone, once, and keep the record"
    )
    parser.add_argument(
        "--against", type=_given_path, metavar="FOLDER", help="compare with this record; do not run Horovod"
    )
    parser.add_argument("--json", type=_given_path, metavar="FILE", help="write all results to this file")
    parser.add_argument("--html", type=_given_path, metavar="FILE", help="write the results as a page to this file")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module")
    parser.add_argument("script", help="path of the script, or name of the module after -m")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    rest.required = False  # as in newer versions of Python: it may be empty
    args = parser.parse_args(list(arguments))
    if args.record is not None and args.against is not None:
        raise UserError("--record runs only Horovod and --against only dualtrain: give one of them")
    if not args.module and not os.path.isfile(args.script):
        raise UserError(f"cannot read the script {args.script!r} (no such file): check its path")
    if args.record is not None and (args.json or args.html):
        raise UserError("--record compares nothing: give --json and --html with --against")
    if args.record is not None:
        _check_new(args.record)
    for path in (args.json, args.html):
        if path is not None:
            _check_file(path)
    return args


def _given_path(text: str) -> Path:
    return Path(given_path(text))


def _check_file(path: Path) -> None:
    """Raise UserError unless results can be written to the file ``path``: the runs take minutes, so check this first."""
    above = path.absolute().parent
    if not above.is_dir():
        raise UserError(f"cannot write {str(path)!r} (no such folder): check its path")
    if path.is_dir():
        raise UserError(f"cannot write {str(path)!r} (it is a folder): name a file")
    try:
        check_named(path)
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r} ({error.strerror}): name a file") from None
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to {str(above)!r}: name a file in another folder")


def _prove(args: argparse.Namespace) -> int:
    """Make the record or the comparison, and return the exit status. Raises RunError, or UserError."""
    recorded = None if args.against is None else _complete_record(args.against)
    if recorded is None:
        require_horovod()
    nproc, steps, seed = _ranks_steps_and_seed(args, recorded)
    program = (*(["-m"] if args.module else []), args.script, *args.arguments)
    with workspace() as space:
        job = Job(program, nproc, steps, seed, args.timeout, space)
        if args.record is not None:
            _record_only(job, args.record)
            return 0
        evidence = collect(job, args.rounds, recorded)
    sources = {} if evidence.failure else sources_of(program)
    verdict = verdict_of(evidence, likely_causes(sources), likely_causes(sources, RACES))
    _report(args, evidence, verdict)
    return verdict.status


def _ranks_steps_and_seed(args: argparse.Namespace, recorded: RunRecord | None) -> tuple[int, int, int | None]:
    """Return the number of ranks, the number of steps, and the seed. Raises UserError if the record has different ones."""
    nproc, steps, seed = args.nproc, args.steps, args.seed
    if recorded is not None:
        start = recorded.ranks[0].start
        if nproc not in (None, recorded.size):
            raise UserError(f"--nproc {nproc}, but the record has {recorded.size} ranks: leave --nproc out")
        if steps not in (None, start["steps"]):
            raise UserError(f"--steps {steps}, but the record was made with --steps {start['steps']}: leave --steps out")
        if seed not in (None, start["seed"]):
            how = "without --seed" if start["seed"] is None else f"with --seed {start['seed']}"
            raise UserError(f"--seed {seed}, but the record was made {how}: leave --seed out")
        nproc, steps, seed = recorded.size, start["steps"], start["seed"]
    return nproc or 2, steps or 50, seed


def _complete_record(folder: Path) -> RunRecord:
    """Return the record in ``folder``; raise UserError if a rank failed, was killed or took no step, or on a read error."""
    recorded = read_record(folder)
    for number, rank in enumerate(recorded.ranks):
        on = f"in the record {str(folder)!r}, rank {number}"
        if rank.end is None:
            raise UserError(
                f"{on} was killed after step {rank.steps}, or its file is cut off: copy the file again, or record again"
            )
        if rank.end.status or rank.end.reason == "error":
            what = (rank.end.error or f"exit status {rank.end.status}").splitlines()[-1]
            raise UserError(f"{on} failed after step {rank.steps}: {what}; record the script again")
        if not rank.steps:
            raise UserError(f"{on} took no optimizer step: record the script with arguments that make it train")
    return recorded


def _check_new(folder: Path) -> None:
    """Raise UserError unless a record can be written to ``folder``."""
    try:
        used = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
        above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    except OSError as error:
        raise UserError(f"cannot read {str(folder)!r} ({error.strerror}): name another folder") from None
    if used:
        raise UserError(f"--record {str(folder)!r} exists: name a new folder")
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to {str(above)!r}: name another folder for --record {str(folder)!r}")


def _record_only(job: Job, folder: Path) -> None:
    """Run the script once on Horovod, and copy the record to ``folder``. Raises RunError, or UserError."""
    run = job.record("Horovod", "record")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted((job.space.folder / "record").glob("rank-*.jsonl")):
            write_whole(folder / path.name, path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot write to {str(folder)!r} ({error.strerror}): name another folder") from None
    show(f"recorded {run.steps} steps of {run.size} ranks on {run.library} in {folder}; compare with --against")


def _report(args: argparse.Namespace, evidence: Evidence, verdict: Verdict) -> None:
    """Write the requested files, and print the results. Raises UserError, after printing, if a file cannot be written."""
    lines = [*text_table(table(evidence)), "", *verdict.details, verdict.line]
    try:
        if args.json is not None:
            write_json(args.json, _all_facts(args, evidence, verdict))
        if args.html is not None:
            from dualtrain.horovodize.prove.page import page

            write_whole(args.html, page(args.script, evidence, verdict).encode())
    except OSError as error:
        raise UserError(f"cannot write {error.filename or 'the results'} ({error.strerror}): name another file") from None
    finally:
        show("\n".join(printable(line) for line in lines))


def _all_facts(args: argparse.Namespace, evidence: Evidence, verdict: Verdict) -> dict[str, Any]:
    return {"script": args.script, "arguments": args.arguments, **facts(evidence, verdict)}
