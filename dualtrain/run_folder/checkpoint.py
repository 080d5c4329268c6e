"""Checkpoints: plain values and tensors in one safetensors file, which is complete or absent, and verified when read.

The file's header holds the structure as JSON, which refers to the tensors by name. It also holds a SHA-256 hash of the
structure and the tensors.

A checkpoint contains no code and nothing that only one backend can use, so a run can resume under either backend.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from dualtrain.backends.wire import as_bytes
from dualtrain.errors import BackendError, UserError, is_disk_or_network_error, lacks_memory, one_line
from dualtrain.files import aside_of, link_whole, names_in, parse_json, readable_path, write_named, write_whole
from dualtrain.run_folder.folder_lock import FolderLock
from dualtrain.run_folder.structure import NoTensors, flatten, rebuild


class DamagedError(UserError):
    """A checkpoint is missing, truncated or changed: an older checkpoint can be used instead."""


FORMAT = 3  # the format of new checkpoints
READABLE = (2, 3)  # format 2 has no virtual ranks
#: If a read fails with one of these error numbers, or with a disk or network error, the file may be intact.
_NOT_READABLE = (errno.ENOMEM, errno.EACCES, errno.EPERM)
BEST = "best.safetensors"
_NAME = re.compile(r"step-[0-9]{8,18}\.safetensors")


def write(path: Path, tree: dict[str, Any], lock: FolderLock | None = None) -> None:
    """Write ``tree`` (dicts, lists, tuples, plain values and tensors) as one file, whole or not at all; see ``Packed``."""
    Packed(tree).write(path, lock)


class Packed:
    """A tree with copies of its tensors on the CPU: the originals may change while the copies are written.

    Construction raises TypeError if a checkpoint cannot hold a value in the tree.
    """

    def __init__(self, tree: dict[str, Any]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._structure = json.dumps(flatten(tree, self._tensors))

    def write(self, path: Path, lock: FolderLock | None = None) -> None:
        """Write the tree as one file, whole or not at all.

        Args:
            path: the file.
            lock: the lock of the run's folder; the file records the lock's generation.

        Raises:
            OSError: the file cannot be written.
            SupersededError: another process has made a newer generation of the folder.
        """
        header = {"structure": self._structure, "sha256": _digest(self._structure, self._tensors)}
        if lock is None:
            write_named(path, safetensors.torch.save(self._tensors, metadata=header))
            return
        header["generation"] = str(lock.generation)
        write_whole(path, safetensors.torch.save(self._tensors, metadata=header), lock.check)


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of ``step``."""
    return folder / f"step-{step:08d}.safetensors"


def drop_old(folder: Path, kept: int, lock: FolderLock) -> None:
    """Remove all but the ``kept`` newest checkpoints; the best has its own file. Raises OSError, SupersededError."""
    for old in found(folder)[kept:]:
        lock.check()
        old.unlink(missing_ok=True)


def keep_as_best(path: Path) -> None:
    """Make ``BEST`` a hard link to a checkpoint, or a copy if no hard link can be made. Raises OSError."""
    link_whole(path, path.with_name(BEST))


def found(folder: Path) -> list[Path]:
    """List the checkpoints of a folder, newest first; none if it does not exist. Raises OSError if it cannot be read."""
    return sorted((folder / name for name in names_in(folder) if _NAME.fullmatch(name)), key=step_of_name, reverse=True)


def with_best(folder: Path) -> dict[Path, int]:
    """Return the checkpoints of a folder with their steps, including ``BEST``, which may be the only good one.

    ``BEST`` is left out if it cannot be read. Raises OSError if the folder cannot be read.
    """
    steps = {path: step_of_name(path) for path in found(folder)}
    best_step = step_in(folder / BEST)
    return steps if best_step is None else {**steps, folder / BEST: best_step}


