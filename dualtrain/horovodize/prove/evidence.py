"""The records of all runs of one ``--prove``, and simple facts about them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import combinations

from dualtrain.horovodize.prove.comparison import Difference, different_end, first_difference
from dualtrain.horovodize.prove.records import RunRecord


@dataclass
class Evidence:
    """The records of all runs.

    Attributes:
        horovod: the records of the runs on Horovod, or the record given by --against. The first one is of the full run.
        dualtrain: the records of the runs with dualtrain, without Horovod's defects; the first one is the longest.
        compat: the record of the full run in which dualtrain reproduced Horovod's defects; ``None`` if this run failed or
            reproduced no defect. Also ``None`` if dualtrain's full run without the defects had the same weights and
            the same end as the run on Horovod.
        recorded: whether Horovod's record was given by --against.
        failure: the script's error, if it failed with dualtrain but not on Horovod; else empty.
    """

    horovod: list[RunRecord]
    dualtrain: list[RunRecord]
    compat: RunRecord | None = None
    recorded: bool = False
    failure: str = ""

    @property
    def full(self) -> RunRecord:
        """The full run with dualtrain: the one without Horovod's defects, or ``compat`` if that run is not a full one."""
        plain = self.dualtrain[0]
        return plain if self.compat is None or plain.planned >= self.horovod[0].planned else self.compat

    @property
    def difference_of_repeats(self) -> Difference | None:
        """The first difference between two runs on Horovod, or else between two runs with dualtrain; may be ``None``."""
        for runs in (self.horovod, self.dualtrain):
            for one, other in combinations(runs, 2):
                difference = first_difference(one, other)
                if difference is not None:
                    return difference
        return None

    @property
    def platform_differences(self) -> list[str]:
        """Differences from the platform of --against's record that may affect bits, such as "torch 1.13, here 2.15"."""
        if not self.recorded or not self.dualtrain:
            return []
        there, here = self.horovod[0].platform, self.dualtrain[0].platform
        return [
            f"{name} {there[name] or 'none'}, here {here[name] or 'none'}" for name in there if there[name] != here[name]
        ]

    @property
    def script_change(self) -> str:
        """Text that says how the script or its arguments differ from those of --against's record; may be empty."""
        if not self.recorded or not self.dualtrain:
            return ""
        there, here = self.horovod[0].ranks[0].start, self.dualtrain[0].ranks[0].start
        if there.get("sha256", here.get("sha256")) != here.get("sha256"):
            return f"the script has changed since it was recorded as {there.get('script')!r}; record it again"
        if there.get("arguments") != here.get("arguments"):
            was, now = (shlex.join(map(str, start.get("arguments") or [])) or "none" for start in (there, here))
            return f"the script's arguments were {was} when it was recorded, and are {now} here"
        return ""


def agrees(evidence: Evidence) -> bool:
    """Return whether Horovod's first run and a run with dualtrain have the same end and the same bits of all weights.

    The run with dualtrain is the one that reproduces Horovod's defects, or the first one if there is none.
    """
    horovod, dualtrain = evidence.horovod[0], evidence.compat or evidence.dualtrain[0]
    return different_end(horovod, dualtrain) is None and first_difference(horovod, dualtrain) is None
