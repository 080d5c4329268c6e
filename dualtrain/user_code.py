"""Calls of the user's own functions, named ``pkg.mod:build`` on the command line."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from dualtrain.errors import UserError
from dualtrain.torchvision_shim import with_torchvision_shim


def call_user_code(path: str, flag: str, takes: str, *arguments: Any) -> Any:
    """Call ``path`` (``pkg.mod:build``) with ``arguments``, or without any if it takes none, and return its result.

    Raises:
        UserError: the module or the callable does not exist, or takes other arguments than ``takes`` says. The message
            names ``flag``. Errors of the called code itself pass through.
    """
    module_name, _, name = path.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise UserError(f"{flag} {path!r} does not name a callable: give pkg.mod:function")
    try:
        module = with_torchvision_shim(lambda: importlib.import_module(module_name))
    except ModuleNotFoundError as error:
        raise UserError(
            f"{flag} {path!r} needs the module {error.name!r}, which is not found: run from its folder or set PYTHONPATH"
        ) from error
    build = getattr(module, name, None)
    if not callable(build):
        raise UserError(f"{flag} {path!r}: {module_name} has no callable {name!r}: give pkg.mod:function")
    for given in (arguments, ()):
        if _takes(build, given):
            return build(*given)
    raise UserError(f"{flag} {path!r} takes {_signature(build)}: it must take {takes}, or nothing")


def _signature(build: Any) -> str:
    text = str(inspect.signature(build))
    return text if len(text) < 200 else "other arguments"


def _takes(build: Any, arguments: tuple[Any, ...]) -> bool:
    try:
        inspect.signature(build).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True
