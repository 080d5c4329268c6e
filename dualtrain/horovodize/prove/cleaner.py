"""End the processes of the runs, and remove their folders, even if ``--prove`` itself is killed.

This file is also a program, which imports no other module of dualtrain, so that it starts quickly:

usage: python cleaner.py VALUE FOLDER...

VALUE is the value that the environment variable DUALTRAIN_PROVE_RUN (``MARK`` below) has in the runs' processes.

The program waits until its standard input ends, which happens when ``--prove`` closes the pipe or is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress

#: Environment variable of the runs' processes. Its value identifies processes that a launcher leaves behind.
MARK = "DUALTRAIN_PROVE_RUN"
END_SECONDS = 10.0  # from SIGTERM to SIGKILL, and the longest duration of end_marked()
POLL_SECONDS = 0.05


def marked(mark: str) -> list[int]:
    """Return the ids of the processes whose variable ``MARK`` has the value ``mark``."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            # OSError: the process has ended, or belongs to another user.
            with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def end_marked(mark: str) -> None:
    """Kill the processes that have ``mark``, and those that they start meanwhile. Take at most ``END_SECONDS``."""
    deadline = time.monotonic() + END_SECONDS
    looks = 2  # a process that calls exec has no environment for a moment: look twice
    while looks and time.monotonic() < deadline:
        left = marked(mark)
        looks = 2 if left else looks - 1
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if looks:
            time.sleep(POLL_SECONDS)


def main(mark: str, folders: list[str]) -> None:
    """Wait for the end of standard input, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # batch systems signal all processes of a job
    sys.stdin.buffer.read()
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)  # on SIGTERM, the launcher also ends processes that lack the mark
    deadline = time.monotonic() + END_SECONDS
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    end_marked(mark)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
