"""Run an unmodified Horovod script on torch.distributed, or list and repair its differences and mistakes.

usage: torchrun --nproc_per_node=N -m dualtrain.horovodize SCRIPT [ARGUMENT…]
       torchrun --nproc_per_node=N -m dualtrain.horovodize -m MODULE [ARGUMENT…]
       dualtrain horovodize --check SCRIPT|FOLDER [SCRIPT|FOLDER…]
       dualtrain horovodize --fix [--diff] SCRIPT [SCRIPT…]
       dualtrain horovodize --prove [OPTION…] SCRIPT [ARGUMENT…]
       dualtrain horovodize --recorder

Instead of torchrun you can use mpirun, srun or plain python.

--check reads the scripts, but does not run them. It prints the findings. A finding is "differs" (the code works, but not as
on Horovod), "trap" (the code is probably wrong, on Horovod too) or "unsupported" (the code does not work). The exit status
is 0 if all findings are "differs", 1 if there are others, and 2 if a named file cannot be read. In a folder, --check reads
all Python files that import horovod, and prints the number of skipped files.

--fix makes the safe repairs, changes no other byte, and lists the remaining findings. The exit status depends on the
remaining findings, as with --check. --diff prints the changes as a diff for patch, and writes nothing.

--prove runs the script on Horovod and on torch.distributed, and compares weights and speed (see --prove --help).
--recorder prints a program for machines that have Horovod but not dualtrain. There, the program records a script's run.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Sequence

from dualtrain.console import print_error, refuse_on_all, show
from dualtrain.errors import UserError
from dualtrain.horovodize.run_script import Program, load_module, load_script
from dualtrain.launchers import World, detect_world, torchrun_is_parent
from dualtrain.processes import signal_at_parents_end


def main(arguments: Sequence[str]) -> int:
    """Run the command line. Return the exit status.

    Raise what the script raises, such as SystemExit, or SyntaxError or ValueError if it is not valid Python. ``--prove``
    may raise SystemExit too.
    """
    first, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if first in ("--check", "--fix", "--recorder") and {"-h", "--help"}.intersection(rest):
        first = "--help"
    if first in ("--check", "--fix", "--prove", "--recorder"):
        # Python's warnings about the code that it parses, such as an invalid escape sequence, would not name the file.
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            return _run_option(first, rest)
        except KeyboardInterrupt:
            print_error("interrupted")
            return 128 + signal.SIGINT
    world, parent = World(), os.getppid()
    try:
        if first in ("-h", "--help"):
            show((__doc__ or "python -OO has removed this help: start without -OO and PYTHONOPTIMIZE=2").strip())
            return 0
        world = detect_world()
        program = _load(first, rest)
    except UserError as error:
        return refuse_on_all(error, world)
    if torchrun_is_parent():
        signal_at_parents_end(signal.SIGTERM, parent)  # end if torchrun's agent is killed
    program.run()
    return 0


def _run_option(option: str, arguments: list[str]) -> int:
    """Run one of ``--check``, ``--fix``, ``--prove`` and ``--recorder``; return the exit status."""
    if option == "--check":
        from dualtrain.horovodize.check import check

        return check(arguments)
    if option == "--fix":
        from dualtrain.horovodize.fix import fix

        return fix(arguments)
    from dualtrain.horovodize.prove.command import print_recorder, prove

    return prove(arguments) if option == "--prove" else print_recorder(arguments)


def _load(first: str, rest: list[str]) -> Program:
    """Return the script to run. Set DUALTRAIN_BACKEND to "torch" if it is not set or is "auto".

    Raise UserError if the command line is wrong, the script cannot be read, or DUALTRAIN_BACKEND is "horovod".
    """
    if not first:
        raise UserError("no script was given: name one, or see --help")
    if first.startswith("-") and first != "-m":
        known = "-m, --check, --fix, --prove, --recorder, --help"
        raise UserError(f"unknown option {first!r}: the options are {known}; put options of the script after its name")
    if first == "-m" and not rest:
        raise UserError("-m was given without a module: name one, or see --help")
    wanted = os.environ.get("DUALTRAIN_BACKEND", "")
    if wanted == "horovod":
        raise UserError(
            "DUALTRAIN_BACKEND=horovod requests Horovod itself, which horovodize replaces: unset the variable, or start "
            "the script without horovodize"
        )
    if wanted in ("", "auto"):
        os.environ["DUALTRAIN_BACKEND"] = "torch"  # under mpirun the default is Horovod
    return load_module(rest[0], rest[1:]) if first == "-m" else load_script(first, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
