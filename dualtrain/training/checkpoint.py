"""Checkpoints: plain values and tensors in one safetensors file, whole or absent, verified when read.

The file's header holds the structure as JSON, with each tensor's place in it, and a SHA-256 over structure and
tensors. Nothing in it is code, and nothing names a backend or a world size: it resumes under either backend.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from dualtrain.backends.wire import as_bytes
from dualtrain.config import FIELDS, Config, flag
from dualtrain.console import show
from dualtrain.errors import BackendError, UserError
from dualtrain.files import link_whole, parse_json, readable_path, write_whole

FORMAT = 2
BEST = "best.safetensors"
_NAME = re.compile(r"step-[0-9]{8,18}\.safetensors")


def write(path: Path, tree: dict[str, Any]) -> None:
    """Writes ``tree`` (dicts, lists, tuples, plain values and tensors) as one file, whole or not at all."""
    Packed(tree).write(path)


class Packed:
    """A tree with copies of its tensors on the CPU: what it was made from may change while it is being written."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._structure = json.dumps(_take_apart(tree, self._tensors))

    def write(self, path: Path) -> None:
        """Writes it as one file, whole or not at all. Raises OSError."""
        header = {"structure": self._structure, "sha256": _digest(self._structure, self._tensors)}
        write_whole(path, safetensors.torch.save(self._tensors, metadata=header))


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is."""
    return folder / f"step-{step:08d}.safetensors"


def drop_old(folder: Path, kept: int) -> None:
    """Removes all but the ``kept`` newest checkpoints; the best has a name of its own."""
    for old in found(folder)[kept:]:
        old.unlink(missing_ok=True)


def keep_as_best(path: Path) -> None:
    """Gives a checkpoint the best one's name too: as a second link where the disk has them, else as a copy."""
    link_whole(path, path.with_name(BEST))


def found(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=_step, reverse=True)


def load(path: Path) -> dict[str, Any]:
    """What :func:`save` wrote, its tensors on the CPU.

    Raises:
        UserError: the file is missing, cut off or changed.
    """
    try:
        with readable_path(path) as opened, safetensors.safe_open(opened, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except FileNotFoundError:
        raise UserError(f"checkpoint {str(path)!r} does not exist") from None
    except IsADirectoryError:
        raise UserError(
            f"checkpoint {str(path)!r} is a folder: name a file, or resume a run with --run-dir and --resume"
        ) from None
    except OSError as error:
        raise UserError(f"checkpoint {str(path)!r} cannot be read ({error.strerror or error})") from error
    except Exception as error:  # safetensors raises what its bytes lead to
        raise UserError(f"checkpoint {str(path)!r} is damaged ({' '.join(str(error).split())[:300]})") from error
    structure = header.get("structure")
    if structure is None:
        raise UserError(f"{str(path)!r} is no checkpoint: they are in a run's folder, checkpoints/step-….safetensors")
    if header.get("sha256") != _digest(structure, tensors):
        raise UserError(f"checkpoint {str(path)!r} is damaged: its content does not match its hash")
    try:
        tree: dict[str, Any] = _put_together(parse_json(structure), tensors)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"checkpoint {str(path)!r} is damaged: its structure cannot be read ({error})") from error
    if not isinstance(tree, dict):
        raise UserError(f"checkpoint {str(path)!r} is damaged: it holds a {type(tree).__name__}, not a state by names")
    return tree


def to_resume(config: Config) -> dict[str, Any]:
    """The checkpoint that ``config.resume`` asks for: that file, or the newest good one of the run's folder.

    Raises:
        UserError: there is none, or it was made with other settings.
    """
    if config.resume:
        tree = load(Path(config.resume))
    else:
        assert config.run_dir is not None
        tree, problems = newest_good(Path(config.run_dir) / "checkpoints")
        for problem in problems:
            show(f"{problem}: going on from the one before")
    _compare(tree, config)
    return tree


def _compare(tree: dict[str, Any], config: Config) -> None:
    """Refuses what a run cannot change when it goes on: another value would make it neither this run nor a new one."""
    made_by = tree.get("format")
    if type(made_by) is not int or made_by != FORMAT:
        raise UserError(
            "the checkpoint is not of a run of this version of dualtrain: start anew, or use the version it is of"
        )
    _check_form(tree)
    made_with, now = tree["config"], dataclasses.asdict(config)
    fixed = [name for name, field in FIELDS.items() if field.metadata["fixed"]]
    differences = [name for name in fixed if made_with.get(name, FIELDS[name].default) != now[name]]
    if differences:
        had = " ".join(_as_flag(name, made_with.get(name, FIELDS[name].default)) for name in differences)
        has = " ".join(_as_flag(name, now[name]) for name in differences)
        raise UserError(f"the checkpoint was made with {had}, and this run has {has}: give {had}, or start anew")


