"""Whole jobs on two hosts, started by the launch scripts, and their end when the link between the hosts is cut.

Hosts are made from namespaces (tests/launch/hosts.py). Needs root and iproute2; sshd for all launchers
except torchrun; Horovod for all jobs except those of torchrun with ``--backend torch``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import require_horovod
from tests.launch.hosts import CORES, ROOT, Cluster, require_hosts, two_hosts
from tests.launch.jobs import NO_COMPILER_PATH, QUICK, rank_of, run, summary, torchrun

pytestmark = pytest.mark.xdist_group("machine")  # like test_slurm.py: both search all processes of this machine

EPOCHS = "4"
START_SECONDS = 150.0  # for four ranks on a busy machine
STOP_SECONDS = 30.0  # a host counts as failed after 10 s; the other 20 s are for a busy machine
PLACES = {"hosta": {0}, "hostb": {1}}


class Job:
    """A job with NPROC ranks on each host (default 1). torchrun is started on both hosts, other launchers on the first."""

    def __init__(self, cluster: Cluster, folder: Path, launcher: str, *flags: str, **variables: str) -> None:
        self.cluster = cluster
        names = ",".join(host.name for host in cluster.hosts)
        script_variables = {"DUALTRAIN_VENV": sys.prefix, "HOSTS": names, "NPROC": "1", "PORT": "29500", **variables}
        # Each job has its own HOME, because horovodrun caches facts about host names there for an hour, and all tests use
        # the same host names.
        env = {**os.environ, "PYTHONPATH": NO_COMPILER_PATH, "HOME": str(folder), **script_variables}
        command = ["bash", str(ROOT / "launch" / f"{launcher}.sh"), *flags]
        self.logs = [folder / f"{launcher}-{host.name}.log" for host in cluster.hosts]
        self.launchers: list[subprocess.Popen[str]] = []
        for host, log in zip(cluster.hosts if launcher == "torchrun" else cluster.hosts[:1], self.logs, strict=False):
            with log.open("w") as output:
                self.launchers.append(host.start(command, env, output))

    def output(self) -> str:
        """Return the whole output of the job."""
        return "\n".join(log.read_text() for log in self.logs if log.exists())

    def errors(self) -> list[str]:
        """Return the errors that ranks have printed. A launcher may end a rank before the rank prints its error."""
        return [line for line in self.output().splitlines() if "dualtrain: error" in line]

    def ranks(self) -> dict[str, set[int]]:
        """Return the ranks that run on each host."""
        found = {host.name: {rank_of(pid) for pid in host.processes()} for host in self.cluster.hosts}
        return {name: {rank for rank in ranks if rank is not None} for name, ranks in found.items()}

    def until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Block until ``condition()`` is true; fail the test after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"not within {seconds:g} s; running: {self.cluster.processes()}; printed: {self.output()}")
            time.sleep(0.1)

    def ended(self) -> bool:
        """Return whether all processes of the job have ended."""
        return all(launcher.poll() is not None for launcher in self.launchers) and not self.cluster.processes()

    def end(self) -> None:
        """Kill the remaining processes of the job, and wait until they have ended."""
        for pid in [pid for host in self.cluster.hosts for pid in host.processes()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.until(self.ended, STOP_SECONDS)

    def statuses(self, seconds: float = START_SECONDS) -> list[int]:
        """Wait until all processes have ended; return the launchers' exit statuses. Fail the test after ``seconds``."""
        self.until(self.ended, seconds)
        return [launcher.returncode for launcher in self.launchers]


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    ssh = request.getfixturevalue("launcher") != "torchrun"
    if ssh or request.getfixturevalue("backend") == "horovod":
        require_horovod()  # the installation of Horovod includes mpirun
    require_hosts(ssh=ssh)
    own_address = request.getfixturevalue("own_address") if "own_address" in request.fixturenames else None
    with two_hosts(tmp_path, ssh=ssh, own_address=own_address) as cluster:
        yield cluster


