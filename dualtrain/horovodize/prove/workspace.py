"""The folders of the runs of one ``--prove``, and their removal."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dualtrain.errors import UserError
from dualtrain.horovodize.prove import cleaner

_IN_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Workspace:
    """The folders of the runs, and the mark of their processes.

    Attributes:
        folder: the folder for records and output.
        shared: the folder for Open MPI's shared memory; ``None`` if it cannot be made in ``/dev/shm``.
        mark: a unique value in the environment of all processes of the runs.
    """

    folder: Path
    shared: Path | None
    mark: str

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the runs: the mark, and Open MPI's folders, which a killed mpirun leaves behind."""
        found = {cleaner.MARK: self.mark, "OMPI_MCA_orte_tmpdir_base": str(self.folder)}
        return found if self.shared is None else {**found, "OMPI_MCA_btl_vader_backing_directory": str(self.shared)}


@contextmanager
def workspace() -> Iterator[Workspace]:
    """Make the folders. At the end, and if this process is killed, end the runs' processes and remove the folders.

    Raises:
        UserError: the folder cannot be made, or the block raises an OSError about a file in the folder.
    """
    mark = secrets.token_hex(4)
    try:
        folder = Path(tempfile.gettempdir()) / f"dualtrain-prove-{mark}"
    except OSError as error:
        raise UserError(f"there is no writable folder for temporary files ({error.strerror}): set TMPDIR to one") from None
    shared = _IN_MEMORY / folder.name
    command = [sys.executable, "-I", "-S", cleaner.__file__, mark, str(folder), str(shared)]
    # In a session of its own, the cleaner gets no signal when Ctrl-C is pressed or the terminal is closed.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        folder.mkdir(0o700)
        in_memory = False
        with suppress(OSError):
            shared.mkdir(0o700)
            in_memory = True
        yield Workspace(folder, shared if in_memory else None, mark)
    except OSError as error:
        if error.filename is None or not Path(os.fsdecode(error.filename)).is_relative_to(folder):
            raise
        text = (
            f"cannot write to {str(folder.parent)!r} ({error.strerror}): free space there, or set TMPDIR to another folder"
        )
        raise UserError(text) from None
    finally:
        _clean_up(process, mark, (folder, shared))


def _clean_up(process: subprocess.Popen[bytes], mark: str, folders: tuple[Path, ...]) -> None:
    """Close the pipe, and wait for the cleaner, which ends the processes and removes the folders.

    If the cleaner failed, do its work here.
    """
    assert process.stdin is not None
    process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(3 * cleaner.END_SECONDS)
    if process.returncode:  # a signal ended the cleaner, for example before it ignored signals
        cleaner.end_marked(mark)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
