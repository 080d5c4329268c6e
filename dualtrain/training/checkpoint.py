"""Checkpoints: plain values and tensors in one safetensors file, whole or absent, verified when read.

The file's header holds the structure as JSON, with each tensor's place in it, and a SHA-256 over structure and
tensors. Nothing in it is code, and nothing names a backend or a world size: it resumes under either backend.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from dualtrain.errors import UserError
from dualtrain.training.run_dir import write_whole

KEPT = 3


def save(folder: Path, step: int, tree: dict[str, Any]) -> Path:
    """Writes ``tree`` (dicts, lists, tuples, plain values and tensors) as the checkpoint of ``step``; drops old ones."""
    tensors: dict[str, torch.Tensor] = {}
    structure = json.dumps(_take_apart(tree, tensors))
    header = {"structure": structure, "sha256": _digest(structure, tensors)}
    path = folder / f"step-{step:08d}.safetensors"
    write_whole(path, safetensors.torch.save(tensors, metadata=header))
    for old in found(folder)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def found(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first."""
    return sorted(folder.glob("step-*.safetensors"), reverse=True)


def load(path: Path) -> dict[str, Any]:
    """What :func:`save` wrote, its tensors on the CPU.

    Raises:
        UserError: the file is missing, cut off or changed.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except FileNotFoundError:
        raise UserError(f"checkpoint {str(path)!r} does not exist") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"checkpoint {str(path)!r} is damaged ({error})") from error
    structure = header.get("structure", "")
    if header.get("sha256") != _digest(structure, tensors):
        raise UserError(f"checkpoint {str(path)!r} is damaged: its content does not match its hash")
    tree: dict[str, Any] = _put_together(json.loads(structure), tensors)
    return tree


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


def _digest(structure: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(structure.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
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