def on_one_host(folder: Path, ranks: int, *extra_flags: str) -> Path:
    """Run a job with ``ranks`` ranks on one host; return the run's folder.

    With the native transport, the ranks add gradients in the same order as on two hosts.
    """
    require_hosts()
    flags = ["--backend", "torch", "--transport", "native", "--epochs", EPOCHS, "--run-dir", str(folder), *extra_flags]
    end = run(["taskset", "--cpu-list", ",".join(CORES[:2]), *torchrun(ranks, *flags)], env=QUICK)
    assert end.returncode == 0, end.stderr
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with two ranks on one host; return the run's folder."""
    return on_one_host(tmp_path_factory.mktemp("reference") / "run", 2)


#: With 13 virtual ranks on four ranks, three ranks exchange two partial sums each (dualtrain/backends/sum_order.py).
VIRTUAL = ("--virtual-ranks", "13")


@pytest.mark.parametrize(
    ("launcher", "backend", "interface", "ranks", "extra_flags", "transport"),
    [
        ("mpirun", "torch", "eth0", 1, (*VIRTUAL, "--transport", "shm"), "shm+gloo"),
        ("horovodrun", "torch", "eth0", 4, (), "gloo"),
    ],
    ids=["virtual ranks", "plain"],
)
def test_two_hosts_give_the_same_model_as_one(
    launcher, backend, interface, ranks, extra_flags, transport, cluster, tmp_path
):
    # Each host has two ranks, so gradients are added inside hosts and between them. With virtual ranks, the run on one host
    # has a single rank.
    reference = on_one_host(tmp_path / "reference", ranks, *extra_flags[:2])
    folder = tmp_path / "run"
    flags = ["--backend", backend, "--epochs", EPOCHS, "--run-dir", str(folder), *extra_flags]
    job = Job(cluster, tmp_path, launcher, *flags, IFACE=interface, NPROC="2")
    job.until(lambda: job.ended() or job.ranks() == {"hosta": {0, 1}, "hostb": {2, 3}}, START_SECONDS)
    assert job.statuses() == [0], job.output()
    assert (summary(folder)["world_size"], summary(folder)["transport"]) == (4, transport)
    for name in ("weights_sha256", "val_loss", "val_accuracy", "train_loss")[: 4 if extra_flags else 1]:
        assert summary(folder)[name] == summary(reference)[name]


@pytest.mark.parametrize("own_address", ["127.0.1.1"])  # Debian's installer writes it into /etc/hosts
@pytest.mark.parametrize("launcher", ["torchrun"])
@pytest.mark.parametrize("backend", ["torch", "horovod"])
def test_hostnames_that_resolve_to_loopback_are_refused_only_with_horovod(
    launcher, backend, own_address, cluster, tmp_path
):
    folder = tmp_path / "run"
    job = Job(cluster, tmp_path, launcher, "--backend", backend, "--epochs", "1", "--run-dir", str(folder))
    statuses = job.statuses()
    if backend == "torch":
        assert statuses == [0, 0], job.output()
        assert summary(folder)["world_size"] == 2
    else:  # Horovod's Gloo would use the loopback address and end the process, so the run is refused
        assert all(statuses), job.output()
        assert job.errors(), job.output()
        assert all("resolves its own name to a loopback address, which Horovod would send" in line for line in job.errors())


