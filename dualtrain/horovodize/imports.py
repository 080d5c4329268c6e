"""The import hook: ``import horovod…`` in a script finds the modules of ``dualtrain.hvd``, the same objects.

One table says where each part of Horovod lives here. A script's child processes (``spawn``, ``forkserver``) start
without the hook, but with its ``sys.path``: a folder on it holds a module ``horovod`` that installs the hook there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from dualtrain.errors import UserError

#: What a script gets, by the name it asks for. What stands below a name goes below its home.
HOMES = {
    "horovod.torch": "dualtrain.hvd",
    "horovod.common.elastic": "dualtrain.hvd.elastic.common",
    "horovod.common.exceptions": "dualtrain.hvd.exceptions",
    "horovod.common.process_sets": "dualtrain.hvd.process_sets",
    "horovod.common.util": "dualtrain.hvd.util",
    "horovod.runner.elastic.worker": "dualtrain.hvd.elastic.common",
}


def run(*_: object, **__: object) -> NoReturn:
    """Stands where ``horovod.run`` stood: scripts import it on the way to other things."""
    raise UserError(
        "horovod.run() starts processes, and here the launcher does: start the script with "
        "torchrun --nproc_per_node=N -m dualtrain.horovodize script.py, and call the function itself"
    )


#: The packages in between, which dualtrain has no module for, and what they hold.
PACKAGES: dict[str, dict[str, Any]] = {
    "horovod": {"__version__": "0.28.1", "run": run},
    "horovod.common": {},
    "horovod.runner": {"run": run},
    "horovod.runner.elastic": {},
}

_OTHER_FACES = ("tensorflow", "keras", "_keras", "mxnet", "spark", "ray", "data")
_CHILDREN = str(Path(__file__).parent / "children")
_ROOT = str(Path(__file__).parents[2])


def home(name: str) -> str | None:
    """The module of dualtrain that ``name`` stands for."""
    for old, new in HOMES.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


class _Alias(Loader):
    """Puts a module of dualtrain in the place of the one that was asked for."""

    def __init__(self, target: str) -> None:
        self.target = target

    def exec_module(self, module: ModuleType) -> None:
        try:
            # importlib takes what stands here as the module that was loaded.
            sys.modules[module.__name__] = import_module(self.target)
        except ModuleNotFoundError as error:
            if error.name != self.target:
                raise
            raise ModuleNotFoundError(_missing(module.__name__), name=module.__name__) from None


class _Package(Loader):
    """A package that has no counterpart in dualtrain, made of its table of names."""

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(PACKAGES[module.__name__])


class _Torchvision(SourceFileLoader):
    """Loads torchvision as Python does; scripts get the hand that one of its builds needs, as dualtrain's own models do."""

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
        place = home(name)
        if place is None:
            # Not None: the next finder must not come across an installed Horovod.
            raise ModuleNotFoundError(_missing(name), name=name)
        return ModuleSpec(name, _Alias(place), origin="dualtrain", is_package=name == "horovod.torch")


_FINDER = _Finder()


def _missing(name: str) -> str:
    if name.split(".")[1] in _OTHER_FACES:
        return f"No module named {name!r}: dualtrain covers horovod.torch only; move this script's training to torch"
    return f"No module named {name!r}: dualtrain covers the public modules of horovod.torch 0.28.1 only"


def install() -> None:
    """From now on ``import horovod.torch`` gives ``dualtrain.hvd``, in this process and in its multiprocessing children.

    Raises:
        UserError: Horovod itself was imported before.
    """
    if _FINDER in sys.meta_path:
        return
    if "horovod" in sys.modules:
        raise UserError(
            "Horovod itself is imported already, and its modules cannot be exchanged: install the hook before it"
        )
    sys.meta_path.insert(0, _FINDER)
    if _CHILDREN not in sys.path:
        sys.path.insert(1, _CHILDREN)  # behind the script's own folder, before an installed Horovod
    if _ROOT not in sys.path:
        sys.path.append(_ROOT)  # the children must find dualtrain even where this process found it in its folder


def uninstall() -> None:
    """Takes the hook away, and what was imported through it: Horovod itself can be imported again."""
    if _FINDER not in sys.meta_path:
        return
    sys.meta_path.remove(_FINDER)
    if _CHILDREN in sys.path:
        sys.path.remove(_CHILDREN)
    for name in [name for name in sys.modules if name == "horovod" or name.startswith("horovod.")]:
        del sys.modules[name]
