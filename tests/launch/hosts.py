"""Two hosts on one machine: namespaces with their own network, name, processes and shared memory, joined by a veth pair.

The hosts share the disk, as in a cluster with shared home directories. Each host resolves the other's name (/etc/hosts),
and with ``ssh=True`` accepts logins from the other (sshd with temporary keys). Nothing outside the namespaces is changed.
When the first process of a host ends, the kernel kills the host's other processes and removes its network.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).parent.parent.parent
NAMES = ("hosta", "hostb")
#: Host i runs on core i of this list. Every core is listed twice, because the machine may have only one. Because a host has
#: one core, its ranks have one thread each, as in the runs on one host that tests compare with. With more threads, the
#: weights could have other bits.
CORES = [str(core) for core in sorted(os.sched_getaffinity(0))] * 2

# Program of a host's first process. Its mounts are private: the machine's /etc, /run and /dev/shm are not changed.
BOOT = """
set -e
hostname "$1"
ip link set lo up
mount -t tmpfs none /dev/shm
mount -t tmpfs none /run
mount --bind "$2/hosts-$1" /etc/hosts
if [ -d "$2/ssh" ]; then
  mount --bind "$2/ssh" /etc/ssh
  mkdir /run/sshd
  "$(command -v sshd)" -D -e &
fi
mkfifo /run/forever
exec 3<>/run/forever
echo up
read -r _ <&3
"""

SSHD = """
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/user_key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
PidFile none
"""

SSH = """
IdentityFile /etc/ssh/user_key
IdentitiesOnly yes
GlobalKnownHostsFile /etc/ssh/known_hosts
UserKnownHostsFile /dev/null
StrictHostKeyChecking yes
"""


def require_hosts(*, ssh: bool = False) -> None:
    """Skip the test if this machine cannot make hosts from namespaces."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make hosts from namespaces")
    tools = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "taskset": "util-linux"}
    if ssh:
        tools |= {"ssh": "openssh-client", "ssh-keygen": "openssh-client", "sshd": "openssh-server"}
    for tool, package in tools.items():
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}, of Debian's package {package}: bash tests/extras.sh")
    probe = ["unshare", "--net", "--uts", "--pid", "--fork", "ip", "link", "add", "one", "type", "veth"]
    end = subprocess.run(probe, capture_output=True, text=True, timeout=20)
    if end.returncode != 0:
        pytest.skip(f"needs namespaces with a veth pair, which this machine refuses: {end.stderr.strip()}")


class Host:
    """One of the hosts; ``name`` is its host name. The constructor starts the host."""

    def __init__(self, name: str, address: str, core: str, folder: Path) -> None:
        self.name = name
        self.address = address
        self._on_core = ["taskset", "--cpu-list", core]
        self._log = folder / f"{name}.log"
        flags = ["--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        with self._log.open("w") as log:
            self._first = subprocess.Popen(
                [
                    *self._on_core,
                    "unshare",
                    *flags,
                    "--propagation",
                    "private",
                    "bash",
                    "-c",
                    BOOT,
                    "boot",
                    name,
                    str(folder),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.pid = self._first.pid

    def wait_until_up(self) -> None:
        """Block until the host is up; raise RuntimeError if its first process exits instead."""
        assert self._first.stdout is not None
        if self._first.stdout.readline() != "up\n":  # the line is empty if the process has exited
            raise RuntimeError(f"{self.name} did not start: {self._log.read_text()}")

    def inside(self, *command: str) -> list[str]:
        """Return the command line that runs ``command`` on this host, in the repository's root."""
        spaces = ["--net", "--uts", "--ipc", "--mount", f"--pid=/proc/{self.pid}/ns/pid_for_children"]
        # Entering a mount namespace changes the working directory to its root: --chdir changes back to the repository.
        return [*self._on_core, "nsenter", "--target", str(self.pid), *spaces, "--", "env", f"--chdir={ROOT}", *command]

    def run(self, *command: str) -> None:
        """Run a short command on this host; raise if it fails or takes more than 20 s."""
        subprocess.run(self.inside(*command), check=True, capture_output=True, text=True, timeout=20)

    def start(self, command: list[str], env: dict[str, str], output: IO[str]) -> subprocess.Popen[str]:
        """Start a command on this host; write its standard output and its errors to ``output``."""
        return subprocess.Popen(
            self.inside(*command), env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True
        )

    def processes(self) -> dict[int, str]:
        """Return the command line of each process of this host by process id, except the first process and sshd."""
        found = {}
        space = os.readlink(f"/proc/{self.pid}/ns/pid_for_children")
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or os.readlink(entry / "ns" / "pid") != space:
                    continue
                first = re.search(r"^NSpid:.*\t1$", (entry / "status").read_text(), re.MULTILINE)
                if not first and not (entry / "comm").read_text().startswith("sshd"):  # OpenSSH 9.8 has sshd-session
                    found[int(entry.name)] = (entry / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
            except OSError:
                pass  # the process has ended meanwhile
        return {pid: line for pid, line in found.items() if line}  # without zombies

    def power_off(self) -> None:
        """End the host and all its processes."""
        self._first.kill()  # this is unshare: --kill-child ends the host's first process, and so all processes of the host
        self._first.communicate(timeout=20)


class Cluster:
    """The hosts and the link between them."""

    def __init__(self, hosts: list[Host]) -> None:
        self.hosts = hosts

    def cut(self) -> None:
        """Bring the link down."""
        self.hosts[-1].run("ip", "link", "set", "eth0", "down")

    def restore(self) -> None:
        """Bring the link up."""
        self.hosts[-1].run("ip", "link", "set", "eth0", "up")

    def processes(self) -> list[str]:
        """Return the processes on the hosts, except the hosts' first processes and sshd."""
        return [f"{host.name}: {pid} {line}" for host in self.hosts for pid, line in host.processes().items()]


@contextmanager
def two_hosts(folder: Path, *, ssh: bool = False, own_address: str | None = None) -> Iterator[Cluster]:
    """Make two hosts with a link between their eth0 interfaces for the duration of the block; ``folder`` holds their files.

    Each host resolves its own name to ``own_address``, such as 127.0.1.1, which Debian's installer writes into /etc/hosts.
    If ``own_address`` is ``None``, each host resolves its own name to its address on the link.
    """
    addresses = {name: f"10.77.0.{number}" for number, name in enumerate(NAMES, 1)}
    for name in NAMES:
        seen = addresses | ({name: own_address} if own_address else {})
        table = ["127.0.0.1 localhost", *(f"{address} {each}" for each, address in seen.items())]
        (folder / f"hosts-{name}").write_text("\n".join(table) + "\n")
    if ssh:
        _make_keys(folder / "ssh")
    with ExitStack() as stack:
        hosts = []
        for core, (name, address) in zip(CORES, addresses.items(), strict=False):
            hosts.append(Host(name, address, core, folder))
            stack.callback(hosts[-1].power_off)
        for host in hosts:
            host.wait_until_up()
        first, second = hosts
        # Enter only the network namespace: in the PID namespace of ``first``, ``second.pid`` is no process of ``second``.
        cable = ["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second.pid)]
        subprocess.run(["nsenter", "--target", str(first.pid), "--net", *cable], check=True, timeout=20)
        for host in hosts:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
        yield Cluster(hosts)


def _make_keys(folder: Path) -> None:
    folder.mkdir()
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True, timeout=20)
    (folder / "known_hosts").write_text(f"{','.join(NAMES)} {(folder / 'host_key.pub').read_text()}")
    (folder / "sshd_config").write_text(SSHD)
    (folder / "ssh_config").write_text(SSH)
