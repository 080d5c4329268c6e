"""One examination: every rank's facts and measurements, gathered to all of them, and what follows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from dualtrain.backends import Backend
from dualtrain.backends.factory import choose
from dualtrain.doctor.advice import advise
from dualtrain.doctor.facts import gather
from dualtrain.doctor.network import used
from dualtrain.doctor.probe import SIZES, Probe, bus_bandwidth, probe
from dualtrain.errors import BackendError
from dualtrain.launchers import World

BOTH = ("torch", "horovod")


class Examination:
    """A world under examination. Collective: every process of the job makes one, with the same arguments.

    Attributes:
        report: plain values; complete on every rank that reached the others, this rank's own part on one that did not.
    """

    def __init__(self, wanted: str, world: World, timeout: float) -> None:
        self.world = world
        self._deadline = time.monotonic() + timeout + 3.0
        own = gather(world)
        self._probes: dict[str, Probe] = {}
        for name in BOTH if wanted == "all" else (wanted,):
            refusal = own["horovod_error"] if name == "horovod" else None
            refusal = refusal or self._why_not(name)
            self._probes[name] = self._agreed(name, refusal) or probe(name, world, timeout)
        own["probes"] = {name: found.facts() for name, found in self._probes.items()}
        rows, lost = self._gathered(own)
        self.report = _report(rows, lost, choose("auto" if wanted == "all" else wanted, world), self._single_host())

    def end(self) -> None:
        """Leaves the worlds, once rank 0 has printed. Blocks for the others where they were reached."""
        if self._voice is None:
            # A launcher ends all processes when the first one ends: rank 0's report must come before.
            if self.world.rank:
                time.sleep(max(0.0, self._deadline - time.monotonic()))
            return
        try:
            self._voice.barrier()
            for found in self._probes.values():
                if found.backend is not None:
                    found.backend.close()
        except BackendError:
            pass  # a rank that is gone already need not be waited for

    @property
    def _voice(self) -> Backend | None:
        """A backend that reached the other ranks: the words between them travel there."""
        ready = sorted(
            (found for found in self._probes.values() if found.backend), key=lambda found: found.error is not None
        )
        return ready[0].backend if ready else None

    def _single_host(self) -> bool:
        return self._voice.world.single_host if self._voice else self.world.single_host

    def _why_not(self, name: str) -> str | None:
        """Why a second backend need not be tried after the first one."""
        by_itself = self.world.size == 1 or self.world.launcher.startswith(("horovodrun", "mpi"))
        if name == "horovod" and not by_itself and "torch" in self._probes and self._voice is None:
            return (
                f"not tried: under {self.world.launcher} it meets through torch's rendezvous, which has failed (see torch)"
            )
        return None

    def _agreed(self, name: str, refusal: str | None) -> Probe | None:
        """A failed probe where this rank, or one that it can hear of, has a reason not to try."""
        if self._voice is None:
            return Probe(name, error=refusal) if refusal else None
        try:
            refusals = self._voice.allgather_object(refusal)
        except BackendError as error:
            return Probe(name, error=str(error))
        without = [str(rank) for rank, said in enumerate(refusals) if said]
        if not without:
            return None
        return Probe(name, error=refusal or f"not tried: rank {', '.join(without)} cannot use it (see there)")

    def _gathered(self, own: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
        if self._voice is None:
            return [own], None
        try:
            return self._voice.allgather_object(own), None
        except BackendError as error:
            return [own], f"the other ranks' facts did not come: {error}; look for their own messages"


def _report(rows: Sequence[dict[str, Any]], lost: str | None, chosen: str, single_host: bool) -> dict[str, Any]:
    problems, notes = advise(rows, chosen)
    if lost is not None:
        problems.insert(0, lost)
    return {
        "works": not problems,
        "chosen": chosen,
        "problems": problems,
        "notes": notes,
        "interface": used(rows[0]["interfaces"], rows[0]["wishes"], single_host),
        "allreduce": {name: _measured(rows, name) for name in rows[0]["probes"]},
        "ranks": list(rows),
    }


def _measured(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """The slowest rank's times; no sizes where a rank has none."""
    found = [row["probes"][name] for row in rows]
    whole = all(len(each["seconds"]) == len(SIZES) for each in found)
    slowest = [max(each["seconds"][place] for each in found) for place in range(len(SIZES))] if whole else []
    sizes = [
        {"bytes": size, "seconds": seconds, "bus_bandwidth": bus_bandwidth(size, seconds, rows[0]["size"])}
        for size, seconds in zip(SIZES, slowest, strict=False)
    ]
    return {"transport": found[0]["transport"], "device": found[0]["device"], "sizes": sizes}
