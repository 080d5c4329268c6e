"""Several contenders in the same processes. Their steps run in turns; see ``timed_steps.py``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dualtrain.bench.contenders import Contender, started
from dualtrain.bench.plan import ENTRIES


class SideBySide(Contender):
    """The contenders whose names ``option`` lists, separated by commas. They are started in this order."""

    def __init__(self, option: str, device: torch.device) -> None:
        entries = {name: ENTRIES[name] for name in option.split(",")}
        self._contenders = {name: started(entry.module, entry.option, device) for name, entry in entries.items()}
        first = next(iter(self._contenders.values()))
        self.rank, self.size, self.device = first.rank, first.size, device

    def side_by_side(self) -> Mapping[str, Contender]:
        """See the base class."""
        return self._contenders

    def close(self) -> None:
        """See the base class. Closes the contenders in reverse order."""
        for contender in reversed(self._contenders.values()):
            contender.close()


def start(option: str, device: torch.device) -> Contender:
    """Join the world and return the contender; see ``contenders``."""
    return SideBySide(option, device)
