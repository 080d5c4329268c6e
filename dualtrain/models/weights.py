"""Weights of a model from files: local ones, and those that torchvision publishes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parameter import is_lazy

from dualtrain.errors import UserError, lacks_memory, why_not_downloaded
from dualtrain.files import open_regular, or_nothing, parse_json, readable_path
from dualtrain.state import is_extra_state, weights_sha256
from dualtrain.torchvision_shim import torchvision

#: Entry of a safetensors file's header in which a run records ``step`` and ``weights_sha256``, as JSON. It is one entry,
#: because safetensors writes several entries in random order, and equal weights must give equal files.
RECORD = "dualtrain"
SHOWN = 3  # names listed in an error message, so that it stays one line


class DamagedWeightsError(ValueError):
    """The tensors of a file do not have the hash in the file's header."""


def load_weights(model: nn.Module, file: str) -> None:
    """Copy the tensors of ``file``, a safetensors file or a state dict of ``torch.save``, into ``model``.

    Accepts names that all start with ``module.``, and checkpoints with their weights under ``state_dict`` or ``model``.

    Raises:
        UserError: the file cannot be read, its names or shapes differ from the model's, or the model has lazy layers.
    """
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        raise UserError(
            f"--weights {file!r} does not fit lazy layers, which have no shapes yet: give the layers their sizes"
        )
    state, own = read_state(file), model.state_dict()
    wrong = differences(own, state)
    if wrong:
        consume_prefix_in_state_dict_if_present(state, "module.")
        wrong = differences(own, state)
    if wrong:
        raise UserError(f"--weights {file!r} does not fit the model ({'; '.join(wrong)}): give weights of the same model")
    model.load_state_dict(state, strict=False)


def read_state(file: str) -> dict[str, torch.Tensor]:
    """Read the names and tensors of a weights file, on the CPU. Pickled code in the file is not run.

    Raises:
        UserError: the file is missing, damaged, or holds something other than weights.
        MemoryError, RuntimeError: memory is too small.
    """
    advice = "give a safetensors file, or a state dict that torch.save wrote"
    try:
        state: Any = read_safetensors(file) if Path(file).suffix == ".safetensors" else read_pickled(file)
    except OSError as error:
        reason = error.strerror or "No such file or directory"
        raise UserError(f"--weights {file!r} cannot be read ({reason}): give a file that exists on every host") from error
    except DamagedWeightsError as error:
        raise UserError(f"--weights {file!r} is damaged ({error}): copy the file again, or give another one") from error
    except ValueError as error:
        raise UserError(f"--weights {file!r} is damaged or holds more than weights: {advice}") from error
    if Path(file).suffix == ".safetensors" and _is_checkpoint(file):
        raise UserError(
            f"--weights {file!r} is the checkpoint of a run: give that run's model.safetensors, or continue the run with "
            f"--resume {file}"
        )
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if isinstance(state, dict):  # values of get_extra_state() need not be tensors
        state = {n: v for n, v in state.items() if isinstance(v, torch.Tensor) or not is_extra_state(n)}
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"--weights {file!r} is not a mapping from names to tensors: {advice}")
    problem = next(filter(None, map(_unusable, state.keys(), state.values())), None)
    if problem is not None:
        raise UserError(f"--weights {file!r} has {problem}: {advice}, with text keys and plain dense tensors")
    return dict(state)


def read_safetensors(file: str | Path) -> dict[str, torch.Tensor]:
    """Read the names and tensors of a safetensors file. If its header has their hash, verify it.

    Raises:
        OSError: the file cannot be opened.
        ValueError: the file is damaged.
        MemoryError, RuntimeError: memory is too small.
    """
    with readable_path(file) as path:
        try:
            tensors, wanted = safetensors.torch.load_file(path), record_in(path).get("weights_sha256")
        except Exception as error:  # a damaged file can make load_file raise almost any exception
            if lacks_memory(error):
                raise
            raise ValueError(str(error)) from error
    if wanted is not None and wanted != weights_sha256(tensors):
        raise DamagedWeightsError("its content does not match its hash")
    return tensors


