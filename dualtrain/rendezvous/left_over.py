"""Recognition of an MPI launcher's variables that do not belong to a running launcher.

A shell that mpirun has started, or a terminal multiplexer or container that was started in this shell, keeps mpirun's
variables. With the address of a launcher that has ended, MPI would abort the process without an explanation. With only a
rank and a size, copied or set by hand, MPI would start as a world of one process.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from dualtrain.errors import UserError
from dualtrain.launchers import World

_SECONDS = 5.0  # for one connection; a server that does not answer in this time is assumed to run
#: Variables with the addresses of the server through which the ranks of Open MPI find each other. Hydra's PMI_PORT is not
#: checked: Hydra may regard the end of a connection as the end of a rank.
_ADDRESS = re.compile(r"PMIX_SERVER_URI[0-9]*")
#: Variables of Open MPI, PMI, Cray's PALS and Flux. A launcher sets at least one of them, besides the rank and the size.
_LAUNCHED = re.compile(
    r"PMIX_(NAMESPACE|RANK|SERVER_).*|OMPI_MCA_(orte|ess|pmix).*|PRTE_.*|PMI_(?!RANK$|SIZE$).*|PMI2_.*|PALS_.*|FLUX_.*"
)
_TCP = re.compile(r".*;tcp4://(?P<host>[^;:/]+):(?P<port>[0-9]{1,5})")


def refuse_left_over(world: World, env: Mapping[str, str]) -> None:
    """Check that an MPI launcher has started this process, and that ``mpirun`` still runs. Call this before MPI starts.

    Does nothing for other launchers. Blocks for 5 s at most per address of ``mpirun``.

    Raises:
        UserError: the world has several processes, and ``env`` has no variable by which MPI finds the others; or under
            ``mpirun``, ``env`` has IPv4 addresses of the launcher, and all of them refuse connections.
    """
    if world.launcher.startswith("mpi") and world.size > 1 and not any(map(_LAUNCHED.fullmatch, env)):
        raise UserError(
            f"{world.launcher}'s variables say that this process is rank {world.rank} of {world.size} ({world.because()}), "
            f"but {world.launcher} has not started it: the variables through which MPI finds the other processes are not "
            f"set; start the command with {world.launcher}, pass on all of its variables, or unset these"
        )
    addresses = {
        name: found
        for name, value in sorted(env.items())
        if world.launcher == "mpirun" and _ADDRESS.fullmatch(name) and (found := _TCP.fullmatch(value))
    }
    if not addresses or not all(_is_closed(found["host"], int(found["port"])) for found in addresses.values()):
        return
    name, found = next(iter(addresses.items()))
    raise UserError(
        f"{world.launcher}'s variables say that this process is rank {world.rank} of {world.size} ({world.because()}), but "
        f"{world.launcher} has ended: nothing listens at {found['host']}:{found['port']} ({name}); the variables are "
        f"left over from an earlier job: start the command with {world.launcher}, or in a shell without these variables"
    )


def _is_closed(host: str, port: int) -> bool:
    """Return whether the host refuses connections to the port."""
    try:
        socket.create_connection((host, port), _SECONDS).close()
    except ConnectionRefusedError:
        return True
    except (OSError, OverflowError):
        return False
    return False
