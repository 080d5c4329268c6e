"""``python -m dualtrain.report RUN [RUN …] [--out PAGE.html] [--watch]``: show the results of runs on one page.

Runs may be finished, running or interrupted. Each chart shows all runs. Without --out, the page is report.html: in the
run's folder if there is one run, else in the current folder. The page is one file and loads no other files.

With --watch, the page is served on this host only, and no file is written. The command prints the page's address. The page
follows runs while they train. A run appears in the charts after it has logged a step. Ctrl-C ends the command.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from dualtrain.console import given_path, parser_of, print_error, show, whole
from dualtrain.errors import UserError
from dualtrain.files import write_named
from dualtrain.report.report_page import page
from dualtrain.report.runs import read_runs
from dualtrain.report.watch import server_of


def _write(folders: Sequence[str], out: str | None) -> Path:
    runs = read_runs(folders)
    target = Path(out) if out is not None else Path(folders[0] if len(runs) == 1 else "", "report.html")
    if target.suffix != ".html":
        raise UserError(f"--out {str(target)!r} must end in .html: the report is a web page")
    content = page(runs).encode()
    try:
        write_named(target, content)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"{str(target)!r} cannot be written ({reason}): name another file with --out") from error
    return target


def _watch(folders: Sequence[str], port: int) -> None:
    with server_of(folders, port) as server:
        show(f"{server.url}\nopen this address in a browser on this host; Ctrl-C ends the server")
        server.serve_forever()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report and print its path, or serve it. Return the exit status.

    0 for success, 2 for an error that the user can fix, 130 after Ctrl-C.
    """
    parser = parser_of("dualtrain.report", str(__doc__))
    parser.add_argument("runs", nargs="+", type=given_path, metavar="RUN", help="a run's folder")
    parser.add_argument("--out", type=given_path, metavar="PAGE.html", help="path of the page")
    parser.add_argument("--watch", action="store_true", help="serve the page on this host, and follow the runs")
    parser.add_argument("--port", type=whole(0, 65_535), metavar="N", help="TCP port of --watch (default: a free one)")
    try:
        given = parser.parse_args(arguments)
        if given.watch and given.out is not None:
            raise UserError("--watch writes no file: leave out --watch or --out")
        if given.port is not None and not given.watch:
            raise UserError("--port needs --watch: give both, or neither")
        if given.watch:
            _watch(given.runs, given.port or 0)
        else:
            show(_write(given.runs, given.out))
    except UserError as error:
        print_error(error)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