def record_in(path: str) -> dict[str, Any]:
    """Return the ``RECORD`` of a safetensors file; if it has none, its ``step`` alone; an empty dict if it has neither.

    Raises errors of many types.
    """
    header = _header(path)
    if RECORD in header:
        return or_nothing(lambda: parse_json(header[RECORD]))
    return or_nothing(lambda: {"step": int(header.get("step", ""))})  # the only entry that versions before 0.3.0 wrote


def _header(path: str) -> dict[str, str]:
    with safetensors.safe_open(path, framework="pt") as content:
        return content.metadata() or {}


def _is_checkpoint(file: str) -> bool:
    """Return whether a readable safetensors file has the header of a run's checkpoint (``run_folder/checkpoint.py``)."""
    with readable_path(file) as path:
        return {"structure", "sha256"} <= _header(path).keys()


def read_pickled(file: str | Path) -> Any:
    """Read tensors and plain values that ``torch.save`` wrote.

    Raises:
        OSError: the file cannot be opened.
        ValueError: the file is damaged, or holds anything else.
        MemoryError, RuntimeError: memory is too small.
    """
    with open_regular(file) as opened:
        try:
            return torch.load(opened, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file can make torch.load raise almost any exception
            if lacks_memory(error):
                raise
            raise ValueError(str(error)) from error


def _unusable(name: Any, tensor: torch.Tensor) -> str | None:
    """Return the reason why a tensor of a file cannot be copied into a model, or ``None`` if it can."""
    if not isinstance(name, str):
        return f"the key {name!r}, which is not text"
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_complex():
        kinds = {"sparse": tensor.layout != torch.strided, "meta": tensor.is_meta, "quantized": tensor.is_quantized}
        return f"{name!r}, a {next((kind for kind, found in kinds.items() if found), 'complex')} tensor"
    return None


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Describe how the names and shapes of ``theirs`` differ from ``ours``; return an empty list if they fit."""
    # Accept files without num_batches_tracked, as torch before 0.4.1 wrote them: only BatchNorm with momentum=None uses it.
    missing = [
        name for name in ours if not (name in theirs or name.endswith("num_batches_tracked") or is_extra_state(name))
    ]
    unexpected = [name for name in theirs if name not in ours and not is_extra_state(name)]
    shapes = [
        f"{name} ({_size(tensor)} in the file, {_size(ours[name])} in the model)"
        for name, tensor in theirs.items()
        if name in ours and not is_extra_state(name) and tensor.shape != ours[name].shape
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    return [f"{len(names)} {kind} ({_few(names)})" for kind, names in kinds.items() if names]


def _size(tensor: torch.Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "scalar"


def _few(names: Iterable[str]) -> str:
    names = [name if name.isprintable() else repr(name) for name in names]
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def published(name: str) -> Any:
    """Return the default member of the weights enumeration that torchvision has for the model ``name``.

    Raises:
        UserError: torchvision has no model ``name``, or no weights for it.
    """
    try:
        return torchvision().models.get_model_weights(name).DEFAULT
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"torchvision publishes no weights of {name!r}, which `--pretrained` and `--augment weights` need: leave these "
            "flags out, or choose a model of torchvision"
        ) from error


def fetch(name: str) -> Path:
    """Download torchvision's weights of ``name`` into torch hub's folder, unless they are there; return the file's path.

    On each host, one rank must call this function before the other ranks call it, so that only one rank downloads. An
    incomplete download leaves no file.

    Raises:
        UserError: there are no such weights, or the download fails.
    """
    url: str = published(name).url
    path: Path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    if path.exists():
        return path
    digest = path.stem.rpartition("-")[2]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), hash_prefix=digest, progress=False)
    except Exception as error:  # besides OSError, those of http.client and others
        raise UserError(
            f"the weights of {name} could not be downloaded ({why_not_downloaded(error)}): put {url} into {path.parent} of "
            "every host"
        ) from error
    return path
