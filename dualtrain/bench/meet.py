"""Rendezvous of contenders that read torchrun's environment variables, if the user's command starts the ranks."""

from __future__ import annotations

import os
import random
import socket
import time
from contextlib import suppress
from pathlib import Path

from dualtrain.errors import UserError
from dualtrain.launchers import detect_world

TIMEOUT_SECONDS = 60.0


def free_port() -> int:
    """Return a free port of this host, below the ephemeral range, so that Linux does not assign it to another socket."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with suppress(OSError), socket.create_server(("", port)):
            return port


def meet(path: Path) -> None:
    """Set the environment variables that torchrun sets, from those of this process's launcher.

    If the launcher provides no rendezvous, rank 0 writes its address to ``path``, and all ranks block until the file
    exists.

    Raises:
        UserError: the file does not appear in time, for example because its folder is not shared.
    """
    world = detect_world()
    os.environ.update({"RANK": str(world.rank), "WORLD_SIZE": str(world.size)})
    os.environ.update({"LOCAL_RANK": str(world.local_rank), "LOCAL_WORLD_SIZE": str(world.local_size)})
    os.environ["TORCHELASTIC_RUN_ID"] = "bench"
    if world.rendezvous is not None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = world.rendezvous[0], str(world.rendezvous[1])
        return
    if world.rank == 0:
        address = f"{socket.gethostname() if world.local_size < world.size else '127.0.0.1'} {free_port()}"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(address)
        temporary.replace(path)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise UserError(f"rank 0 did not write {str(path)!r}: give --out a folder that all hosts share")
        time.sleep(0.05)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = path.read_text().split()
