"""Jobs that cannot start, the addresses at which a job listens, and worlds that share a store.

Each rank that detects why a job cannot start prints one clear line and exits with status 2.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dualtrain import UserError
from dualtrain import main as command
from dualtrain.launchers import World
from dualtrain.rendezvous import meeting_point
from dualtrain.rendezvous.meeting_point import within
from dualtrain.rendezvous.store import listen, serve
from tests.conftest import require_horovod
from tests.forked import Forked, rank_variables, run_ranks, torchrun_variables, wait_until
from tests.pool import ROOT, free_port

ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
BACKENDS = ["torch", "horovod"]
ELSEWHERE = "192.0.2.1"  # RFC 5737: no host has this address


def refusal(text):
    """Return the error without its prefix. It is the only line of ``text`` besides warnings."""
    (line,) = [line for line in text.splitlines() if "Warning" not in line]
    return line.removeprefix("dualtrain: error ")


def variables_of(number, size=2, **variables):
    return {"RANK": str(number), "WORLD_SIZE": str(size), **{name: str(value) for name, value in variables.items()}}


FAULTS = {
    "a variable is missing": (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        "MASTER_PORT is not set, but MASTER_ADDR, RANK, WORLD_SIZE are: ",
    ),
    "torchrun's variable is missing": (
        {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
        "WORLD_SIZE is not set, but LOCAL_RANK, LOCAL_WORLD_SIZE, RANK, TORCHELASTIC_RUN_ID are: the process has only",
    ),
    "Slurm's variable is missing": (
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
        "SLURM_NTASKS is not set, but ",
    ),
    "a variable is not a number": ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK='first' is not a whole number: correct"),
    "the rank is not below the size": (
        variables_of(5, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=29500),
        "environment gave rank 5 in a world of 2 (RANK=5 WORLD_SIZE=2",
    ),
    "the port is too large": (
        variables_of(0, MASTER_ADDR="127.0.0.1", MASTER_PORT=99999),
        "MASTER_PORT=99999 is not a port: ",
    ),
    "the host's name is invalid": (
        variables_of(0, MASTER_ADDR="host..example", MASTER_PORT=29500),
        "MASTER_ADDR='host..example' is not the name or the address of a host: ",
    ),
    "there is no address": (variables_of(0), "the torch backend has no address to meet the other process at: "),
    "there is no server": (
        variables_of(1, MASTER_ADDR="127.0.0.1", MASTER_PORT=9),
        "rank 1 could not meet the others at 127.0.0.1:9 within 1 s (Connection refused): ",
    ),
    "the host is unknown": (
        variables_of(1, MASTER_ADDR="no-such-host.invalid", MASTER_PORT=29500),
        "rank 1 could not meet the others at no-such-host.invalid:29500 within 1 s (",
    ),
    "the host cannot be reached": (
        variables_of(1, MASTER_ADDR=ELSEWHERE, MASTER_PORT=29500),
        f"rank 1 could not meet the others at {ELSEWHERE}:29500 within 1 s (",
    ),
    "the address is not rank 0's": (
        variables_of(0, MASTER_ADDR=ELSEWHERE, MASTER_PORT=29500),
        f"rank 0 cannot listen at {ELSEWHERE}:29500 (Cannot assign requested address): MASTER_ADDR must be",
    ),
    "the address is empty": (
        variables_of(0, MASTER_ADDR="", MASTER_PORT=29500),
        "rank 0 cannot listen at :29500 (Name or service not known): MASTER_ADDR must be",
    ),
    "the other rank never joins": (
        variables_of(0, MASTER_ADDR="127.0.0.1", MASTER_PORT=0) | {"MASTER_PORT": "free"},
        "rank 1 of 2 did not join within 1 s: check that all processes were started",
    ),
}


def error_of_command(variables, seconds, monkeypatch, capsys):
    """Run the command line with these environment variables, assert that it refuses them, and return its error message."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert command.main(["--backend", "torch", "--timeout", str(seconds)]) == 2
    return refusal(capsys.readouterr().err)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_cannot_join_reports_the_reason(fault, monkeypatch, capsys):
    variables, said = FAULTS[fault]
    if variables.get("MASTER_PORT") == "free":
        variables = variables | {"MASTER_PORT": str(free_port())}
    assert said in error_of_command(variables, 1, monkeypatch, capsys)


