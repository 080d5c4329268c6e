"""Calls of the user's own functions, named ``pkg.mod:build`` on the command line, and messages for their errors."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from dualtrain.errors import (
    BackendError,
    UserError,
    first_line,
    is_disk_or_network_error,
    is_too_large,
    lacks_memory,
    one_line,
)
from dualtrain.torchvision_shim import with_torchvision_shim

_LONGEST = 400  # characters of an exception's message in one line


def call_user_code(path: str, flag: str, takes: str, *arguments: Any) -> Any:
    """Call ``path`` (``pkg.mod:build``) with ``arguments``, or without arguments if it takes none; return its result.

    Raises:
        UserError: the module or the callable does not exist; the callable is an ``nn.Module``, or requires other arguments
            (the message describes the right ones with the text in ``takes``); or the user's code raises (the error has
            that code's traceback). The message names ``flag``.
        BackendError: the user's code raised it.
    """
    module_name, _, name = path.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise UserError(f"{flag} {path!r} does not name a callable: give pkg.mod:function")
    with user_code(f"{flag} {path!r}"):
        try:
            module = with_torchvision_shim(lambda: importlib.import_module(module_name))
        except ModuleNotFoundError as error:
            where = "run from its folder or set PYTHONPATH"
            if error.name and not f"{module_name}.".startswith(f"{error.name}."):  # a module that the user's module imports
                where = "install it, or set PYTHONPATH"
            if error.name == module_name and module_name.endswith(".py"):
                where = f"give a module's name instead of its file: {module_name.removesuffix('.py')}:{name}"
            raise UserError(f"{flag} {path!r} needs the module {error.name!r}, which is not found: {where}") from error
    build = getattr(module, name, None)
    if not callable(build):
        raise UserError(
            f"{flag} {path!r} does not exist, since {module_name} has no callable {name!r}: give pkg.mod:function"
        )
    if isinstance(build, torch.nn.Module):  # a call would be a forward pass
        raise UserError(f"{flag} {path!r} is a module ({type(build).__name__}): give a function that builds it")
    for given in (arguments, ()):
        if _takes(build, given):
            with user_code(f"{flag} {path!r}"):
                return build(*given)
    raise UserError(f"{flag} {path!r} takes {_signature(build)}: it must take {takes}, or nothing")


def takes_arguments(path: str, *arguments: Any) -> bool:
    """Return whether ``path`` (``pkg.mod:build``), which :func:`call_user_code` has called, takes ``arguments``."""
    module, _, name = path.partition(":")
    return _takes(getattr(importlib.import_module(module), name), arguments)


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


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Convert an exception that the user's own code raises in the block into a UserError with that exception's traceback.

    UserError and BackendError are not converted.
    """
    try:
        yield
    except (UserError, BackendError):
        raise
    except Exception as error:
        reason = f"{what} failed: {in_one_line(error)}"
        if lacks_memory(error):
            reason = f"{what} is too large for this machine ({first_line(error)}): make it smaller"
        raise UserError(reason, trace=user_traceback(error), transient=is_disk_or_network_error(error)) from error


@contextmanager
def enough_memory(cure: str) -> Iterator[None]:
    """Convert errors for which :func:`is_too_large` is true into a UserError whose message ends with ``cure``.

    A BackendError is not converted.

    If the user's own code raised the error, or called the function that raised it, the UserError has that code's
    traceback. In this case, an OverflowError is not converted: most likely, its cause is not a size.
    """
    try:
        yield
    except BackendError:
        raise
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
        trace = user_traceback(error)
        if not is_too_large(error) or (trace and isinstance(error, OverflowError)):
            raise
        raise UserError(f"too large for this machine ({first_line(error)}): {cure}", trace=trace) from error


def in_one_line(error: BaseException) -> str:
    """Format an error: class, message, the model's layer that raised it, and the traceback's last line of user code.

    A long message is cut. The traceback contains all of it.
    """
    text, layer, line = one_line(error), _layer(error), ""
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    for frame in traceback.extract_tb(error.__traceback__):
        if _is_users(frame.filename):
            line = f", in {os.path.basename(frame.filename)}:{frame.lineno}"
    return f"{type(error).__name__}{f': {text}' if text else ''}{f', in layer {layer}' if layer else ''}{line}"


def user_traceback(error: BaseException) -> str:
    """Format the traceback from the first to the last frame of the user's code; empty if there is no such frame.

    If the user's last frame called this package, directly or through other code, all later frames are included too. The
    errors that led to ``error`` are formatted in the same way. For a SyntaxError, format only the message.
    """
    shown = traceback.TracebackException.from_exception(error)
    todo, users = [shown], False
    while todo:
        one = todo.pop()
        numbers = [number for number, frame in enumerate(one.stack) if _is_users(frame.filename)]
        if numbers:
            users = True
            below = [frame for frame in one.stack[numbers[-1] + 1 :] if _is_ours(frame.filename)]
            one.stack[:] = one.stack[numbers[0] : None if below else numbers[-1] + 1]
        todo += [other for other in (one.__cause__, one.__context__) if other is not None]
    if isinstance(error, SyntaxError):  # its message shows the line of code
        return "".join(shown.format_exception_only()).rstrip()
    return "".join(shown.format()).rstrip() if users else ""


@cache
def _folders() -> tuple[str, tuple[str, ...]]:
    """Return the folder of this package, and the folders of torch, torchvision and Python's standard library."""
    specs = (importlib.util.find_spec(name) for name in ("torch", "torchvision"))
    torchs = [os.path.dirname(spec.origin) for spec in specs if spec is not None and spec.origin]
    return os.path.dirname(os.path.abspath(__file__)) + os.sep, tuple(
        folder + os.sep for folder in (*torchs, sysconfig.get_path("stdlib"))
    )


def _is_ours(file: str) -> bool:
    return os.path.abspath(file).startswith(_folders()[0])


def _is_users(file: str) -> bool:
    path = os.path.abspath(file)
    installed = "site-packages" in path or "dist-packages" in path  # both may be below the standard library's folder
    others = _folders()[1][:-1] if installed else _folders()[1]
    return not (file.startswith("<frozen") or _is_ours(file) or path.startswith(others))


def _layer(error: BaseException) -> str:
    """Return the name and the class of the innermost submodule whose forward raised ``error``; empty if there is none."""
    frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = [found for found in frames if isinstance(found, torch.nn.Module)]
    if not modules or modules[0] is modules[-1]:
        return ""
    name = next((name for name, part in modules[0].named_modules() if part is modules[-1]), "")
    return f"{name} ({type(modules[-1]).__name__})" if name else ""
