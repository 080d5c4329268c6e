"""Virtual nodes of ``bench --scale``: network namespaces of this machine, each with its own host name, joined by a bridge.

Ranks on different nodes see different host names and addresses, and communicate over TCP through the bridge, whose latency
is low. The nodes share the cores and the disk. Each node has an /etc/hosts with the addresses of all nodes, because Gloo
looks up the host's own name. Nothing outside the namespaces is changed: the bridge has a namespace of its own. The kernel
removes a namespace when its last process has ended. The processes that keep the namespaces alive exit when the bench ends,
even if the bench was killed.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

INTERFACE = "eth0"
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_SECONDS = 20.0  # time limit of one command
_UNTIL_END = "echo up; read -r _"  # ``read`` returns when the bench ends or closes its end of the pipe

Result = TypeVar("Result")


class NodesError(Exception):
    """Virtual nodes cannot be made here. The message is the reason in one line."""


@dataclass(frozen=True)
class Node:
    """One virtual node: host name, address on ``INTERFACE``, and the process that keeps the namespaces alive."""

    name: str
    address: str
    pid: int

    def enter(self) -> None:
        """Move this process to the node. Raises OSError.

        The process must have only one thread, because ``setns`` moves only the calling thread.
        """
        folder = os.getcwd()
        _enter(self.pid, "net", _CLONE_NEWNET)
        _enter(self.pid, "uts", _CLONE_NEWUTS)
        _enter(self.pid, "mnt", _CLONE_NEWNS)  # changes the working folder to /
        os.chdir(folder)

    def call_on_network(self, make: Callable[[], Result]) -> Result:
        """Call ``make`` in a thread on the node's network, and return its result, or raise its error.

        A socket stays on the network on which it was made. A thread that ``make`` starts is on the node's network too.
        """
        results: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                _enter(self.pid, "net", _CLONE_NEWNET)
                results.append(make())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="dualtrain-virtual-node")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


def _enter(pid: int, kind: str, flag: int) -> None:
    # os.setns is new in Python 3.12.
    with open(f"/proc/{pid}/ns/{kind}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), flag):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


@contextmanager
def virtual_nodes(count: int, folder: Path) -> Iterator[list[Node]]:
    """Make ``count`` nodes for the duration of the block. A file in ``folder`` becomes their /etc/hosts.

    Raises:
        NodesError: this machine or this user cannot make them.
    """
    if missing := [tool for tool in ("ip", "unshare", "nsenter", "mount", "hostname") if shutil.which(tool) is None]:
        raise NodesError(f"{missing[0]} is not installed: install iproute2, util-linux, mount and hostname")
    addresses = {f"node{number}": f"10.77.1.{number + 1}" for number in range(count)}
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{address} {name}\n" for name, address in [("localhost", "127.0.0.1"), *addresses.items()]))
    with ExitStack() as stack:
        bridge_pid = _start_in_namespaces(stack, ["unshare", "--net"], _UNTIL_END)
        _run(bridge_pid, "ip", "link", "add", "bridge0", "type", "bridge")
        _run(bridge_pid, "ip", "link", "set", "bridge0", "up")
        nodes = []
        for name, address in addresses.items():
            script = f'hostname {name} && mount --bind "$0" /etc/hosts && {{ {_UNTIL_END}; }}'
            unshare = ["unshare", "--net", "--uts", "--mount", "--propagation", "private"]
            nodes.append(Node(name, address, _start_in_namespaces(stack, unshare, script, str(hosts.resolve()))))
            _connect(bridge_pid, nodes[-1], f"port-{name}")
        yield nodes


def _start_in_namespaces(stack: ExitStack, unshare: list[str], script: str, *arguments: str) -> int:
    """Start a process in new namespaces, and return its id. It ends when ``stack`` is closed. Raises NodesError."""
    process = subprocess.Popen(
        [*unshare, "sh", "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stack.enter_context(process)  # closes the pipes and waits; the process ends at the end of its standard input
    assert process.stdout is not None
    assert process.stderr is not None
    if not select.select([process.stdout], [], [], _SECONDS)[0]:
        process.kill()
        raise NodesError(f"{' '.join(unshare)!r} is not ready after {_SECONDS:.0f} s")
    if process.stdout.readline() != "up\n":  # the line is empty if the process has exited
        raise NodesError(f"virtual nodes need root and Linux namespaces: {process.stderr.read().strip()}")
    return process.pid


def _connect(bridge_pid: int, node: Node, port: str) -> None:
    _run(bridge_pid, "ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", str(node.pid))
    _run(bridge_pid, "ip", "link", "set", port, "master", "bridge0", "up")
    _run(node.pid, "ip", "address", "add", f"{node.address}/24", "dev", INTERFACE)
    for interface in (INTERFACE, "lo"):
        _run(node.pid, "ip", "link", "set", interface, "up")


def _run(pid: int, *command: str) -> None:
    """Run ``command`` on the network of the process ``pid``. Raises NodesError if it fails or takes too long."""
    line = ["nsenter", "--target", str(pid), "--net", *command]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NodesError(f"{' '.join(command)!r} did not end within {_SECONDS:.0f} s") from error
    if done.returncode:
        raise NodesError(f"{' '.join(command)!r} failed: {done.stderr.strip()}")