def test_a_rank_with_another_jobs_secret_is_refused(monkeypatch, capsys):
    server = serve(listen("127.0.0.1", [0], 2), 2, "job 0 ")
    try:
        port = server._listening.getsockname()[1]
        variables = variables_of(1, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, DUALTRAIN_SECRET="job 1")
        said = error_of_command(variables, 20, monkeypatch, capsys)
        assert server.call("count") == 0
    finally:
        server.close()
    assert "the process there is not of this job, or has another DUALTRAIN_SECRET" in said
    assert "job 1" not in said


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_processes_with_the_same_rank_are_refused(backend, tmp_path):
    if backend == "horovod":
        require_horovod()
    program = "import os, sys, dualtrain.main\nos.environ['RANK'] = '01'[os.environ['RANK'] != '0']\n"
    program += f"sys.exit(dualtrain.main.main(['--backend', {backend!r}, '--timeout', '60']))"
    for end in run_ranks(3, ("-c", program), tmp_path, env=ENV):
        assert end.returncode == 2
        said = refusal(end.stderr)
        assert "two processes are rank 1 (process " in said
        assert "give each of the 3 its own rank, from 0 to 2" in said


VERSIONS = """
import os
import dualtrain.backends.factory as factory
from dualtrain.main import main
if os.environ["RANK"] == "1":
    factory.__version__ = "9." + factory.__version__
print([main(["--backend", backend]) for backend in ("torch", "horovod")])
"""


def test_ranks_with_different_versions_are_refused(tmp_path):
    require_horovod()
    for end in run_ranks(2, ("-c", VERSIONS), tmp_path, env=ENV):
        assert end.stdout == "[2, 2]\n"
        lines = end.stderr.splitlines()
        assert len(lines) == 2, end.stderr
        for said in lines:
            assert "rank 0 runs dualtrain 0." in said
            assert "but dualtrain 9.0." in said


MIXED = """
import os, sys
from dualtrain.main import main
rank = int(os.environ.get("RANK") or os.environ["HOROVOD_RANK"])
sys.exit(main(["--backend", ("torch", "horovod", "torch")[(rank + int(sys.argv[1])) % 3], "--timeout", "60"]))
"""
LAUNCHED = {
    "by hand": lambda: nullcontext(rank_variables(3)),
    "torchrun": lambda: torchrun_variables(3),
    "horovodrun": lambda: horovodrun(3),
}


