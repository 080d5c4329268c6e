"""One examination: gather every rank's facts and measurements, and make the report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from dualtrain.backends import Backend
from dualtrain.backends.factory import choose
from dualtrain.cores import share_of, threads_per_rank, usable_cores
from dualtrain.differences import ranks_in_words
from dualtrain.doctor.advice import advise
from dualtrain.doctor.facts import local_facts
from dualtrain.doctor.network import used_interface
from dualtrain.doctor.probe import MARGIN_SECONDS, SIZES, Probe, bus_bandwidth, probe
from dualtrain.errors import BackendError
from dualtrain.launchers import World

BOTH = ("torch", "horovod")
_PRINT_SECONDS = 3.0  # for rank 0 to print the report


class Examination:
    """Examination of a world. Collective: every process of the job makes one, with the same ``backend`` and ``timeout``.

    Construction probes the backends, exchanges the facts, and makes the report.

    Args:
        backend: the backend to test: "torch", "horovod" or "all".
        world: the world of this process, as the launcher describes it.
        timeout: limit in seconds for a backend to join, and for each of its operations.

    Attributes:
        report: the report as plain values, for all ranks if their facts arrived on this rank, otherwise for this rank only.
    """

    def __init__(self, backend: str, world: World, timeout: float) -> None:
        self.world = world
        self._deadline = time.monotonic() + _PRINT_SECONDS  # by then, rank 0 has printed; each probe adds its limit
        own = local_facts(world)
        self._probes: dict[str, Probe] = {}
        for name in BOTH if backend == "all" else (backend,):
            untried = self._untried(name)
            if untried is None:
                self._deadline += timeout + MARGIN_SECONDS
            refusal = (own["horovod_error"] if name == "horovod" else None) or untried
            self._probes[name] = self._refused(name, refusal) or probe(name, world, timeout)
        own["probes"] = {name: found.facts() for name, found in self._probes.items()}
        placed = self._control.world if self._control else world
        own["threads"] = share_of(usable_cores(), placed.local_size)
        own["interface"] = used_interface(own["interfaces"], own["overrides"], placed)
        rows, failure = self._exchanged(own)
        self.report = _report(rows, failure, choose("auto" if backend == "all" else backend, world))

    def end(self) -> None:
        """Wait until rank 0 has printed, then close the backends. Blocks until all reachable ranks have called this too.

        Without a backend that reached the other ranks, rank 0 returns at once, and the others wait until it has had time to
        print.
        """
        if self._control is None:
            # A launcher ends all processes when the first one ends: give rank 0 time to print its report.
            if self.world.rank:
                time.sleep(max(0.0, self._deadline - time.monotonic()))
            return
        try:
            self._control.barrier()
            for found in self._probes.values():
                if found.backend is not None:
                    found.backend.close()
        except BackendError:
            pass  # a rank has exited already: don't wait for it

    @property
    def _control(self) -> Backend | None:
        """A backend that reached the other ranks, for exchanging refusals and facts; ``None`` if no backend did."""
        ready = sorted(
            (found for found in self._probes.values() if found.backend), key=lambda found: found.error is not None
        )
        return ready[0].backend if ready else None

    def _untried(self, name: str) -> str | None:
        """Return why Horovod cannot join: it needs torch's rendezvous, which has failed. ``None`` if ``name`` can try."""
        own_rendezvous = self.world.size == 1 or self.world.launcher.startswith(("horovodrun", "mpi"))
        if name == "horovod" and not own_rendezvous and "torch" in self._probes and self._control is None:
            return (
                f"not tried: under {self.world.launcher}, Horovod uses torch's rendezvous, which has failed (see the error "
                "of torch)"
            )
        return None

    def _refused(self, name: str, refusal: str | None) -> Probe | None:
        """Exchange refusals with the ranks that this rank reaches. Return ``None`` if all of them can try the backend.

        Otherwise, or if the exchange fails, return a failed probe.
        """
        if self._control is None:
            return Probe(name, error=refusal) if refusal else None
        try:
            refusals = self._control.allgather_object(refusal)
        except BackendError as error:
            return Probe(name, error=str(error))
        without = [rank for rank, reason in enumerate(refusals) if reason]
        if not without:
            return None
        return Probe(name, error=refusal or f"not tried: {ranks_in_words(without)} cannot use it (see the errors there)")

    def _exchanged(self, facts: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
        """Return the facts of all ranks, and ``None``; if they cannot be exchanged, this rank's facts and the reason.

        The reason is ``None`` too if this rank reached no other rank: the failed probes say why.
        """
        if self._control is None:
            return [facts], None
        try:
            return self._control.allgather_object(facts), None
        except BackendError as error:
            return [facts], f"the other ranks' facts did not arrive: {error}; look for their own messages"


def _report(rows: Sequence[dict[str, Any]], failure: str | None, chosen: str) -> dict[str, Any]:
    problems, notes = advise(rows, chosen)
    if failure is not None:
        problems.insert(0, failure)
    return {
        "works": not problems,
        "chosen": chosen,
        "problems": problems,
        "notes": notes,
        "threads": _threads(rows),
        # A single rank sends no data, so its times say nothing about the transport.
        "allreduce": {name: _measured(rows, name) for name in rows[0]["probes"] if rows[0]["size"] > 1},
        "ranks": list(rows),
    }


def _threads(rows: Sequence[dict[str, Any]]) -> int:
    """Return the default of ``--threads``; if not all ranks have reported, an estimate from this rank's facts."""
    if len(rows) < rows[0]["size"]:
        return int(min(row["threads"] for row in rows))
    return threads_per_rank([(row["host"], row["cores"], row["quota"]) for row in rows])


def _measured(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return rank 0's transport and device, and the slowest rank's time and bus bandwidth for each size.

    ``sizes`` is empty if a rank has not measured all sizes. If ``rows`` has this rank's facts only, these replace rank 0's.
    """
    found = [row["probes"][name] for row in rows]
    complete = all(len(each["seconds"]) == len(SIZES) for each in found)
    slowest = [max(each["seconds"][index] for each in found) for index in range(len(SIZES))] if complete else []
    sizes = [
        {"bytes": size, "seconds": seconds, "bus_bandwidth": bus_bandwidth(size, seconds, rows[0]["size"])}
        for size, seconds in zip(SIZES, slowest, strict=False)
    ]
    return {"transport": found[0]["transport"], "device": found[0]["device"], "sizes": sizes}
