"""The folder of a run: ``config.json``, ``metrics.jsonl``, ``checkpoints/``, ``task.json``,
``model.safetensors``, ``model-best.safetensors``, ``summary.json``."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import IO, Any, Self

import safetensors.torch
import torch

from dualtrain.config import Config
from dualtrain.errors import UserError


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


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes all of it or nothing."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def write_whole(path: Path, data: bytes) -> None:
    """Replaces a file at once: a temporary name, flushed to the disk, renamed."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_weights(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Writes a model's weights for any tool that reads safetensors."""
    write_whole(path, safetensors.torch.save(weights))


class MetricsFile:
    """``metrics.jsonl``: one object a line, on the disk as soon as it is written."""

    def __init__(self, folder: Path, step: int) -> None:
        """Goes on behind what earlier parts of the run wrote up to ``step``."""
        path = folder / "metrics.jsonl"
        kept = [line for line in _lines(path) if line["step"] <= step]
        write_whole(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file: IO[str] = path.open("a", buffering=1)

    def write(self, **values: Any) -> None:
        """Adds one line."""
        self._file.write(json.dumps(values) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # The last line of an interrupted run may be cut off: it is written again.
    complete = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in complete]
