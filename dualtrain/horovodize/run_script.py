"""Execution of a script or module as ``__main__``: arguments, path, exit status and traceback are as with python."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import NamedTuple

from dualtrain.errors import UserError
from dualtrain.files import check_regular


class Program(NamedTuple):
    """Compiled code, and the ``__main__`` module in which it runs."""

    code: CodeType
    main: ModuleType

    def run(self) -> None:
        """Run the code. If it fails, the traceback that python prints starts in the program, not in this package."""
        sys.modules["__main__"] = self.main  # pickle and multiprocessing look up the script's functions there
        try:
            exec(self.code, self.main.__dict__)
        except SystemExit:
            raise
        except BaseException:
            _hide_frames_above(self.code)
            raise


def load_script(path: str, arguments: Sequence[str]) -> Program:
    """Load the script that ``python path arguments…`` would run, and set ``sys.argv`` and ``sys.path`` for it.

    Also install the import hook, set HOROVOD_RANK and similar variables, and set up memory allocation.

    Raises:
        UserError: the file does not exist, cannot be read, is not a regular file, or is a notebook; or Horovod itself is
            already imported.
        SyntaxError: the file is not valid Python. A ValueError is possible too.
    """
    if os.path.isdir(path):
        raise UserError(f"{path!r} is a folder: name the script in it, or run a package with -m")
    refuse_notebook(path)
    try:
        check_regular(path)
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        raise UserError(f"cannot read the script {path!r} ({error.strerror}): check its path") from None
    main = ModuleType("__main__")
    main.__file__ = os.path.abspath(path)
    main.__loader__ = SourceFileLoader("__main__", main.__file__)
    main.__dict__.update(__builtins__=__builtins__, __annotations__={}, __cached__=None, __package__=None)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    sys.argv[:] = [path, *arguments]
    _prepare()
    try:
        return Program(compile(source, main.__file__, "exec", dont_inherit=True), main)
    except (SyntaxError, ValueError):
        _hide_frames_above(None)
        raise


def refuse_notebook(path: str) -> None:
    """Raise UserError if ``path`` is a notebook. Its JSON is often valid Python, but running it has no effect."""
    if path.endswith(".ipynb"):
        raise UserError(f"{path!r} is a notebook: convert it with `jupyter nbconvert --to script`, and name the new file")


def load_module(name: str, arguments: Sequence[str]) -> Program:
    """Load the module that ``python -m name arguments…`` would run, and set ``sys.argv`` for it.

    Also install the import hook, set HOROVOD_RANK and similar variables, and set up memory allocation. Then import the
    packages that contain the module, which may raise any exception.

    Raises:
        UserError: the module does not exist or cannot be run, or Horovod itself is already imported.
        SyntaxError: the module is not valid Python. A ValueError is possible too.
    """
    sys.argv[:] = ["-m", *arguments]
    _prepare()
    spec, code = _find(name)
    main = ModuleType("__main__")
    main.__file__, main.__loader__, main.__spec__ = spec.origin, spec.loader, spec
    main.__dict__.update(__builtins__=__builtins__, __annotations__={}, __cached__=spec.cached, __package__=spec.parent)
    sys.argv[0] = spec.origin or name
    return Program(code, main)


def _find(name: str) -> tuple[ModuleSpec, CodeType]:
    """Return the spec and the code of a module, or of a package's ``__main__``. Raise UserError if none can be run."""
    try:
        spec = None if name.startswith(".") else importlib.util.find_spec(name)  # relative names need a package
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the package exists, but imports a module that does not exist
        spec = None
    except ValueError:
        spec = None
    if spec is None:
        hint = ": leave out .py, or leave out -m" if name.endswith(".py") else ": check its name and PYTHONPATH"
        raise UserError(f"there is no module named {name!r}{hint}")
    if spec.submodule_search_locations is not None:
        return _find(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if isinstance(spec.loader, SourceFileLoader) else None
    if code is None:
        raise UserError(f"the module {name!r} cannot be run, because it is not a Python source file: name one that is")
    return spec, code


def _prepare() -> None:
    """Install the import hook, set up memory allocation, and set HOROVOD_RANK and similar variables.

    A script may read these variables before ``hvd.init``.
    """
    from dualtrain.heap import keep_freed_memory, use_huge_pages
    from dualtrain.horovodize.imports import install

    install()
    keep_freed_memory()
    use_huge_pages()
    from dualtrain import horovod_variables

    horovod_variables.set_rank_variables()


def _hide_frames_above(code: CodeType | None) -> None:
    """Omit the frames above ``code``, or all frames if ``code`` is ``None``, from the traceback that python prints."""
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code is not code:
            trace = trace.tb_next
        shown(kind, error.with_traceback(trace), trace)

    sys.excepthook = show