@pytest.mark.parametrize("launcher", ["torchrun"])
@pytest.mark.parametrize("backend", ["torch", "horovod"])
def test_an_interface_that_does_not_reach_the_other_host_is_refused(launcher, backend, cluster, tmp_path):
    for number, host in enumerate(cluster.hosts, 1):
        host.run("ip", "link", "add", "eth1", "type", "veth", "peer", "name", "open-end")
        host.run("ip", "address", "add", f"10.78.{number}.1/24", "dev", "eth1")
        host.run("ip", "link", "set", "eth1", "up")
    # On a busy machine, one host may join 10 s after the other. The refusal itself does not wait for this timeout.
    flags = ["--backend", backend, "--run-dir", str(tmp_path / "run"), "--timeout", "60"]
    job = Job(cluster, tmp_path, launcher, *flags, IFACE="eth1")
    assert all(job.statuses()), job.output()
    assert job.errors(), job.output()
    for line in job.errors():
        assert "cannot reach the host of rank" in line
        assert "GLOO_SOCKET_IFNAME" in line


def losses(folder: Path, epochs: int) -> list[float]:
    """Return the validation losses of a run's first epochs."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["val_loss"] for row in rows if row["kind"] == "epoch"][:epochs]


# Open MPI's threads poll while they wait, and use the cores that ranks need: with two cores, a job can take minutes.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("launcher", "backend"), [("mpirun", "horovod")])
def test_mpi_between_hosts_gives_nearly_the_same_losses(launcher, backend, cluster, reference, tmp_path):
    folder = tmp_path / "run"
    job = Job(cluster, tmp_path, launcher, "--backend", backend, "--epochs", "1", "--run-dir", str(folder))
    assert job.statuses(400.0) == [0], job.output()
    assert (summary(folder)["transport"], summary(folder)["world_size"]) == ("mpi", 2)
    assert losses(folder, 1) == pytest.approx(losses(reference, 1), rel=1e-3)  # MPI adds in a different order


@pytest.mark.parametrize(
    ("launcher", "backend"), [("torchrun", "torch"), ("torchrun", "horovod"), ("horovodrun", "horovod")]
)
def test_a_cut_link_ends_all_ranks_and_the_run_can_be_resumed(launcher, backend, cluster, reference, tmp_path):
    flags = ["--backend", backend, "--run-dir", str(tmp_path / "run"), "--epochs"]
    job = Job(cluster, tmp_path, launcher, *flags, "5000")
    job.until(lambda: "epoch 2/" in job.output() or job.ended(), START_SECONDS)
    assert job.ranks() == PLACES, job.output()
    cluster.cut()
    job.until(lambda: not any(job.ranks().values()), STOP_SECONDS)
    # The error of rank 1 is in the second host's log under torchrun. Under horovodrun, it may be lost with the link.
    assert "rank 0 of 2): stopping, since rank " in job.output()
    assert "cannot be reached: its host 10.77.0.2 no longer answers" in job.output()
    if launcher == "torchrun":
        assert "stopping, since rank 0 cannot be reached: its host 10.77.0.1" in job.logs[1].read_text()
    job.until(lambda: job.launchers[0].poll() is not None, STOP_SECONDS)
    assert job.launchers[0].returncode != 0
    job.end()  # do not wait for torchrun's agent on the second host, which ends only after minutes
    cluster.restore()

    resumed = Job(cluster, tmp_path, launcher, *flags, EPOCHS, "--resume")
    assert not any(resumed.statuses()), resumed.output()
    assert summary(tmp_path / "run")["weights_sha256"] == summary(reference)["weights_sha256"]


@pytest.mark.parametrize(("launcher", "backend"), [("mpirun", "torch")])
def test_a_cut_link_ends_all_processes_of_an_mpirun_job(launcher, backend, cluster, tmp_path):
    flags = ["--backend", backend, "--run-dir", str(tmp_path / "run"), "--epochs", "5000"]
    job = Job(cluster, tmp_path, launcher, *flags)
    job.until(lambda: "epoch 2/" in job.output() or job.ended(), START_SECONDS)
    assert job.ranks() == PLACES, job.output()
    cluster.cut()
    assert job.statuses(STOP_SECONDS) != [0]  # all processes have ended, including those on the other host
    assert "lost communication with a remote daemon" in job.output() or "cannot be reached" in job.output()
    assert "hostb" in job.output()
