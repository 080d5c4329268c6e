"""Describe the settings that objects and functions hold. Ranks with equal settings get equal texts.

A text contains no memory addresses and no device numbers, and does not depend on the order of sets.

- A function is described by its name, its code, its default arguments, and the parts of its closure variables that it uses.
  A method is described by these and by the parts of its object that it uses. Global variables are left out.
- An object is described by its class and by its public attributes that are plain values, short lists of them, tensors,
  arrays, functions or modules. Attributes are read from ``__dict__``, so no property and no ``__getattr__`` runs. An
  ``nn.Module`` is described by the plain values of it and of its submodules.
- A scheduler is described by its class and all of its attributes, except the optimizer.

Attributes of objects other than schedulers, and closure variables, are left out if their names begin with an underscore, or
contain the word rank, gpu or device. Their values may differ between ranks.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from dualtrain.backends.wire import as_bytes

_DEPTH = 8  # containers and objects that are nested more deeply are described by their class alone
_ITEMS = 16  # a longer list is not regarded as a setting
_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.device, torch.dtype)
_ARRAYS = (numpy.generic, numpy.ndarray)
_CONTAINERS = (Mapping, set, frozenset, list, tuple)
#: Matches the names of attributes and variables that may differ between ranks.
_PER_RANK = re.compile("^_|(^|_)(rank|gpu|device)(_|$)")
_CALLABLE = (types.FunctionType, types.MethodType, functools.partial)


class Text:
    """A text whose ``repr`` has no quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def of_object(name: str, value: Any) -> dict[str, Text | None]:
    """Describe an object or a function, and its settings. All names in the result begin with ``name``."""
    if value is None:
        return {name: None}
    if isinstance(value, nn.Module):
        return of_module(name, value)
    seen = {id(value)}
    parts = {f"{name}.{part}": Text(_text(held, seen)) for part, held in _parts(value)}
    return {name: Text(_kind(value)), **parts}


def of_module(name: str, module: nn.Module) -> dict[str, Text | None]:
    """Describe the class and the plain public attributes (sizes, probabilities, …) of ``module`` and its submodules."""
    found: dict[str, Text | None] = {}
    for path, part in module.named_modules():
        where = f"{name}.{path}" if path else name
        found[where] = Text(class_name(type(part)))
        for attribute, held in vars(part).items():
            if not _PER_RANK.search(attribute) and attribute != "training" and _is_setting(held):
                found[f"{where}.{attribute}"] = Text(describe(held))
    return found


def of_weights(name: str, value: Any, model: nn.Module) -> dict[str, Text]:
    """If ``value`` is a module, hash those of its parameters and buffers that ``model`` does not have."""
    if not isinstance(value, nn.Module):
        return {}
    others = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    tensors = [*value.named_parameters(), *value.named_buffers()]
    return {f"{name}.{path}": Text(_hashed(tensor)) for path, tensor in tensors if id(tensor) not in others}


def describe(value: Any) -> str:
    """Describe ``value`` as text."""
    return _text(value, set())


def _text(value: Any, seen: set[int], depth: int = 0) -> str:
    """Describe ``value``. Objects and functions in ``seen`` are described already: return only their kind."""
    if isinstance(value, _ARRAYS):
        return _array(numpy.asarray(value))
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, enum.Enum):
        return f"{class_name(type(value))}.{value.name}"
    if isinstance(value, _PLAIN):
        return re.sub(r"cuda:\d+", "cuda", repr(value))
    if isinstance(value, torch.Tensor):
        # Weights are described by dtype and shape alone, since rank 0's values are broadcast later.
        return _dtype_and_shape(value) if value.requires_grad else _hashed(value)
    if depth < _DEPTH and isinstance(value, _CONTAINERS):
        return _container(value, seen, depth + 1)
    if id(value) in seen or depth >= _DEPTH:
        return _kind(value)
    seen.add(id(value))
    parts = ", ".join(f"{name}={_text(held, seen, depth + 1)}" for name, held in _parts(value))
    return f"{_kind(value)}({parts})" if parts else _kind(value)


