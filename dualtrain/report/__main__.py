"""``python -m dualtrain.report RUN [RUN …] [--out PAGE.html]``: show the results of runs on one page and in one picture.

Runs may be finished, running or interrupted. The charts show all runs in the same axes. Without --out, the page is
report.html, in the run's folder if there is one run, else in the current folder. The picture, with .png, shows the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dualtrain.console import parser_of, print_error, show
from dualtrain.errors import UserError
from dualtrain.files import write_whole
from dualtrain.report.report_charts import picture
from dualtrain.report.report_page import page
from dualtrain.report.runs import read_runs


def _write(folders: Sequence[str], out: str | None) -> list[Path]:
    runs = read_runs(folders)
    target = Path(out) if out is not None else Path(folders[0] if len(runs) == 1 else "", "report.html")
    if target.suffix != ".html":
        raise UserError(f"--out {str(target)!r} must end in .html: the picture gets the same name with .png")
    contents = {target: page(runs).encode(errors="replace"), target.with_suffix(".png"): picture(runs, tables=True)}

    for path, content in contents.items():
        try:
            write_whole(path, content)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise UserError(f"{str(path)!r} cannot be written ({reason}): name another file with --out") from error
    return list(contents)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report and print its paths. Return the exit status: 0, or 2 for an error that the user can fix."""
    parser = parser_of("dualtrain.report", str(__doc__))
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
    parser.add_argument("--out", metavar="PAGE.html", help="path of the page; the picture is written beside it")
    try:
        given = parser.parse_args(arguments)
        for path in _write(given.runs, given.out):
            show(path)
    except UserError as error:
        print_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
