"""The folder of a run.

It has the folder ``checkpoints/`` and the files ``generation-N``, ``config.json``, ``attempts.jsonl``, ``.progress``,
``metrics.jsonl`` and ``task.json``; at the end also ``model.safetensors`` and ``summary.json``. Depending on the run, it
also has ``model-best.safetensors``, ``do-not-restart.json``, ``tensorboard/``, and replaced files that are kept
(``NAME.aside``).
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from dualtrain.config import AUTO, OutputSection
from dualtrain.errors import UserError
from dualtrain.files import (
    absolute,
    aside_of,
    cure_of,
    link_whole,
    names_in,
    parse_json,
    read_text,
    readable_path,
    remove_temporary,
    without_nan,
    write_json,
    write_whole,
)
from dualtrain.models.weights import RECORD, read_safetensors, record_in
from dualtrain.run_folder.checkpoint import BEST
from dualtrain.run_folder.folder_lock import FolderLock, in_use, user_of
from dualtrain.state import weights_sha256

WEIGHTS = "model.safetensors"
BEST_WEIGHTS = "model-best.safetensors"
#: Files that a run writes from its first step on, or at its end.
_RESULTS = ("metrics.jsonl", WEIGHTS, BEST_WEIGHTS, "summary.json")
_NAMES = re.compile(
    r"(config|task|summary|do-not-restart)\.json|(metrics|attempts)\.jsonl(\.aside(-[0-9]+)?)?|\.progress"
    r"|model(-best)?\.safetensors|generation-[0-9]+"
)


def enter(output: OutputSection, name: str, lock: FolderLock, timeout: float) -> tuple[str | None, str | None]:
    """Lock the run's folder, if it holds a run; with ``--resume auto``, make the folder and lock it. On rank 0 only.

    The lock is taken before the run reads the folder's checkpoints, which determine where training starts. With
    ``--resume``, or in a restart of the job that made the run, wait some seconds, at most half of ``timeout``, for the end
    of another process that uses the folder.

    Without ``--run-dir``, the folder's name contains the job's name, if the launcher gives one, so that a restart finds the
    folder.

    Returns:
        The values of ``run_dir`` and ``resume`` to be used in place of those in ``output``. If ``run_dir`` is ``None``,
        :func:`claim` names the folder. A restart gets ``resume="auto"`` if ``output`` has no ``resume``, or if ``resume``
        names a file and the run's folder has checkpoints.

    Raises:
        UserError: the folder cannot be written, holds another run, or is used by another process.
    """
    if output.run_dir is None and not lock.job:
        return None, output.resume
    folder = absolute(output.run_dir or Path("runs", f"{name}-{lock.job}"))
    with _writable(folder):
        if output.resume == AUTO:
            folder.mkdir(parents=True, exist_ok=True)
        seen, is_running = user_of(folder)
        owner = seen.owner if seen is not None else None
        restart = owner is not None and lock.job != "" and lock.job in (owner.run, owner.job)
        other = None if restart else _other_content(folder, output)
        if other is not None:
            raise in_use(folder, seen) if is_running else other
        if output.resume == AUTO or seen is not None or (folder / "config.json").exists():
            lock.take(folder, timeout / 2, waits=restart or output.resume is not None)
            lock.check()
            remove_temporary(folder, _NAMES)  # here too: claim() is not called if the run has ended
    may_resume = output.resume is None or (output.resume_file is not None and _has_checkpoints(folder))
    return str(folder), AUTO if lock.restarted and may_resume else output.resume


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Convert OSError in the block to a UserError: the folder cannot be written."""
    try:
        yield
    except OSError as error:
        cure = cure_of(error, "this folder", "choose a folder that you may write")
        raise UserError(
            f"--run-dir {str(folder)!r} cannot be written ({error.strerror}): {cure}", transient=True
        ) from error