def _container(value: Any, seen: set[int], depth: int) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{describe(key)}: {_text(item, seen, depth)}' for key, item in value.items()))}}}"
    items = [_text(item, seen, depth) for item in value]
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(items))}}}"
    return f"[{', '.join(items)}]" if isinstance(value, list) else f"({', '.join(items)})"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings that an object or a function holds, by name."""
    if isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from _parts(value.__func__)
        yield from _used("self", value.__self__, _words(value.__func__.__code__))
    elif isinstance(value, types.FunctionType):
        words = _words(value.__code__)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            for held in _content(cell) if not _PER_RANK.search(name) else []:
                yield from _used(name, held, words)
        if value.__defaults__ or value.__kwdefaults__:
            yield "defaults", (value.__defaults__, value.__kwdefaults__)
    elif isinstance(value, LRScheduler):  # all of its attributes are settings
        yield from ((name, held) for name, held in vars(value).items() if not isinstance(held, torch.optim.Optimizer))
    elif isinstance(value, nn.Module):
        yield from ((name.lstrip("."), text) for name, text in of_module("", value).items() if name)
    elif isinstance(value, Text):
        return
    elif not isinstance(value, type | types.ModuleType):
        attributes = getattr(value, "__dict__", {})
        yield from (
            (name, held) for name, held in attributes.items() if not _PER_RANK.search(name) and _is_comparable(held)
        )


def _used(name: str, value: Any, words: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a closure variable, or of a method's object, that a function uses.

    ``words`` are the names and strings in the function's code. For example, if the variable holds the options of a
    command line, yield only the options that the function reads.
    """
    used = {word for word in words if not _PER_RANK.search(word)}
    if isinstance(value, dict) and used & {key for key in value if isinstance(key, str)}:
        yield from ((f"{name}[{key!r}]", held) for key, held in value.items() if key in used)
    elif _is_comparable(value) or isinstance(value, _CONTAINERS):
        yield name, value
    else:
        yield name, Text(class_name(type(value)))
        attributes = {} if isinstance(value, type) else getattr(value, "__dict__", {})
        held = {word: attributes[word] for word in sorted(used & {*attributes})}
        yield from ((f"{name}.{word}", item) for word, item in held.items() if _is_comparable(item))


def _words(code: types.CodeType) -> set[str]:
    """Return the names and the string constants in a function's code."""
    inner = [_words(item) for item in code.co_consts if isinstance(item, types.CodeType)]
    return {*code.co_names, *(item for item in code.co_consts if isinstance(item, str))}.union(*inner)


def _is_setting(value: Any, depth: int = 0) -> bool:
    """Return whether ``value`` is a plain value or a short list of them.

    A text with a slash does not count: it may be a path, which may differ between hosts.
    """
    if isinstance(value, list | tuple):
        return depth < 2 and len(value) <= _ITEMS and all(_is_setting(item, depth + 1) for item in value)
    return isinstance(value, _PLAIN) and not (isinstance(value, str) and "/" in value)


def _is_comparable(value: Any) -> bool:
    return _is_setting(value) or isinstance(value, (torch.Tensor, nn.Module, *_ARRAYS, *_CALLABLE))


def _content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return []


def _kind(value: Any) -> str:
    """Return the class of an object, or the name of a function with a hash of its code."""
    if isinstance(value, Text):
        return value.text
    if isinstance(value, type):
        return class_name(value)
    if isinstance(value, types.MethodType):
        return f"{_kind(value.__func__)} of {class_name(type(value.__self__))}"
    if isinstance(value, types.FunctionType):
        return f"{class_name(value)} (code {_digest(_code(value.__code__).encode(errors='surrogatepass'))})"
    return class_name(value if isinstance(value, types.BuiltinFunctionType) else type(value))


def class_name(value: Any) -> str:
    """Return the full name of a class or function."""
    # multiprocessing gives the main module a different name in the processes that it starts.
    return f"{value.__module__}.{value.__qualname__}".replace("__mp_main__", "__main__")


def _code(code: types.CodeType) -> str:
    """Return a function's bytecode, constants and names, without file names and line numbers."""
    constants = [_code(item) if isinstance(item, types.CodeType) else describe(item) for item in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames} {code.co_freevars}"


def _dtype_and_shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _hashed(tensor: torch.Tensor) -> str:
    if tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided:
        return _dtype_and_shape(tensor)
    if not tensor.dim():
        return repr(tensor.item())
    return f"{_dtype_and_shape(tensor)} {_digest(as_bytes(tensor).cpu().numpy())}"


def _array(array: numpy.ndarray[Any, Any]) -> str:
    if not array.shape:
        return repr(array.item())
    return f"{array.dtype} {array.shape} {'' if array.dtype.hasobject else _digest(array.tobytes())}".strip()


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