def _check_form(tree: dict[str, Any]) -> None:
    """Raises UserError for what has the format of a run's checkpoint, and not its parts."""
    kinds = {"trainer": dict, "cursor": dict, "config": dict, "global_batch": int, "data": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(tree.get(name), kind)]
    try:
        json.dumps(tree.get("config"))
    except TypeError:  # a tensor, which cannot be compared with a setting
        wrong.append("config")
    if wrong or any(type(tree["data"].get(name)) is not int for name in ("samples", "classes")):
        raise UserError(f"the checkpoint has no usable {', '.join(wrong) or 'data'}: it is not of a run; start anew")


@contextmanager
def fitting(what: str) -> Iterator[None]:
    """Turns any error of taking a state into a UserError: it was made for another model or optimizer, or by other code."""
    try:
        yield
    except (UserError, BackendError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"{what} does not fit this model and optimizer ({reason}): give the one that it was made with"
        ) from error


def _as_flag(name: str, value: Any) -> str:
    """A setting as it is typed."""
    if isinstance(value, bool):
        return flag(name) if value else f"--no-{flag(name)[2:]}"
    return f"no {flag(name)}" if value is None else f"{flag(name)} {value}"


def newest_good(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The newest checkpoint of a folder that is whole, and what is wrong with newer ones.

    Raises:
        UserError: there is none.
    """
    problems: list[str] = []
    for path in found(folder):
        try:
            return load(path), problems
        except UserError as error:
            problems.append(str(error))
    raise UserError("; ".join([*problems, f"{str(folder)!r} holds no checkpoint to go on from: start without --resume"]))


def set_aside(folder: Path, step: int) -> None:
    """Renames the checkpoints behind ``step``, the best among them: nothing goes on from them, and nothing is lost."""
    for path in found(folder):
        if _step(path) > step:
            put_aside(path, path)
    best = folder / BEST
    of = step_in(best)
    if of is not None and of > step:
        put_aside(best, path_of(folder, of))


def put_aside(path: Path, name: Path) -> None:
    """Renames ``path`` to ``name`` with .aside, which nothing reads; a number keeps it from what was put there before."""
    target, number = name.with_name(f"{name.name}.aside"), 1
    while target.exists() and not target.samefile(path):
        number += 1
        target = name.with_name(f"{name.name}.aside-{number}")
    path.replace(target)
    path.unlink(missing_ok=True)  # two names of one file: the rename of one to the other does nothing


def step_in(path: Path) -> int | None:
    """The step of a run's checkpoint, from its header alone; ``None`` where there is none that can be read."""
    try:
        with readable_path(path) as opened, safetensors.safe_open(opened, framework="pt") as file:
            tree = _put_together(parse_json((file.metadata() or {})["structure"]), _NoTensors())
        step = tree["cursor"]["step"]
    except Exception:  # whatever its bytes lead to: it is not a checkpoint of a run
        return None
    return step if type(step) is int else None


class _NoTensors(dict[str, Any]):
    """Every tensor as ``None``."""

    def __missing__(self, name: str) -> None:
        return None


def find_step(folders: Iterable[Path], step: int) -> tuple[Path, dict[str, Any]] | None:
    """A good checkpoint of ``step``, with its content, among those of ``folders``; ``None`` if there is none."""
    for folder in folders:
        for path in (folder / BEST, path_of(folder, step)):
            if step_in(path) == step:
                try:
                    return path, load(path)
                except UserError:
                    continue  # damaged
    return None


def _step(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _digest(structure: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(structure.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(as_bytes(tensor).numpy().data)  # not a copy, which would hold the interpreter's lock
    return digest.hexdigest()


def _take_apart(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` as JSON can hold it: every container a pair of its kind and its items, every tensor its number."""
    if isinstance(value, torch.Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return ["tensor", name]
    if isinstance(value, dict):
        return ["dict", [[key, _take_apart(item, tensors)] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        return [type(value).__name__, [_take_apart(item, tensors) for item in value]]
    if value is None or isinstance(value, bool | int | float | str):
        return ["value", value]
    raise TypeError(f"a checkpoint holds plain values and tensors, not {type(value).__name__}")


def _put_together(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    kind, content = value
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _put_together(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_put_together(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    return content