def claim(output: OutputSection, prefix: Path, content: Mapping[str, Any], lock: FolderLock, timeout: float) -> str:
    """Make the run's folder if it does not exist, lock it, and write ``config.json``; return its path. On rank 0 only.

    Also make ``checkpoints/``, and remove temporary files that killed processes left.

    Args:
        output: names the folder.
        prefix: the beginning of a new folder's path, if ``output`` names none.
        content: the content of ``config.json``.
        lock: the folder's lock, which may be held already.
        timeout: the run's timeout in seconds. A wait for the lock takes at most half of it.

    Raises:
        UserError: the folder cannot be written, holds another run, or is used by another process.
    """
    if output.run_dir is None:
        folder = _new_folder(prefix.parent, f"{prefix.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    else:
        folder = Path(output.run_dir)
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock.take(folder, timeout / 2)
        other = None if lock.restarted else _other_content(folder, output)
        if other is not None:
            raise other
        lock.check()
        (folder / "checkpoints").mkdir(exist_ok=True)
        remove_temporary(folder, _NAMES)
        write_json(folder / "config.json", dict(content), lock.check)
    return str(folder)


def _other_content(folder: Path, output: OutputSection) -> UserError | None:
    """Return the error for content that this start does not resume and must not replace; ``None`` if there is none.

    Raises UserError if ``checkpoints/`` cannot be read.

    Without ``--resume``, a run with neither a checkpoint nor a summary may be replaced, if its config.json is there.
    """
    known, file = (folder / "config.json").exists(), output.resume_file
    checkpoints = _has_checkpoints(folder) or (folder / "checkpoints" / BEST).exists()
    results = [name for name in _RESULTS if (folder / name).exists()]
    if results and not known and not checkpoints:
        return UserError(
            f"--run-dir {str(folder)!r} holds {', '.join(results)}, but no config.json of a run: choose a new folder, or "
            "move these files"
        )
    if output.resume is None:
        another = checkpoints or "summary.json" in results
    else:
        of_this = file is None or file.resolve().parent == (folder / "checkpoints").resolve()
        another = not of_this and (known or checkpoints)
    if not another:
        return None
    return UserError(
        f"--run-dir {str(folder)!r} holds another run: choose a new folder, or resume that run (--resume auto)"
    )


def _has_checkpoints(folder: Path) -> bool:
    """Return whether a run's folder has checkpoints of steps. Raises UserError if ``checkpoints/`` cannot be read."""
    try:
        return any(name.startswith("step-") for name in names_in(folder / "checkpoints"))
    except OSError as error:
        raise UserError(
            f"{str(folder / 'checkpoints')!r} cannot be read ({error.strerror}): repair the cause, or choose another "
            "--run-dir",
            transient=True,
        ) from error


def _new_folder(parent: Path, name: str) -> Path:
    """Make a folder that did not exist: runs that start within the same second get different folders.

    Raises UserError if it cannot be made.
    """
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(
                f"{str(folder)!r} cannot be made ({error.strerror}): name another folder with --run-dir"
            ) from error


def write_weights(path: Path, weights: dict[str, torch.Tensor], step: int, lock: FolderLock) -> None:
    """Write a model's weights as safetensors, with their step and hash, into ``lock``'s folder.

    Raises OSError, SupersededError.
    """
    record = json.dumps({"step": step, "weights_sha256": weights_sha256(weights)})
    write_whole(path, safetensors.torch.save(weights, metadata={RECORD: record}), lock.check)


def step_of(path: Path) -> int | None:
    """Read the step from a file of :func:`write_weights`; ``None`` if the file is missing or damaged, or has no step."""
    return _step_in(_record(path))


def _step_in(record: dict[str, Any]) -> int | None:
    step = record.get("step")
    return step if type(step) is int else None


def _record(path: Path) -> dict[str, Any]:
    """Return the record in a file of :func:`write_weights`; an empty dict if the file is missing or damaged."""
    try:
        with readable_path(path) as file:
            return record_in(file)
    except Exception:  # safetensors raises errors of many types for bad bytes
        return {}


def has_weights(path: Path, step: int, sha256: str | None = None) -> bool:
    """Return whether a file holds the weights of ``step``, undamaged. Reads the whole file.

    ``sha256`` is the hash of these weights, if the caller knows it. Files of versions before 0.3.0 have no hash.

    Raises MemoryError or RuntimeError if memory is too small.
    """
    record = _record(path)
    if _step_in(record) != step or sha256 not in (None, record.get("weights_sha256", sha256)):
        return False
    try:
        read_safetensors(path)
    except (OSError, ValueError):
        return False
    return True


class MetricsFile:
    """``metrics.jsonl``: one JSON object per line, written unbuffered. A line that does not fit on the disk is removed."""

    def __init__(
        self, folder: Path, step: int, report: Callable[[str], None], lock: FolderLock, evaluated_step: int | None = None
    ) -> None:
        """Keep the lines up to ``step``. If some lines are not metrics, keep the old file too, and call ``report``.

        ``evaluated_step`` is the step of the last evaluation up to ``step`` (default: ``step``). Lines of later evaluations
        are removed, since the run repeats these evaluations.

        Raises OSError, SupersededError.
        """
        path = folder / "metrics.jsonl"
        lines, unreadable = _lines(path)
        if unreadable:
            aside = aside_of(path, path)
            lock.check()
            link_whole(path, aside)
            found = "1 line that is not a metric" if unreadable == 1 else f"{unreadable} lines that are not metrics"
            report(f"{path} has {found}, left out of the new file; the old file is kept as {aside.name}")
        # The last step to keep, by kind of line. Lines of other kinds are kept up to ``step``.
        last = {"epoch": step if evaluated_step is None else evaluated_step}
        kept = [line for line in lines if line["step"] <= last.get(str(line.get("kind")), step)]
        content = "".join(json.dumps(without_nan(line)) + "\n" for line in kept).encode()
        write_whole(path, content, lock.check)
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags), "ab", buffering=0)
        self._size = len(content)

    def write(self, **values: Any) -> None:
        """Append one line. Raises OSError if that fails; the earlier lines then stay intact."""
        line = (json.dumps(without_nan(values)) + "\n").encode()
        if self._file.write(line) != len(line):  # the disk became full within the line
            self._file.truncate(self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines that are metrics, and the number of other lines, not counting an incomplete last line."""
    try:
        os.lstat(path)  # not lexists(), which hides errors of the disk: the caller would replace the file by an empty one
    except FileNotFoundError:
        return [], 0
    *whole, last = read_text(path, errors="replace").split("\n")
    parsed = [_metrics(line) for line in whole if line]
    # The last line of a killed run may be incomplete: the resumed run writes it again. It may also lack only its newline.
    rest = _metrics(last)
    parsed += [] if rest is None else [rest]
    lines = [line for line in parsed if line is not None]
    return lines, len(parsed) - len(lines)


def _metrics(line: str) -> dict[str, Any] | None:
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and type(value.get("step")) is int else None
