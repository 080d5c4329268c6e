"""Program that starts many processes at once, which all try to lock one folder: ``starts.py FOLDER``.

This is a separate program, which does not import torch, because forks of a process with torch take long. For each round,
it prints a line of JSON: the replies of the processes, and the number of the folder's newest file ``generation-N``.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

from dualtrain.errors import UserError
from dualtrain.run_folder import folder_lock, generation
from dualtrain.run_folder.folder_lock import FolderLock

LIMIT = 60.0
STARTS, ROUNDS = 20, 5


def renew(lock: FolderLock, end: threading.Event) -> None:
    """Renew the lock's file more often than usual, so that renewals are in time on a busy machine too."""
    while not end.wait(0.05):
        lock._write(renew=True)


def start_all(folder: Path) -> list[str]:
    """Start the processes, and return the reply of each.

    The processes simulate two hosts. At the end they are killed, so that they do not release the lock.
    """
    reply_read, reply_write = os.pipe()
    start_read, start_write = os.pipe()
    processes = {fork(folder, reply_write, start_read, index % 2, (reply_read, start_write)) for index in range(STARTS)}
    os.close(start_read)
    os.close(reply_write)
    os.close(start_write)  # now each process reads EOF from ``start_read``, and tries to take the lock
    try:
        return answers(reply_read)
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        os.close(reply_read)


def fork(folder: Path, reply_write: int, start_read: int, machine: int, parent_descriptors: tuple[int, ...]) -> int:
    """Start a process that reads ``start_read`` to its end, tries to lock the folder, replies, and runs until killed.

    The process first closes ``parent_descriptors``, the descriptors that only its parent uses.
    """
    process = os.fork()
    if process:
        return process
    for descriptor in parent_descriptors:
        os.close(descriptor)
    try:
        folder_lock.identity = lambda: machine  # type: ignore[assignment]
        lock = FolderLock()
        os.read(start_read, 1)
        try:
            lock.take(folder, LIMIT)
            line = "has it"
        except UserError as error:
            line = "refused" if "is used by" in str(error) else str(error)
        os.write(reply_write, f"{line}\n".encode())
        renew(lock, threading.Event())
    finally:
        os._exit(1)


def answers(reply_read: int) -> list[str]:
    """Wait until all processes have written their lines, for ``LIMIT`` seconds at most, and return the lines."""
    data, deadline = b"", time.monotonic() + LIMIT
    while data.count(b"\n") < STARTS and time.monotonic() < deadline:
        if select.select([reply_read], [], [], 1.0)[0]:
            data += os.read(reply_read, 4096)
    return data.decode().splitlines()


if __name__ == "__main__":
    for _ in range(ROUNDS):
        lines = sorted(start_all(Path(sys.argv[1])))
        print(json.dumps([lines, generation.newest(Path(sys.argv[1]))]), flush=True)
