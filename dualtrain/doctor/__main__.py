"""``python -m dualtrain.doctor``: whether a run would work here, alone or under the launcher that started it.

Every rank tells rank 0 what it is and has; both backends join the world and time an allreduce; each problem is one line
with its cure. Exit status 0 if a run would work with the backend that --backend auto chooses there, or the one asked for;
else 2.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from dualtrain.console import leave, logging_to_stderr, parser_of, print_error, refuse_on_all, show
from dualtrain.errors import UserError
from dualtrain.launchers import World, detect_world


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number <= 86400:
        raise ValueError
    return number


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("dualtrain.doctor", str(__doc__))
    parser.add_argument(
        "--backend", choices=("torch", "horovod", "all"), default="all", help="which to test (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    help_ = "seconds that a backend may take to join, and any wait on it (default: 60)"
    parser.add_argument("--timeout", type=_seconds, default=60.0, metavar="SECONDS", help=help_)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Examines the world of this process and has rank 0 print the report; gives the exit status: 0, or 2.

    Collective where a launcher has started several processes; blocks until they have answered or the time is up.
    """
    world = World()
    try:
        world = detect_world()
        given = _parse(arguments)
    except UserError as error:
        return refuse_on_all(error, world)
    # What torch's C++ side logs when the others do not come, stack traces included, is said in one line here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from dualtrain.doctor.doctor_text import page
    from dualtrain.doctor.examine import Examination

    with logging_to_stderr():
        examination = Examination(given.backend, world, given.timeout)
    report = examination.report
    if world.rank == 0:
        show(json.dumps(report, indent=1) if given.json else page(report))
    elif len(report["ranks"]) < world.size:
        for line in report["problems"]:  # rank 0 does not hear of them
            print_error(line, world.rank, world.size)
    examination.end()
    return 0 if report["works"] else 2


if __name__ == "__main__":
    leave(main())
