"""Import hook: ``import horovod…`` in a script loads modules of dualtrain instead.

The tables ``REPLACEMENTS`` and ``ENGINES`` map Horovod's modules to those of dualtrain. A script's child processes
(``spawn``, ``forkserver``) start without the hook but with the parent's ``sys.path``. So :func:`install` adds the folder
``children`` to this path. The module ``horovod`` in this folder installs the hook in the child.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from dualtrain.errors import UserError

#: Modules of Horovod, and the module of dualtrain that replaces each. Submodules are mapped accordingly.
REPLACEMENTS = {
    "horovod.torch": "dualtrain.hvd",
    "horovod.common.elastic": "dualtrain.hvd.elastic.common",
    "horovod.common.exceptions": "dualtrain.hvd.exceptions",
    "horovod.common.process_sets": "dualtrain.hvd.process_sets",
    "horovod.common.util": "dualtrain.hvd.util",
    "horovod.runner.elastic.worker": "dualtrain.hvd.elastic.common",
    "horovod.runner.util.threads": "dualtrain.hvd.threads",
}


#: For each module of Horovod that starts ranks on Ray or Spark: the module of dualtrain that replaces it, and the one name
#: that both modules define. (dualtrain lacks the other names.)
ENGINES = {
    "horovod.ray": ("dualtrain.ray", "RayExecutor"),
    "horovod.ray.runner": ("dualtrain.ray.executor", "RayExecutor"),
    "horovod.spark": ("dualtrain.spark", "run"),
    "horovod.spark.runner": ("dualtrain.spark.barrier", "run"),
}

#: Module and name of the function that replaces ``horovod.run``. It is imported only when it is called,
#: because its module imports this package.
_RUN = "dualtrain.functions.local", "horovod_run"


def run(*args: Any, **kwargs: Any) -> Any:
    """Call a function on several ranks of this host, as ``horovod.run`` does: :func:`dualtrain.functions.horovod_run`."""
    module, name = _RUN
    return getattr(import_module(module), name)(*args, **kwargs)


#: Packages of Horovod without a counterpart in dualtrain, and the names that they define.
PACKAGES: dict[str, dict[str, Any]] = {
    "horovod": {"__version__": "0.28.1", "run": run},
    "horovod.common": {},
    "horovod.runner": {"run": run},
    "horovod.runner.elastic": {},
    "horovod.runner.util": {},
}

_WITH_SUBMODULES = ("horovod.torch", "horovod.ray", "horovod.spark")
_OTHER_FRAMEWORKS = ("tensorflow", "keras", "_keras", "mxnet", "spark", "ray", "data")
_CHILDREN = str(Path(__file__).parent / "children")
_ROOT = str(Path(__file__).parents[2])


def replacement_of(name: str) -> str | None:
    """Return the module of dualtrain that replaces the module ``name`` of Horovod, or None.

    For a submodule, the result is the name that it would have in dualtrain: the module need not exist.
    """
    if name in ENGINES:
        return ENGINES[name][0]
    for old, new in REPLACEMENTS.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


class _Alias(Loader):
    """Loader of a module of dualtrain under the requested name."""

    def __init__(self, target: str) -> None:
        self.target = target

    def exec_module(self, module: ModuleType) -> None:
        try:
            # importlib returns the module in this entry, instead of ``module``.
            sys.modules[module.__name__] = import_module(self.target)
        except ModuleNotFoundError as error:
            if error.name != self.target:
                raise
            raise ModuleNotFoundError(_missing(module.__name__), name=module.__name__) from None


class _Package(Loader):
    """Loader of a package without a counterpart in dualtrain, made from the table PACKAGES."""

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(PACKAGES[module.__name__])


class _Torchvision(SourceFileLoader):
    """Loader of torchvision with the shim that its CUDA build needs beside a CPU build of torch."""

    def exec_module(self, module: ModuleType) -> None:
        from dualtrain.torchvision_shim import with_torchvision_shim

        with_torchvision_shim(lambda: super(_Torchvision, self).exec_module(module))


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision":
            spec = PathFinder.find_spec(name, path)
            if spec is not None and isinstance(spec.loader, SourceFileLoader):
                spec.loader = _Torchvision(name, spec.loader.path)
            return spec
        if name.partition(".")[0] != "horovod":
            return None
        if name in PACKAGES:
            return ModuleSpec(name, _Package(), origin="dualtrain", is_package=True)
        target_name = replacement_of(name)
        if target_name is None:
            # Don't return None, because the next finder might find an installed Horovod.
            raise ModuleNotFoundError(_missing(name), name=name)
        return ModuleSpec(name, _Alias(target_name), origin="dualtrain", is_package=name in _WITH_SUBMODULES)


_FINDER = _Finder()


def _missing(name: str) -> str:
    if name.split(".")[1] in _OTHER_FRAMEWORKS:
        return (
            f"No module named {name!r}: dualtrain covers only horovod.torch, and functions that start ranks; move the "
            "training to torch"
        )
    return f"No module named {name!r}: dualtrain covers the public modules of horovod.torch 0.28.1 only"


def install() -> None:
    """Make ``import horovod.torch`` load ``dualtrain.hvd``, in this process and in its multiprocessing children.

    Also make ``import torchvision`` work with a CPU build of torch (``torchvision_shim.py``).

    Raises:
        UserError: Horovod itself is already imported.
    """
    if _FINDER in sys.meta_path:
        return
    if "horovod" in sys.modules:
        raise UserError(
            "Horovod itself is already imported and cannot be replaced: install the hook before horovod is first imported"
        )
    sys.meta_path.insert(0, _FINDER)
    if _CHILDREN not in sys.path:
        sys.path.insert(1, _CHILDREN)  # after the script's own folder, before an installed Horovod
    if _ROOT not in sys.path:
        sys.path.append(_ROOT)  # children must find dualtrain even if this process found it in the current folder


def uninstall() -> None:
    """Remove the hook and the ``horovod`` modules that it loaded. Horovod itself can then be imported."""
    if _FINDER not in sys.meta_path:
        return
    sys.meta_path.remove(_FINDER)
    if _CHILDREN in sys.path:
        sys.path.remove(_CHILDREN)
    for name in [name for name in sys.modules if name == "horovod" or name.startswith("horovod.")]:
        del sys.modules[name]