def load(path: Path) -> dict[str, Any]:
    """Read a file that :func:`write` has written, with its tensors on the CPU.

    Raises:
        DamagedError: the file is missing, truncated or changed, or is not a checkpoint.
        UserError: the file cannot be read now, but may be good.
        MemoryError, RuntimeError: there is too little memory; the file may be good.
    """
    try:
        with readable_path(path) as opened, safetensors.safe_open(opened, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        # An empty tensor has the address of the next tensor in the file. torch.save, which is used to send checkpoints to
        # other ranks, refuses two dtypes at one address.
        tensors = {name: tensor if tensor.numel() else tensor.clone() for name, tensor in tensors.items()}
    except FileNotFoundError:
        raise DamagedError(
            f"checkpoint {str(path)!r} does not exist: name an existing file, or resume a run with --run-dir and --resume"
        ) from None
    except IsADirectoryError:
        raise DamagedError(
            f"checkpoint {str(path)!r} is a folder: name a file, or resume a run with --run-dir and --resume"
        ) from None
    except OSError as error:
        what = f"checkpoint {str(path)!r} cannot be read ({error.strerror or error})"
        if _may_be_good(error):
            raise UserError(f"{what}: repair the cause, or name another checkpoint", transient=True) from error
        raise DamagedError(what) from error
    except Exception as error:  # safetensors raises errors of many types for bad bytes
        if lacks_memory(error):
            raise
        raise DamagedError(f"checkpoint {str(path)!r} is damaged ({' '.join(str(error).split())[:300]})") from error
    structure = header.get("structure")
    if structure is None:
        raise DamagedError(
            f"{str(path)!r} is not a checkpoint: name a run's checkpoints/step-….safetensors, or use --weights for weights"
        )
    if header.get("sha256") != _digest(structure, tensors):
        raise DamagedError(f"checkpoint {str(path)!r} is damaged: its content does not match its hash")
    try:
        tree: dict[str, Any] = rebuild(parse_json(structure), tensors)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        if lacks_memory(error):
            raise
        raise DamagedError(f"checkpoint {str(path)!r} is damaged: its structure cannot be read ({error})") from error
    if not isinstance(tree, dict):
        raise DamagedError(f"checkpoint {str(path)!r} is damaged: it holds a {type(tree).__name__}, not a dict")
    return tree


def _may_be_good(error: OSError) -> bool:
    """Return whether a file that could not be read because of ``error`` may be readable later."""
    return is_disk_or_network_error(error) or error.errno in _NOT_READABLE


@contextmanager
def fitting(what: str) -> Iterator[None]:
    """Convert an error of the block, which loads a state, to UserError: most likely, the state is another model's.

    BackendError and errors about too little memory are not converted.
    """
    try:
        yield
    except (UserError, BackendError):
        raise
    except Exception as error:
        if lacks_memory(error):
            raise
        reason = one_line(error)[:300] or type(error).__name__
        raise UserError(
            f"{what} does not fit this model and optimizer ({reason}): use the model and optimizer that wrote it"
        ) from error


def newest_good(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Read the newest good checkpoint of a folder; also return what is wrong with each newer checkpoint.

    Raises:
        UserError: no checkpoint is good, or a checkpoint cannot be read now but may be good.
        OSError: the folder cannot be read.
        MemoryError, RuntimeError: as :func:`load`.
    """
    problems: list[str] = []
    steps = with_best(folder)
    for path in sorted(steps, key=lambda path: (steps[path], generation_in(path)[0]), reverse=True):
        try:
            tree = load(path)
        except DamagedError as error:
            problems.append(str(error))
            continue
        problem = problem_of_name(path, tree, steps[path])
        if not problem:
            return tree, problems
        problems.append(problem)
    none = f"{str(folder)!r} holds no good checkpoint to resume from: give --resume auto, which then begins at step 0"
    raise UserError("; ".join([*problems, none]))


def problem_of_name(path: Path, tree: dict[str, Any], step: int) -> str:
    """Return an error text if ``tree``, read from the file ``path``, is not the checkpoint of ``step``; else return "".

    Return "" also if the tree has no cursor: ``compare_with_checkpoint`` (``training/resume.py``) refuses such a file.
    """
    cursor = tree.get("cursor")
    if not isinstance(cursor, dict) or cursor.get("step") == step:
        return ""
    return f"checkpoint {str(path)!r} holds step {cursor.get('step')}, unlike its name: remove it"


def put_later_aside(folder: Path, step: int, lock: FolderLock, *, has_best: bool) -> None:
    """Rename all checkpoints of steps after ``step``: they are kept, but no run resumes from them.

    If ``has_best`` is false, there is no best evaluation up to ``step``: rename ``BEST`` even if it cannot be read now.

    Raises OSError, SupersededError.
    """
    for path in found(folder):
        if step_of_name(path) > step:
            put_aside(path, path, lock)
    best = folder / BEST
    best_step = step_in(best)
    if best_step is not None and best_step > step:
        put_aside(best, path_of(folder, best_step), lock)
    elif best_step is None and not has_best and os.path.lexists(best):
        put_aside(best, best, lock)


def put_aside(path: Path, name: Path, lock: FolderLock) -> None:
    """Rename ``path`` to ``name`` with the suffix .aside, or .aside-N if that file exists. Nothing reads such files.

    Raises OSError, SupersededError.
    """
    target = aside_of(path, name)
    lock.check()
    path.replace(target)
    lock.check()
    path.unlink(missing_ok=True)  # the rename has done nothing if both names are links to the same file


def step_in(path: Path) -> int | None:
    """Read the step of a run's checkpoint from its header alone; ``None`` if the file cannot be read or has no step."""
    with suppress(OSError):
        return _read_step(path)
    return None


def _read_step(path: Path) -> int | None:
    """Return what :func:`step_in` returns, but raise OSError if the file may be readable later."""
    try:
        step = rebuild(parse_json(_header(path)["structure"]), NoTensors())["cursor"]["step"]
    except OSError as error:
        if _may_be_good(error):
            raise
        return None
    except Exception:  # not a checkpoint of a run
        return None
    return step if type(step) is int else None


def generation_in(path: Path) -> tuple[int, str]:
    """Return the generation that wrote a checkpoint (0 if its header names none), and the hash of the content.

    Return (0, "") if the file cannot be read.
    """
    try:
        header = _header(path)
        return int(header.get("generation", "0")), header.get("sha256", "")
    except Exception:  # safetensors raises errors of many types for bad bytes
        return 0, ""


def _header(path: Path) -> dict[str, str]:
    with readable_path(path) as opened:
        try:
            with safetensors.safe_open(opened, framework="pt") as file:
                return file.metadata() or {}
        except Exception as error:
            if lacks_memory(error):  # safe_open maps the whole file into memory
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from error
            raise


def find_step(folders: Iterable[Path], step: int) -> tuple[Path, dict[str, Any]] | None:
    """Find a good checkpoint of ``step`` in ``folders``, and read it; ``None`` if there is none.

    Raises:
        UserError: none was found, and a file that may be this checkpoint cannot be read now.
        MemoryError, RuntimeError: as :func:`load`.
    """
    unread: tuple[Path, Exception] | None = None
    for folder in folders:
        for path in (folder / BEST, path_of(folder, step)):
            try:
                if _read_step(path) == step:
                    return path, load(path)
            except DamagedError:
                continue
            except (OSError, UserError) as error:
                unread = path, error
    if unread is not None:
        path, cause = unread
        raise UserError(
            f"{str(path)!r} may be the checkpoint of the best evaluation (step {step}), but cannot be read "
            f"({getattr(cause, 'strerror', None) or one_line(cause)}): repair the cause, or remove the file to continue "
            "without that evaluation",
            transient=True,
        ) from cause
    return None


def step_of_name(path: Path) -> int:
    """Return the step in a checkpoint's file name."""
    return int(path.stem.partition("-")[2])


def _digest(structure: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(structure.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(as_bytes(tensor).numpy().data)  # a view, since making a copy would hold the GIL
    return digest.hexdigest()
