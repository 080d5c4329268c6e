"""Several contenders in the same processes, whose steps run in turns; see ``timed_steps.py``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import torch

from dualtrain.bench.contenders import Contender
from dualtrain.bench.plan import ENTRIES


class SideBySide(Contender):
    """The contenders that ``option`` names, separated by commas; they are started in this order."""

    def __init__(self, option: str, device: torch.device) -> None:
        self._contenders = {name: _started(name, device) for name in option.split(",")}
        first = next(iter(self._contenders.values()))
        self.rank, self.size, self.device = first.rank, first.size, device

    def side_by_side(self) -> Mapping[str, Contender]:
        """See the base class."""
        return self._contenders

    def close(self) -> None:
        """See the base class. Closes the contenders in reverse order."""
        for contender in reversed(self._contenders.values()):
            contender.close()


def _started(name: str, device: torch.device) -> Contender:
    entry = ENTRIES[name]
    contender: Contender = import_module(f"dualtrain.bench.contenders.{entry.module}").start(entry.option, device)
    return contender


def start(option: str, device: torch.device) -> Contender:
    """Join the world and return the contender; see ``contenders``."""
    return SideBySide(option, device)
