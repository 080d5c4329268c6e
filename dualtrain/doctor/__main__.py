"""``python -m dualtrain.doctor``: check whether a run would work here, with or without a launcher.

Start it as you would start the run. Every rank sends its versions, devices and interfaces to the other ranks, and rank 0
prints the report. Each tested backend joins the world and times an allreduce. Each problem is printed in one line with its
cure. The exit status is 0 if a run would work, else 2. With --backend all, a backend that the command 'dualtrain train'
would not choose here does not affect the exit status.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from dualtrain.console import (
    leave,
    logging_to_stderr,
    parser_of,
    print_error,
    refuse_on_all,
    refuse_removed_folder,
    seconds,
    show,
)
from dualtrain.errors import UserError
from dualtrain.launchers import World, detect_world


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("dualtrain.doctor", str(__doc__))
    parser.add_argument(
        "--backend", choices=("torch", "horovod", "all"), default="all", help="backends to test (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    help_ = "limit in seconds for a backend to join, and for each of its operations (default: 60)"
    parser.add_argument("--timeout", type=seconds, default=60.0, metavar="SECONDS", help=help_)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the world of this process; rank 0 prints the report. Return the exit status, 0 or 2.

    Collective if a launcher started several processes. Blocks until all processes have reported, or until the time limits
    of all tested backends have expired. A rank that received no other rank's facts prints its own problems.
    """
    world = World()
    try:
        world = detect_world()
        given = _parse(arguments)
        refuse_removed_folder()
    except UserError as error:
        return refuse_on_all(error, world)
    # Silence the stack traces that torch's C++ code logs when ranks are missing: one line of the report is enough.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from dualtrain.doctor.doctor_text import page
    from dualtrain.doctor.examine import Examination

    with logging_to_stderr():
        examination = Examination(given.backend, world, given.timeout)
    report, shown = examination.report, True
    if world.rank == 0:
        try:
            show(json.dumps(report, indent=1) if given.json else page(report))
        except UserError as error:
            print_error(error)
            shown = False
    elif len(report["ranks"]) < world.size:
        for line in report["problems"]:  # rank 0 did not receive this rank's problems, and does not print them
            print_error(line, world.rank, world.size)
    examination.end()
    return 0 if report["works"] and shown else 2


if __name__ == "__main__":
    leave(main())
