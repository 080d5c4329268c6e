"""``dualtrain drill [flags of dualtrain train]``: check that a job recovers from faults with an unchanged result.

Flags that the drill does not have itself describe the job: they are passed to dualtrain train. The drill runs the job once
without faults, then once more with faults at random moments (killed and stopped ranks, a killed launcher, SIGTERM, a kill
while a checkpoint is written, a damaged checkpoint and, as root, a full file system), and compares the results. --seed
determines the faults and their moments, and is also the job's seed. After a fault, torchrun restarts the ranks. With
--backend horovod, the launcher is horovodrun, which fails after a fault. The drill starts a failed launcher again. The exit
status is 0 if the results are bit for bit the same. It is 1 if they differ, or if the run with faults has another problem.
It is 2 if an argument is wrong, or if the job fails without faults.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dualtrain.config import parse
from dualtrain.console import (
    ending_by_signals,
    given_path,
    leave,
    parser_of,
    print_error,
    ranks_of_host,
    seconds,
    show,
    show_progress,
    text_table,
    whole,
)
from dualtrain.drill.exercise import Exercise, Report
from dualtrain.errors import UserError
from dualtrain.launchers import refuse_launcher

_SET_BY_DRILL = ("--run-dir", "--resume", "--max-restarts")  # flags of dualtrain train that the user may not give


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str], bool]:
    """Return the drill's own arguments, the job's flags, and whether horovodrun starts the job.

    The job's flags get --seed and, unless they are given, --log-every and --timeout.

    Raises:
        UserError: a flag is wrong, or is one that the drill sets itself.
    """
    parser = parser_of("dualtrain.drill", str(__doc__))
    parser.add_argument("--nproc", type=ranks_of_host, default=2, metavar="N", help="ranks on this host (default: 2)")
    parser.add_argument("--faults", type=whole(1, 10_000), default=12, metavar="N", help="how many faults (default: 12)")
    parser.add_argument(
        "--seed", type=whole(0, 2**32 - 1), default=0, metavar="S", help="seed of the faults and of the run (default: 0)"
    )
    parser.add_argument(
        "--limit",
        type=seconds,
        default=120.0,
        metavar="SECONDS",
        help="give up after this time without progress (default: 120)",
    )
    parser.add_argument(
        "--out",
        type=given_path,
        metavar="FOLDER",
        help="folder for both runs and their outputs (default: a new one in runs/)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    given, flags = parser.parse_known_args(arguments)
    for flag in flags:
        if flag.partition("=")[0] in _SET_BY_DRILL:
            cure = "use --out for the folder of both runs" if flag.startswith("--run-dir") else "leave it out"
            raise UserError(f"{flag.partition('=')[0]} is set by the drill: {cure}")
    flags += ["--seed", str(given.seed)]
    config = parse(flags)
    # Log every step, to follow the job. A short timeout detects a stopped rank within seconds.
    given_flags = {flag.partition("=")[0] for flag in flags}
    for flag, value in (("--log-every", "1"), ("--timeout", "10")):
        if flag not in given_flags:
            flags += [flag, value]
    return given, flags, config.run.backend == "horovod"


def _make_folder(out: str | None) -> Path:
    """Make the folder of both runs, and return its absolute path. Raises UserError if it exists or cannot be made."""
    folder = Path(out or Path("runs") / f"drill-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"--out {str(folder)!r} exists already: name a new folder") from None
    except OSError as error:
        raise UserError(f"--out {str(folder)!r} cannot be made ({error.strerror}): name another folder") from None
    return folder.resolve()


def table(report: Report) -> str:
    """Format a report as lines of text; the last one is the verdict."""
    rows = [["fault", "target", "moment", "detected after", "recovered after", "steps repeated"]]
    for row in report.rows:
        times = ["–" if value is None else f"{value:.1f} s" for value in (row.detected, row.recovered)]
        rows.append([row.fault, row.target, row.moment, *times, str(row.repeated)])
    weights = report.disturbed.get("weights_sha256", "")[:16]
    faults = f"{len(report.rows)} fault{'s' * (len(report.rows) != 1)}"
    verdict = f"yes, {faults}, and the same result as without faults, bit for bit ({weights})"
    lines = [*text_table(rows), "", f"same result: {'no, ' + '; '.join(report.problems) if report.problems else verdict}"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a drill. Return the exit status: 1 if the report has problems, 2 after a UserError, else 0.

    A signal during the drill raises SystemExit: see ``ending_by_signals``.
    """
    try:
        given, flags, horovod = _parse(arguments)
        refuse_launcher("the drill", "the ranks of its job")
        folder = _make_folder(given.out)

        def progress(line: str) -> None:
            if given.json:
                show(line, sys.stderr)
            else:
                show_progress(line)

        ranks = f"{given.nproc} rank{'s' * (given.nproc != 1)}"
        progress(f"drill of {ranks} under {'horovodrun' if horovod else 'torchrun'}, in {folder}")
        drill = Exercise(folder, flags, given.nproc, horovod=horovod, seed=given.seed, limit=given.limit, progress=progress)
        with ending_by_signals("the drill's job is ended, and nothing was compared"):
            report = drill.run(given.faults)
        show(json.dumps(report.plain(), indent=1) if given.json else f"\n{table(report)}")
    except UserError as error:
        print_error(error)
        return 2
    return 1 if report.problems else 0


if __name__ == "__main__":
    leave(main())
