"""Facts about the host, and the date and time, for the results of a measurement."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata

from dualtrain.cores import processor_name, usable_cores
from dualtrain.version import __version__


def now() -> str:
    """Return the date and the time."""
    return time.strftime("%Y-%m-%d %H:%M")


def load() -> str:
    """Return the load averages over 1, 5 and 15 minutes."""
    return "{:.2f}, {:.2f} and {:.2f}".format(*os.getloadavg())


def host_facts(device: str, load_before: str, threads: str) -> dict[str, str]:
    """Return facts about this host; ``load_before`` is its load before the measurement."""
    return {
        "device": device,
        "processor": processor_name(),
        "cores": f"{usable_cores()} usable here; {threads}",
        "load": f"{load_before} before (averages over 1, 5 and 15 minutes), {load()} after",
        "versions": ", ".join([f"dualtrain {__version__}", f"Python {platform.python_version()}", *_versions()]),
    }


def _versions() -> Iterator[str]:
    """Yield the versions of the compared libraries that are installed."""
    for name in ("torch", "horovod", "accelerate", "lightning-fabric", "pytorch-ignite"):
        with suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"
