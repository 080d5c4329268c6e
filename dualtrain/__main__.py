"""All commands: ``dualtrain COMMAND …``, or ``python -m dualtrain COMMAND …``."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from contextlib import suppress
from pathlib import Path

#: The module of each command, and what the command does.
COMMANDS = {
    "train": ("main", "train a model, on one process or under a launcher"),
    "compare": ("compare", "print a table of finished runs, and compare their weights"),
    "report": ("report", "make an HTML page of runs"),
    "predict": ("predict", "classify images with a trained model"),
    "doctor": ("doctor", "check whether a run would work on this machine"),
    "bench": ("bench", "measure the speed of both backends, and of other libraries, on this machine"),
    "drill": ("drill", "kill processes of a job, and check that its result does not change"),
    "horovodize": ("horovodize", "check, repair and run Horovod scripts on torch.distributed"),
}
#: Commands that Ctrl-C ends at once, even in an import that turns KeyboardInterrupt into a different error. They write no
#: file and start no process.
_ENDED_AT_ONCE = ("compare", "predict")


def main() -> int:
    """Run the command that ``sys.argv`` names, as ``python -m dualtrain.MODULE`` would.

    A command that calls ``sys.exit`` sets the exit status. Otherwise, return the exit status: 0 after a command, the help
    or the version; 2 for an unknown command, or if the help or the version cannot be written; 130 after Ctrl-C. But after
    Ctrl-C in a script that ``horovodize`` runs, raise KeyboardInterrupt.
    """
    if sys.path[0] == os.path.dirname(os.path.realpath(sys.argv[0])):
        with suppress(FileNotFoundError):  # the current folder was deleted
            sys.path[0] = os.getcwd()  # find the user's modules in the current folder, as python -m does
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    from dualtrain.training.signals import end_on_early_interrupt, note_early_requests

    previous_handler = signal.getsignal(signal.SIGINT)
    end_on_early_interrupt()  # before the slow imports, as in dualtrain.main
    if name == "train":
        note_early_requests()
    from dualtrain import console
    from dualtrain.errors import UserError
    from dualtrain.version import __version__

    console.open_closed_streams()
    program = "dualtrain" if Path(sys.argv[0]).name == "dualtrain" else "python -m dualtrain"
    if name in ("", "-h", "--help", "--version"):
        try:
            console.show(f"dualtrain {__version__}" if name == "--version" else _overview(program))
        except UserError as error:
            console.print_error(error)
            return 2
        return 0
    if name not in COMMANDS:
        console.print_error(f"{name!r} is not a command: choose one of {', '.join(COMMANDS)}, or see {program} --help")
        return 2
    console.started_as = f"{program} {name}"
    del sys.argv[1]
    try:
        if name not in ("train", *_ENDED_AT_ONCE):
            signal.signal(signal.SIGINT, previous_handler)
        runpy.run_module(f"dualtrain.{COMMANDS[name][0]}", run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        if name == "horovodize":
            raise  # show the traceback of the user's script
        console.print_error("interrupted")
        return 128 + signal.SIGINT
    return 0


def _overview(program: str) -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {program} COMMAND …",
            "",
            *lines,
            "",
            f"{program} COMMAND --help lists the options of a command, and {program} --version prints the version.",
            f"Under a launcher: torchrun --nproc-per-node 2 -m dualtrain train, or horovodrun -np 2 {program} train.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
