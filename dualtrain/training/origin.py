"""Origin of a run: backend, ranks, command, commit, hosts and versions, for config.json and summary.json."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dualtrain.backends import Backend
from dualtrain.on_ranks import on_rank_zero
from dualtrain.trainer.same_run import versions

_GIT_SECONDS = 3.0  # a huge work tree on a slow disk must not delay the start of a run


def origin_of(backend: Backend, folder: Path) -> dict[str, Any]:
    """Return the origin of a run as a dict, for config.json and summary.json; equal on every rank. Collective; blocks.

    It has the backend, transport, launcher and world size, each host's number of ranks, the start time, and rank 0's
    device, command, commit and versions. ``folder`` is the folder in which the run was started.
    """
    hosts = Counter(backend.allgather_object(socket.gethostname(), name="host name"))
    return on_rank_zero(backend, "origin of the run", lambda: {"hosts": dict(hosts), **_of_this_rank(backend, folder)})


def _of_this_rank(backend: Backend, folder: Path) -> dict[str, Any]:
    return {
        "backend": backend.name,
        "transport": backend.transport,
        "launcher": backend.world.launcher,
        "world_size": backend.size,
        "device": str(backend.device),
        "command": shlex.join(sys.orig_argv),
        "commit": commit(folder),
        "versions": versions(backend),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit(folder: Path) -> str | None:
    """Return the commit of the Git work tree that contains ``folder``, with "-dirty" if tracked files were changed.

    Return ``None`` outside of a work tree, without Git or a commit, or if Git does not answer within some seconds.
    """
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=64"]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            # Don't lock Git's index: a commit at the same time would fail.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
