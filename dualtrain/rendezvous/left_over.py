"""Recognition of the variables of an MPI launcher that has ended. With them, MPI would abort the process, and not say why.

A shell that mpirun has started, or a terminal multiplexer or container that was started in it, keeps mpirun's variables.
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
_TCP = re.compile(r".*;tcp4://(?P<host>[^;:/]+):(?P<port>[0-9]{1,5})")


def refuse_left_over(world: World, env: Mapping[str, str]) -> None:
    """Check that the launcher of an MPI rank still runs. Call it before MPI starts. Does nothing for other launchers.

    Raises:
        UserError: ``env`` has addresses of the launcher, and all of them refuse connections.
    """
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
