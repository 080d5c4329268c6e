"""Horovod's environment variables that have an effect on ``dualtrain.hvd``, and two variables of dualtrain."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dualtrain.errors import UserError
from dualtrain.launchers import detect_world

log = logging.getLogger("dualtrain.hvd")

#: Default number of seconds after which a wait ends in an error, the same as in torch.distributed over Gloo.
DEFAULT_TIMEOUT = 1800.0

_RANK_VARIABLES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
#: Variables that have an effect here too. Unlike in Horovod, HOROVOD_STALL_CHECK_DISABLE disables only the reports,
#: and not the error after HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.
HONOURED = {
    "HOROVOD_DYNAMIC_PROCESS_SETS",
    "HOROVOD_ELASTIC",
    "HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_STALL_CHECK_DISABLE",
    "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "HOROVOD_TIMELINE",
    "HOROVOD_TIMELINE_MARK_CYCLES",
}
#: Variables that launchers set. They are not logged as ignored.
_OF_LAUNCHERS = {f"HOROVOD_{name}" for name in (*_RANK_VARIABLES, "CONTROLLER", "CPU_OPERATIONS", "HOSTNAME")}
_OF_LAUNCHERS |= {f"HOROVOD_GLOO_{name}" for name in ("IFACE", "RENDEZVOUS_ADDR", "RENDEZVOUS_PORT")}


@dataclass(frozen=True)
class Settings:
    """Values of the environment variables.

    Attributes:
        stall_check: seconds after which a wait is reported on every rank; 0 for never.
        stall_shutdown: seconds after which a wait ends in an error on every rank; infinite for never.
        timeline: file in which a Chrome trace is recorded from the start; ``None`` if HOROVOD_TIMELINE is not set or is
            "DYNAMIC".
        mark_cycles: whether the trace shows when rank 0 looked for matching calls.
        dynamic_sets: whether process sets may be added and removed after the start.
        fusion_bytes: size of the largest gradient bucket in bytes; ``None`` for the reducer's default.
        compat: whether Horovod's own defects are reproduced (DUALTRAIN_HVD_COMPAT).
        transport: how gradients on the CPU are summed: auto, shm or native (DUALTRAIN_TRANSPORT).
    """

    stall_check: float = 60.0
    stall_shutdown: float = DEFAULT_TIMEOUT
    timeline: str | None = None
    mark_cycles: bool = False
    dynamic_sets: bool = False
    fusion_bytes: int | None = None
    compat: bool = False
    transport: str = "auto"

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Settings:
        """Return the settings of ``env``.

        Raises:
            UserError: a numeric variable is not a finite number or is below 0, or the value of DUALTRAIN_TRANSPORT or
                DUALTRAIN_HVD_COMPAT is unknown.
        """
        check = _number(env, "HOROVOD_STALL_CHECK_TIME_SECONDS", cls.stall_check)
        shutdown = _number(env, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", cls.stall_shutdown)
        fusion = _number(env, "HOROVOD_FUSION_THRESHOLD", -1)
        timeline = env.get("HOROVOD_TIMELINE", "")
        transport = env.get("DUALTRAIN_TRANSPORT") or cls.transport
        if transport not in ("auto", "shm", "native"):
            raise UserError(f"DUALTRAIN_TRANSPORT={transport!r} is not known: set it to auto, shm or native, or unset it")
        compat = env.get("DUALTRAIN_HVD_COMPAT") or "0"
        if compat not in ("0", "1"):  # it changes numbers, so don't guess what "no" and "off" mean
            raise UserError(f"DUALTRAIN_HVD_COMPAT={compat!r} is not known: set it to 0 or 1, or unset it")
        return cls(
            stall_check=0.0 if _flag(env, "HOROVOD_STALL_CHECK_DISABLE") else check,
            stall_shutdown=shutdown or float("inf"),  # Horovod's 0 means never
            timeline=timeline if timeline and timeline != "DYNAMIC" else None,
            mark_cycles=_flag(env, "HOROVOD_TIMELINE_MARK_CYCLES"),
            dynamic_sets=_flag(env, "HOROVOD_DYNAMIC_PROCESS_SETS"),
            fusion_bytes=None if fusion < 0 else int(fusion),
            compat=compat == "1",
            transport=transport,
        )


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{name}={text!r} is not a finite number: give seconds or bytes, or unset it")
    if value < 0:
        raise UserError(f"{name}={text} is below 0: give seconds or bytes, or unset it")
    return value


def _flag(env: Mapping[str, str], name: str) -> bool:
    """Return whether the variable begins with a whole number above 0, which is how Horovod reads it."""
    number = re.match(r"\s*[+-]?\d+", env.get(name, ""))
    return number is not None and int(number[0]) > 0


def mention_others(env: Mapping[str, str]) -> None:
    """Log, at level debug, which of Horovod's variables are set and have no effect here. Leave out those of launchers."""
    others = sorted(name for name in env if name.startswith("HOROVOD_") and name not in HONOURED | _OF_LAUNCHERS)
    if others:
        log.debug("ignored, because they have no effect on torch.distributed: %s", ", ".join(others))


def set_rank_variables() -> None:
    """Set HOROVOD_RANK, HOROVOD_SIZE and so on, unless they are set: scripts for horovodrun read them before ``init``.

    Under MPI nothing is set: scripts read MPI's own variables there, and HOROVOD_RANK would make them expect Gloo.
    """
    world = detect_world()
    if world.launcher.startswith("mpi"):
        return
    for name in _RANK_VARIABLES:
        os.environ.setdefault(f"HOROVOD_{name}", str(getattr(world, name.lower())))
