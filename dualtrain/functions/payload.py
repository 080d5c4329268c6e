"""Pickling of functions, arguments and results, sent only between a program and the ranks of a job that it has started.

Python's own pickle stores only the name of a function and the name of its module. Another process cannot import a
function of a notebook's cell, a lambda or an inner function by name; cloudpickle stores the code of these functions.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from dualtrain.errors import UserError, one_line

#: A function, its positional arguments and its keyword arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class _ByName(pickle.Pickler):
    """Pickler without cloudpickle: refuses functions and classes that ``__main__`` defines."""

    def reducer_override(self, obj: Any) -> Any:
        if getattr(obj, "__module__", None) == "__main__" and hasattr(obj, "__qualname__"):
            raise pickle.PicklingError(f"{obj.__qualname__} is defined in __main__")
        return NotImplemented


def dumps(obj: Any, pickler: Any = None) -> bytes:
    """Pickle ``obj`` with the module ``pickler``; by default, with cloudpickle if it is installed, else with pickle."""
    pickler = pickler or _cloudpickle()
    if pickler is not None:
        return bytes(pickler.dumps(obj))
    buffer = io.BytesIO()
    _ByName(buffer).dump(obj)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """Return the object that :func:`dumps` has pickled in the program or in one of its ranks."""
    return pickle.loads(data)


def pickled_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, pickler: Any = None
) -> bytes:
    """Pickle a call of ``function``: see :func:`dumps`.

    Raises:
        UserError: the call cannot be pickled, or needs cloudpickle, which is not installed.
    """
    call: Call = function, tuple(args), dict(kwargs or {})
    name = getattr(function, "__qualname__", repr(function))
    try:
        return dumps(call, pickler)
    except Exception as error:  # the pickling methods of the user's own classes may raise anything
        reason = one_line(error)
        cure = "pip install cloudpickle, or define the function in a module that other processes can import"
        if pickler or _cloudpickle():
            cure = "create such objects inside the function"
        raise UserError(f"{name} cannot be sent to other processes ({type(error).__name__}: {reason}): {cure}") from error


def _cloudpickle() -> Any:
    try:
        return import_module("cloudpickle")
    except ModuleNotFoundError:
        return None
