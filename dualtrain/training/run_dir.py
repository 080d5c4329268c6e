"""The folder of a run: ``config.json``, ``metrics.jsonl``, ``checkpoints/``, ``task.json``,
``model.safetensors``, ``model-best.safetensors``, ``summary.json``."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from dualtrain.config import Config
from dualtrain.errors import UserError
from dualtrain.files import link_whole, parse_json, read_text, readable_path, remove_temporary, write_json, write_whole

BEST_WEIGHTS = "model-best.safetensors"
_NAMES = re.compile(r"(config|task|summary)\.json|metrics\.jsonl|model(-best)?\.safetensors")


def claim(config: Config) -> str:
    """Makes the run's folder, or finds the one to go on in, and gives its path. On rank 0 only.

    Raises:
        UserError: it cannot be written, or holds another run.
    """
    if config.run_dir is None:
        folder = _fresh(Path("runs"), f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}")
    else:
        folder = Path(config.run_dir)
    try:
        if _holds_another_run(folder, config):
            raise UserError(
                f"--run-dir {str(folder)!r} holds another run: choose a new folder, or go on with that run "
                "(--resume alone, if it has checkpoints)"
            )
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        remove_temporary(folder, _NAMES)
        write_json(folder / "config.json", dataclasses.asdict(config))
    except OSError as error:
        raise UserError(
            f"--run-dir {str(folder)!r} cannot be written ({error.strerror}): choose a folder that you may write"
        ) from error
    return str(folder)


def _holds_another_run(folder: Path, config: Config) -> bool:
    """Whether something would be lost: not if the run is to go on, or came to nothing before its first checkpoint."""
    if not (folder / "config.json").exists():
        return False
    if config.resume is not None:
        return config.resume != "" and Path(config.resume).resolve().parent != (folder / "checkpoints").resolve()
    return (folder / "summary.json").exists() or any((folder / "checkpoints").glob("step-*"))


def _fresh(parent: Path, name: str) -> Path:
    """A folder that did not exist: runs that start within one second do not meet."""
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


def write_weights(path: Path, weights: dict[str, torch.Tensor], step: int) -> None:
    """Writes a model's weights, and the step that they are of, for any tool that reads safetensors."""
    write_whole(path, safetensors.torch.save(weights, metadata={"step": str(step)}))


def step_of(path: Path) -> int | None:
    """The step that a file of :func:`write_weights` is of; ``None`` if there is no such file, or it does not say."""
    try:
        with readable_path(path) as file, safetensors.safe_open(file, framework="pt") as content:
            return int((content.metadata() or {})["step"])
    except (OSError, safetensors.SafetensorError, KeyError, ValueError):
        return None


class MetricsFile:
    """``metrics.jsonl``: one object a line, on the disk as soon as it is written, whole or not at all."""

    def __init__(self, folder: Path, step: int, say: Callable[[str], None]) -> None:
        """Keeps what earlier parts of the run wrote up to ``step``. Raises OSError."""
        path = folder / "metrics.jsonl"
        lines, unreadable = _lines(path)
        if unreadable:
            aside = path.with_name(f"{path.name}.aside")
            link_whole(path, aside)
            say(f"{path} has {unreadable} lines that are no metrics: they are left out, and it is kept as {aside.name}")
        content = "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= step).encode()
        write_whole(path, content)
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags), "ab", buffering=0)
        self._size = len(content)

    def write(self, **values: Any) -> None:
        """Adds one line. Raises OSError, and leaves the lines before it whole."""
        line = (json.dumps(values) + "\n").encode()
        if self._file.write(line) != len(line):  # a disk that is full in the middle of the line
            self._file.truncate(self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(line)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines that are metrics, and how many others there are."""
    if not os.path.lexists(path):
        return [], 0
    # The last line of a run that was killed may be incomplete: it is written again.
    complete = [line for line in read_text(path, errors="replace").split("\n")[:-1] if line]
    parsed = [_metrics(line) for line in complete]
    lines = [line for line in parsed if line is not None]
    return lines, len(parsed) - len(lines)


def _metrics(line: str) -> dict[str, Any] | None:
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and type(value.get("step")) is int else None