@contextmanager
def horovodrun(size):
    """Run a fake of horovodrun's key-value server; yield, per rank, the variables of ``horovodrun --gloo`` on loopback."""
    server = KeyValueServer()
    variables = {"LOCAL_SIZE": size, "CROSS_RANK": 0, "CROSS_SIZE": 1, "HOSTNAME": "localhost", "SIZE": size}
    variables |= {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": server.server_port, "CONTROLLER": "gloo"}
    try:
        yield [
            {f"HOROVOD_{key}": str(value) for key, value in (variables | {"RANK": n, "LOCAL_RANK": n}).items()}
            for n in range(size)
        ]
    finally:
        server.shutdown()
        server.server_close()


class KeyValueServer(ThreadingHTTPServer):
    """Fake of horovodrun's server, with the requests that dualtrain sends: PUT, and GET (404 for a key that is not set)."""

    daemon_threads = True

    def __init__(self):
        self.values = {}
        super().__init__(("127.0.0.1", 0), KeyValueHandler)
        threading.Thread(target=partial(self.serve_forever, poll_interval=0.05), daemon=True).start()


class KeyValueHandler(BaseHTTPRequestHandler):
    def do_PUT(self):
        self.server.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def do_GET(self):
        value = self.server.values.get(self.path)
        self.send_response(404 if value is None else 200)
        self.end_headers()
        self.wfile.write(value or b"")

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("launcher", LAUNCHED)
@pytest.mark.parametrize("shift", [0, 1])
def test_every_rank_reports_which_ranks_chose_which_backend(launcher, shift, tmp_path):
    require_horovod()
    with LAUNCHED[launcher]() as ranks:
        ends = run_ranks(ranks, ("-c", MIXED, str(shift)), tmp_path, env=ENV)
    chosen = ["torch on ranks 0, 2 and horovod on rank 1", "horovod on rank 0 and torch on ranks 1, 2"][shift]
    for number, end in enumerate(ends):
        assert end.returncode == 2, end.stderr
        said = f"(rank {number} of 3): the ranks do not have the same backend ({chosen}): give the same --backend to all"
        assert refusal(end.stderr) == said


def test_a_rank_that_does_not_reach_horovodruns_server_is_named(tmp_path):
    with horovodrun(3) as ranks:
        ends = run_ranks(ranks[:2], ("-m", "dualtrain.main", "--backend", "torch", "--timeout", "1"), tmp_path, env=ENV)
    for end in ends:
        assert end.returncode == 2, end.stderr
        assert "rank 2 of 3 did not join within 1 s: check that all" in refusal(end.stderr)


MEETS_BY_SERVER = """
import os, sys, time
from dualtrain import connect
from dualtrain.launchers import detect_world
from dualtrain.rendezvous.meeting_point import names_by_server
if os.environ["HOROVOD_RANK"] == sys.argv[2]:
    time.sleep(1)  # the other rank must not use what an earlier program has left on the server
assert names_by_server(detect_world(), 60, sys.argv[1]) == [sys.argv[1]] * 2
for timeout in (60, 50):
    if os.environ["HOROVOD_RANK"] == "0":
        time.sleep(1)  # rank 1 must not use an address that is out of date
    with connect("torch", timeout=timeout) as backend:
        print(backend.allgather_object(backend.rank))
"""


def test_programs_may_use_horovodruns_server_one_after_another(tmp_path):
    with horovodrun(2) as ranks:
        for name, late in (("torch", "0"), ("horovod", "1"), ("torch", "0")):
            for end in run_ranks(ranks, ("-c", MEETS_BY_SERVER, name, late), tmp_path, env=ENV):
                assert end.stdout == "[0, 1]\n" * 2, end.stderr


AGREES_AGAIN = """
import time
from dataclasses import replace
from dualtrain.launchers import detect_world
from dualtrain.rendezvous.horovodrun_server import agree_on_prefix
first = detect_world()
names = []
for world in (first, replace(first, job="other"), first):
    names.append(agree_on_prefix(world, time.monotonic() + 60))
    time.sleep(0.3 * first.rank)  # so rank 0 finds the number that rank 1 has written for the earlier world
print(names)
"""


def test_ranks_keep_the_prefix_that_they_have_agreed_on(tmp_path):
    with horovodrun(2) as ranks:
        one, other = run_ranks(ranks, ("-c", AGREES_AGAIN), tmp_path, env=ENV)
    assert one.stdout == other.stdout != "", other.stderr


def test_within_raises_at_its_timeout_and_passes_on_results_and_errors():
    released = threading.Event()
    with pytest.raises(UserError, match=r"MPI did not start within 0.01 s: .*give the same --backend to all"):
        within(0.01, released.wait, "MPI did not start")
    released.set()
    assert within(60, lambda: 1, "it") == 1
    for error in (TimeoutError("its own"), UserError("no"), SystemExit(3)):
        with pytest.raises(type(error)) as caught:
            within(60, partial(raising, error), "it")
        assert caught.value is error


def raising(error):
    raise error


def listening(pids):
    """Return the addresses at which these processes listen, in hexadecimal digits as in /proc/net/tcp."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(entry))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


SPAWNING = """
import sys
import dualtrain.spawn
from dualtrain.main import main
from tests.afresh import AfreshContext
dualtrain.spawn.get_context = lambda method: AfreshContext()
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_on_one_host_listens_on_the_loopback_interface_alone(backend, tmp_path):
    if backend == "horovod":
        require_horovod()
    arguments = ["--backend", backend, "--nproc", "2", "--epochs", "10000", "--run-dir", tmp_path / "run"]
    job = Forked(("-c", SPAWNING, *arguments), tmp_path, env=ENV)
    try:
        assert wait_until(lambda: "epoch 1/" in job.output or job.poll() is not None)
        assert job.poll() is None, job.errors
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        assert len(children) == 2
        # The ranks' libraries may still listen; the job's process, which served the store, no longer does.
        found = set(listening(children))
        assert found <= {"0100007F"}
        assert found or backend == "horovod"  # Horovod's ranks have closed their ports by now
        assert listening([job.pid]) == []
    finally:
        job.kill()


HVD = """
import torch
import dualtrain.hvd as hvd
hvd.init()
print("sum", hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum).item(), flush=True)
hvd.shutdown()
"""


def test_horovods_api_starts_with_variables_set_by_hand(tmp_path):
    assert [end.stdout for end in run_ranks(2, ("-c", HVD), tmp_path, env=ENV)] == ["sum 3.0\n"] * 2


def test_worlds_share_a_store_only_if_the_process_that_starts_the_ranks_serves_it(monkeypatch):
    dialled = []

    def dial(host, ports, rank, size, secret, timeout, world):
        dialled.append((secret, world))
        return object()

    monkeypatch.setattr(meeting_point, "_JOINED", {})
    monkeypatch.setattr(meeting_point, "dial", dial)
    world = World(1, 2, 1, 2, rendezvous=("127.0.0.1", 7), secret="s", name="comm2")
    other = replace(world, size=3, name="comm3")
    first = meeting_point.join(world, 1.0)
    assert meeting_point.join(world, 1.0) is first
    assert meeting_point.join(other, 1.0) is not first
    served = [meeting_point.join(replace(each, served=True), 1.0) for each in (world, other)]
    assert served[0] is served[1]
    assert dialled == [("s comm2", "comm2"), ("s comm3", "comm3"), ("s", "comm2")]
