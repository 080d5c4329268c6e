"""Joining and leaving a world: refusals, the choice of device and transport, forked children, torch's default group."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import dualtrain
from dualtrain import BackendError, ReduceOp, UserError, connect, functional
from dualtrain.backends import torch as torch_backend
from dualtrain.backends.factory import (
    NAMES,
    _as_numbers,
    _compare_choices,
    _locate,
    _take_device,
    choose,
    choose_for_horovod_api,
)
from dualtrain.backends.horovod import _HorovodWork, installed
from dualtrain.backends.host_cores import cores_of_host
from dualtrain.backends.torch import TorchBackend, _TorchWork
from dualtrain.backends.waits import SLICE_SECONDS
from dualtrain.launchers import World
from dualtrain.rendezvous import meeting_point
from dualtrain.rendezvous.hosts import gloo_interface, variables
from dualtrain.rendezvous.left_over import refuse_left_over
from tests.conftest import require_horovod
from tests.forked import in_child, run
from tests.pool import free_port

PAIR = World(0, 2, 0, 2, launcher="environment", rendezvous=("127.0.0.1", 1))
ALONE = World(launcher="environment")
RANK_1_OF_SRUN = World(1, 2, 1, 2, launcher="srun", rendezvous=("127.0.0.1", 1))


def test_the_refusal_of_an_unknown_backend_lists_the_known_backends():
    with pytest.raises(UserError, match=f"no backend is called 'nccl': choose one of {', '.join(NAMES)}"):
        connect("nccl")


def test_a_world_of_the_wrong_type_is_refused():
    with pytest.raises(UserError, match="world=3 is not a World: leave it out under a launcher"):
        connect("torch", world=3)


def test_the_refusal_of_an_unknown_value_of_dualtrain_backend_lists_the_known_values():
    with pytest.raises(
        UserError, match="DUALTRAIN_BACKEND='nccl' is not known: set it to auto, torch or horovod, or unset it"
    ):
        choose_for_horovod_api({"DUALTRAIN_BACKEND": "nccl"})


IMPLIED = {
    "none": "local",
    "torchrun": "torch",
    "srun": "torch",
    "environment": "torch",
    "mpirun": "horovod",
    "mpiexec": "horovod",
    "horovodrun --gloo": "horovod",
}


@pytest.mark.parametrize("launcher", IMPLIED)
def test_the_launcher_determines_the_backend_for_auto(launcher):
    assert choose("auto", World(launcher=launcher)) == IMPLIED[launcher]
    assert choose("local", World(launcher=launcher)) == "local"


@pytest.mark.parametrize("device", ["banana", "mps", "meta"])
def test_an_unsupported_device_is_refused(device):
    with pytest.raises(UserError, match=f"device '{device}' .*choose auto, cpu, cuda or cuda:N"):
        connect("local", device=device)


def test_a_device_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match="device 'cpu:3' does not exist, since all cores are one device: choose cpu"):
        connect("local", device="cpu:3")
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(UserError, match=f"device '{missing}' does not exist: torch sees {torch.cuda.device_count()} GPUs"):
        connect("local", device=missing)


def test_the_device_may_be_text_or_a_torch_device():
    for device in ("cpu", "cpu:0", torch.device("cpu")):
        with connect("local", device=device) as backend:
            assert backend.device == torch.device("cpu")


@pytest.mark.parametrize("name", ["local", "torch"])
def test_connect_and_close_change_no_environment_variable_signal_handler_or_torch_setting(name):
    def state():
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        return dict(os.environ), handlers, torch.get_num_threads(), torch.get_default_dtype()

    before = state()
    with connect(name, world=ALONE, device="cpu") as backend:
        assert state() == before
        backend.group([0])
        assert state() == before
    assert state() == before


def test_close_removes_the_exit_handler_and_the_excepthook(monkeypatch):
    handlers = []
    monkeypatch.setattr(atexit, "register", handlers.append)
    monkeypatch.setattr(atexit, "unregister", handlers.remove)
    before = sys.excepthook
    with connect("local", device="cpu") as backend:
        assert sys.excepthook is not before
        assert handlers == [backend.watch.leave]
    assert sys.excepthook is before
    assert handlers == []


def test_close_keeps_a_hook_that_was_installed_later(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: seen.append(error))
    with connect("local", device="cpu"):
        chained = sys.excepthook
        sys.excepthook = later = lambda *error: chained(*error)
    assert sys.excepthook is later
    error = ValueError("boom")
    later(ValueError, error, None)
    assert seen == [(ValueError, error, None)]


def test_only_one_thread_at_a_time_changes_the_environment(monkeypatch):
    monkeypatch.delenv("DUALTRAIN_TEST", raising=False)
    inside, leave, seen = threading.Event(), threading.Event(), []

    def first():
        with variables({"DUALTRAIN_TEST": "first"}):
            inside.set()
            leave.wait(30)

    def second():
        with variables({"DUALTRAIN_TEST": "second"}):
            seen.append(os.environ["DUALTRAIN_TEST"])

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    threads[1].join(0.2)
    assert seen == []
    assert os.environ["DUALTRAIN_TEST"] == "first"
    leave.set()
    for thread in threads:
        thread.join(30)
    assert seen == ["second"]
    assert "DUALTRAIN_TEST" not in os.environ


def test_the_local_backend_under_a_launcher_of_two_ranks_is_refused():
    with pytest.raises(UserError, match=r"local backend is rank 0 of 1, but environment started .* rank 0 of 2"):
        connect("local", world=PAIR)


def test_a_world_of_several_processes_made_by_the_program_cannot_use_the_local_backend():
    assert choose("auto", World(1, 2)) == "torch"
    with pytest.raises(UserError, match=r"no address to meet the other process at: give the World a rendezvous=\(host, "):
        connect("auto", world=World(1, 2))
    with pytest.raises(UserError, match=r"local backend is rank 0 of 1, but the program gave .* a World of rank 1 of 2: "):
        connect("local", world=World(1, 2))


@pytest.mark.parametrize("name", ["local", "torch"])
@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), 1e30, 10**400, None, "30", 0, -1])
def test_a_timeout_that_is_not_a_usable_number_of_seconds_is_refused(name, timeout):
    message = f"timeout={timeout!r} is not a time limit: pass a number of seconds above 0, and at most 9223372036, "
    with pytest.raises(UserError, match=re.escape(message)):
        connect(name, world=ALONE, timeout=timeout)


def test_the_torch_backend_without_a_rendezvous_names_the_missing_variables():
    with pytest.raises(UserError, match=r"environment sets no MASTER_ADDR and MASTER_PORT; start with torchrun"):
        connect("torch", world=World(0, 2, 0, 2, launcher="environment"))


def test_an_mpi4py_whose_world_differs_from_the_launchers_world_is_refused(monkeypatch):
    comm = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1)
    monkeypatch.setenv("PMIX_RANK", "0")
    mpi = SimpleNamespace(COMM_WORLD=comm, Is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    with pytest.raises(UserError, match=r"mpi4py is rank 0 of 1, but mpirun started rank 0 of 2: .*rebuild"):
        connect("torch", world=World(0, 2, 0, 2, launcher="mpirun"))


def test_mpi_is_initialized_and_finalized_if_the_program_has_not_initialized_it(monkeypatch):
    done = []
    comm = SimpleNamespace(Get_rank=lambda: done.append("rank"), Get_size=lambda: 1)
    mpi = SimpleNamespace(COMM_WORLD=comm, Is_initialized=lambda: False, Is_finalized=lambda: False)
    mpi.Init_thread, mpi.Finalize = lambda: done.append("initialize"), lambda: done.append("finalize")
    monkeypatch.setenv("PMIX_RANK", "0")
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    monkeypatch.setattr(meeting_point, "_initialized", [])
    meeting_point._finalize()
    with pytest.raises(UserError, match="mpi4py is rank None of 1"):
        connect("torch", world=World(0, 2, 0, 2, launcher="mpirun"))
    meeting_point._finalize()
    assert (done[0], done[-1], done.count("finalize")) == ("initialize", "finalize", 1)


def refusal(name, world):
    """Return the error message with which ``connect`` refuses this world."""
    with pytest.raises(UserError) as caught:
        connect(name, world=world)
    return str(caught.value)


# Horovod cannot be unloaded, so these three cases run one after another in a separate process.
HOROVOD_CASES = """
import json, os, sys
from importlib.util import find_spec
os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = "gloo"
from dualtrain.launchers import World
from tests.backends.test_connect import ALONE, RANK_1_OF_SRUN, refusal
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "horovod":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Missing())
said = {"missing": refusal("horovod", ALONE)}
del sys.meta_path[0]
if find_spec("horovod"):
    address = "127.0.0.1", int(sys.argv[1])
    said["port"] = refusal("horovod", World(0, 2, 0, 2, launcher="environment", rendezvous=address))
    import horovod.torch as hvd
    hvd.init()
    said["size"] = refusal("horovod", RANK_1_OF_SRUN)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def busy_port():
    """Yield a port on which a server listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def horovod_errors(busy_port, tmp_path_factory):
    """Return errors from one new process: no Horovod, a port in use, a world of Horovod with a different size.

    If Horovod is not installed, there is only the first.
    """
    done = run(("-c", HOROVOD_CASES, str(busy_port)), tmp_path_factory.mktemp("horovod_errors"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["torch", "horovod"])
def test_a_port_in_use_is_named(name, busy_port, request):
    if name == "horovod":
        require_horovod()
        said = request.getfixturevalue("horovod_errors")["port"]
    else:
        said = refusal("torch", World(0, 2, 0, 2, launcher="environment", rendezvous=("127.0.0.1", busy_port)))
    assert f"port {busy_port} on 127.0.0.1 is in use by another program, or by another rank 0: set MASTER_PORT" in said


def test_a_rendezvous_without_a_server_is_named():
    port = free_port()
    world = World(1, 2, 1, 2, launcher="environment", rendezvous=("127.0.0.1", port))
    with pytest.raises(UserError, match=f"rank 1 could not meet the others at 127.0.0.1:{port} within 1 s"):
        connect("torch", world=world, timeout=1.0)


def test_a_missing_horovod_is_reported_with_the_cure(horovod_errors):
    said = horovod_errors["missing"]
    assert "No module named 'horovod" in said
    assert "bash launch/setup.sh" in said
    assert "--backend torch" in said


def test_a_host_without_an_address_is_refused_for_horovod(monkeypatch):
    require_horovod()
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    with pytest.raises(UserError, match=r"name 'no-such-host.invalid' has no address .*Horovod would crash: .*/etc/hosts"):
        connect("horovod", world=ALONE)


def test_a_host_that_horovodrun_counts_twice_is_refused_for_horovod(monkeypatch):
    require_horovod()
    for name, value in {"RANK": "1", "SIZE": "1"}.items():  # as horovodrun --hosts localhost:1,localhost:1
        monkeypatch.setenv(f"HOROVOD_CROSS_{name}", value)
    with pytest.raises(UserError, match=r"HOROVOD_CROSS_SIZE=1, .*Horovod would crash: .*a host twice; .*\(host:2\)"):
        connect("horovod", world=World(0, 2, launcher="horovodrun --gloo"))


def test_variables_of_an_mpirun_that_has_ended_are_refused_before_mpi_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    world = World(0, 2, launcher="mpirun", evidence=(("OMPI_COMM_WORLD_RANK", "0"),))
    name = "PMIX_SERVER_URI21"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv(name, f"77.0;tcp4://127.0.0.1:{port}")
        with pytest.raises(UserError, match="without mpi4py"):
            connect("torch", world=world)
    said = rf"rank 0 of 2 \(OMPI_COMM_WORLD_RANK=0\), but mpirun has ended: nothing listens at .*:{port} \({name}\)"
    for backend in ("torch", "horovod") if installed() else ("torch",):
        with pytest.raises(UserError, match=said):
            connect(backend, world=world)


@pytest.mark.parametrize(("launcher", "variable"), [("mpirun", "OMPI_COMM_WORLD_RANK"), ("mpiexec", "PMI_RANK")])
def test_a_rank_and_a_size_without_a_launcher_of_mpi_are_refused_before_mpi_starts(monkeypatch, launcher, variable):
    """Without the refusal, MPI would start a world of one process, or abort this process."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for name in list(os.environ):
        if name.startswith(("PMI", "OMPI_", "PRTE_")):
            monkeypatch.delenv(name)
    for name in (variable, "PMIX_MCA_gds", "OMPI_MCA_btl"):  # the last two are settings of the user
        monkeypatch.setenv(name, "0")
    world = World(0, 2, launcher=launcher, evidence=((variable, "0"),))
    said = rf"rank 0 of 2 \({variable}=0\), but {launcher} has not started it: .*; start the command with {launcher}"
    for backend in ("torch", "horovod") if installed() else ("torch",):
        with pytest.raises(UserError, match=said):
            connect(backend, world=world)
    refuse_left_over(replace(world, size=1), os.environ)
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess", "PMI_FD"):
        refuse_left_over(world, {**os.environ, name: "1"})


def test_a_missing_mpi4py_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setenv("PMIX_RANK", "0")
    with pytest.raises(UserError, match=r"mpirun started 3 ranks, and without mpi4py .*pip install mpi4py"):
        connect("torch", world=World(0, 3, 0, 3, launcher="mpirun"))


@pytest.mark.parametrize("name", ["torch", "horovod"])
def test_a_world_size_that_differs_from_the_launchers_world_size_is_refused(name, request):
    if name == "horovod":
        require_horovod()
        said = request.getfixturevalue("horovod_errors")["size"]
    else:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            said = refusal("torch", RANK_1_OF_SRUN)
        finally:
            torch.distributed.destroy_process_group()
    assert f"the {name} backend is rank 0 of 1, but srun started this process as rank 1 of 2" in said


class FakeBackend:
    """Fake of a backend that has just joined; ``exchange`` returns ``rows``, with this rank's numbers in place of None."""

    transport = "nccl"

    def __init__(self, rank, hosts, rows, device="cpu"):
        self.rank, self.hosts, self.rows, self.device = rank, tuple(hosts), rows, torch.device(device)
        self.world = World(rank, len(hosts)).placed(rank, hosts)

    def exchange(self, numbers):
        return [numbers if row is None else row for row in self.rows]


GPUS = [f"{number:08x}-0000-4000-8000-000000000000" for number in range(4)]


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that makes torch report only the GPUs ``GPUS[number]`` for the given numbers."""

    def see(*numbers):
        properties = [SimpleNamespace(uuid=GPUS[number]) for number in numbers]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(numbers))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    return see


@pytest.mark.parametrize(("hosts", "numbers"), [("aabb", [0, 1, 0, 1]), ("abab", [0, 0, 1, 1]), ("aaab", [0, 1, 0, 0])])
def test_the_ranks_of_a_host_are_distributed_over_its_gpus(hosts, numbers, gpus):
    gpus(0, 1)
    for rank, number in enumerate(numbers):
        rows = [[other, 0] for other in range(len(hosts))]
        rows[rank] = None
        backend = FakeBackend(rank, hosts, rows, "cuda")
        _take_device(backend)
        assert backend.device == torch.device("cuda", number)
        backend = FakeBackend(rank, hosts, rows, "cuda:1")
        _take_device(backend)
        assert backend.device == torch.device("cuda", 1)


def test_two_ranks_with_the_same_gpu_are_refused_for_nccl(gpus):
    gpus(3)  # each rank sees only one GPU, with index 0
    for hosts, refused in (("aa", True), ("ab", False)):
        backend = FakeBackend(0, hosts, [None, None], "cuda")
        if refused:
            with pytest.raises(UserError, match=r"ranks 0 and 1 of this host have the same GPU, cuda:0"):
                _take_device(backend)
        else:
            _take_device(backend)
    backend = FakeBackend(0, "aa", [None, [7, 7]], "cuda")  # rank 1 has a different GPU with the same index
    _take_device(backend)
    backend = FakeBackend(0, "aa", [None, None], "cuda")
    backend.transport = "gloo"
    _take_device(backend)


def test_ranks_with_different_versions_are_named():
    rows = [[1, *_as_numbers(version)] for version in ("0.1.0", "0.1.0", "0.2.0rc1", "0.3")]
    backend = FakeBackend(0, "aaaa", rows)
    with pytest.raises(UserError, match=r"rank 0 runs dualtrain 0.1.0, but dualtrain 0.2.0rc1, 0.3 runs on ranks 2, 3: in"):
        _locate(backend)


UNLIKE = {
    "device": (
        [[0, 0], [1, 0], [0, 0]],
        r"device \(cpu on ranks 0, 2 and cuda on rank 1\): let every rank see a GPU, or give --dev",
    ),
    "transport": (
        [[0, 0], [0, 2], [0, 1]],
        r"transport \(auto on rank 0, native on rank 1 and shm on rank 2\): give the same",
    ),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_ranks_with_different_devices_or_transports_are_named(what):
    rows, said = UNLIKE[what]
    backend = FakeBackend(0, "aaa", rows)
    with pytest.raises(UserError, match=f"the ranks do not have the same {said}"):
        _compare_choices(backend, "auto")
    backend = FakeBackend(1, "aaa", [[1, 2], None, None], "cuda")
    _compare_choices(backend, "native")


def unlike_transports(backend, port):
    world = replace(backend.world, rendezvous=("127.0.0.1", port))
    with pytest.raises(UserError, match="native on rank 0 and shm on rank 1"):
        connect("torch", world=world, transport=("native", "shm")[backend.rank])


def test_connect_names_the_different_transports_of_the_ranks(pool):
    pool.connect("torch", 2)
    pool.run(unlike_transports, free_port())


def longest_short_data(backend, port, cores):
    """Open a world on ``cores`` cores, and a group in it.

    For each of the two, return how many bytes of data at most are sent in the messages that compare calls.
    """
    world = replace(backend.world, rendezvous=("127.0.0.1", port))
    with (
        mock.patch("os.sched_getaffinity", return_value=set(range(cores))),
        connect("torch", world=world, transport="native") as new,
    ):
        return new._longest, new.group([0, 1])._longest


def test_longer_data_is_sent_with_the_comparison_of_calls_if_the_ranks_use_all_cores(pool):
    pool.connect("torch", 2)
    for cores, most in ((2, 1 << 20), (3, 1 << 19)):
        assert pool.run(longest_short_data, free_port(), cores) == [(most, most)] * 2


def test_the_cores_of_a_host_are_the_union_of_its_ranks_cores(monkeypatch):
    rows = []
    for cores in ({0, 1}, {1, 200}, {0, 1, 2, 3}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: cores)
        cores_of_host(lambda numbers: [rows.append(numbers) or numbers], [0], 0)
    assert cores_of_host(lambda numbers: rows, [0, 0, 1], 0) == 3


def test_closing_again_does_nothing_and_a_world_can_be_opened_anew():
    for name in ("local", "torch"):
        for _ in range(2):
            backend = connect(name, world=ALONE)
            assert backend.allreduce(torch.ones(2)).tolist() == [1, 1]
            backend.close()
            backend.close()


def test_a_call_after_close_is_refused():
    backend = connect("local", world=ALONE)
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.allreduce(torch.ones(2))
    with pytest.raises(BackendError, match="closed"):
        backend.allreduce_async(torch.ones(2))


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("transport", ["native", "shm"])
def test_a_backward_pass_after_close_is_refused(transport, started):
    with connect("torch", world=ALONE, transport=transport) as backend:
        model = torch.nn.Linear(2, 1)
        optimizer = dualtrain.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), backend=backend)
        if started:
            model(torch.ones(2)).sum().backward()
    with pytest.raises(BackendError, match=r"(^| cannot be done: )this backend is closed: make its last call"):
        model(torch.ones(2)).sum().backward()
    optimizer.close()


def test_a_with_statement_closes_the_backend_and_propagates_exceptions():
    with connect("torch", world=ALONE) as backend:
        pass
    with pytest.raises(BackendError, match="closed"):
        backend.barrier()
    with pytest.raises(KeyError), connect("torch", world=ALONE):
        raise KeyError("mine")


def test_waits_for_gpu_operations_have_no_timeout():
    """NCCL may abort its communicator when a wait times out."""
    backend, waits = TorchBackend.__new__(TorchBackend), []
    operation = SimpleNamespace(wait=lambda *timeouts: waits.append(timeouts))
    work = _TorchWork(backend, operation, "sum of 'x'", SimpleNamespace(is_cuda=True))
    work.wait()
    work.wait()
    assert waits == [(), ()]


def waits_shortly(backend):
    if backend.rank == 1:
        backend.exchange([1])
    work = backend.start_allreduce(torch.ones(3), ReduceOp.SUM, "t")
    if backend.rank == 0:
        assert not work._wait_for(SLICE_SECONDS)
        backend.exchange([1])
    work.wait()


def test_a_short_wait_for_gloo_returns_false_while_another_rank_is_late(pool):
    pool.connect("torch", 2)
    pool.run(waits_shortly)


def test_short_waits_for_horovod_call_sched_yield_only_at_first():
    work = _HorovodWork(SimpleNamespace(library=SimpleNamespace(poll=lambda handle: False)), 0, "sum of 'x'", None, [])
    end = time.monotonic() + 0.02
    while time.monotonic() < end:
        assert not work._poll(SLICE_SECONDS)
    with mock.patch("os.sched_yield") as yields:
        assert not work._poll(SLICE_SECONDS)
    yields.assert_not_called()


def test_a_horovod_operation_is_done_after_its_wait_has_failed():
    handles = {0}

    def poll(handle):
        if handle not in handles:
            raise ValueError("the handle was not created or has been cleared")
        return True

    def synchronize(handle):
        handles.remove(handle)
        raise RuntimeError("Horovod has been shut down")

    backend = SimpleNamespace(library=SimpleNamespace(poll=poll, synchronize=synchronize), failed_works=[])
    work = _HorovodWork(backend, 0, "sum of 'x'", None, [])
    assert work.done()
    with pytest.raises(RuntimeError, match="shut down"):
        work._poll(SLICE_SECONDS)
    assert work.done()


def test_a_backend_may_be_closed_after_the_exit_handler_has_ended_its_groups():
    program = "import atexit; atexit.register(lambda: b.close()); import dualtrain; b = dualtrain.connect('torch')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""


FORKS = """
import ctypes, os, signal
import torch
from dualtrain import connect
from dualtrain.launchers import World

def world():
    return connect("torch", world=World(), transport="native")

def allreduce(backend):
    assert backend.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]

def again():
    allreduce(world())

backend = world()
statuses = []
for what in (lambda: None, backend.close, again):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # a child that hangs is killed
        what()
        ctypes.pythonapi.Py_Exit(3)  # as at the end of a program
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
allreduce(backend)
print(*statuses)
"""


def test_a_forked_child_does_not_end_the_groups_of_its_parent(tmp_path):
    """Fork three children. The first makes no call, the second closes the backend, the third connects again."""
    # In a new interpreter: at the exit of a process of tests/forked.py, modules that the tests have preloaded print errors.
    # Python 3.12 and newer warn if a process with threads forks.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKS]
    end = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (end.returncode, end.stdout, end.stderr) == (0, "3 3 3\n", "")


def calls_of_children(backend):
    """Make calls, and run backward and a step, in children of each rank: all fail, and change no result of the ranks."""
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = dualtrain.DistributedOptimizer(torch.optim.SGD([p], 0.0), backend=backend)
    p.sum().backward()  # makes the bucket
    optimizer.zero_grad()

    def child():
        calls = backend.barrier, lambda: backend.allreduce_async(torch.ones(2)), backend.channel, (p * 100).sum().backward
        for call in calls:
            with pytest.raises(BackendError, match=f"this process was forked from rank {backend.rank}, and cannot use"):
                call()

    def step_in_child():
        optimizer.zero_grad()
        with pytest.raises(BackendError, match="this process was forked"):
            optimizer.step()  # would send zeros

    assert in_child(child) == 0
    ((backend.rank + 1) * p.sum()).backward()
    assert p.grad.tolist() == [1.5] * 3
    assert in_child(step_in_child) == 0
    assert p.grad.tolist() == [1.5] * 3
    assert backend.allreduce(torch.ones(2), "sum").tolist() == [2.0] * 2
    optimizer.close()


@pytest.mark.parametrize("name", ["torch", "shm"])
def test_a_forked_child_cannot_use_the_backend_of_its_parent(pool, name):
    """Otherwise the other ranks would use the child's data in place of its parent's."""
    pool.connect(name, 2)
    pool.run(calls_of_children)


def call_of_a_child_with_a_call_in_progress(backend):
    """Make a call and close the backend in a child of rank 0, while an asynchronous call of rank 0 waits for rank 1."""
    channel = backend.channel()

    def child():
        with pytest.raises(BackendError, match="this process was forked from rank 0"):
            functional.allreduce(torch.ones(2, requires_grad=True), backend)
        backend.close()

    if backend.rank == 0:
        work = backend.allreduce_async(torch.ones(2), "sum")
        assert in_child(child) == 0
    channel.barrier()
    if backend.rank == 1:
        work = backend.allreduce_async(torch.ones(2), "sum")
    assert work.wait().tolist() == [2.0] * 2


@pytest.mark.parametrize("name", ["torch", "shm"])
def test_a_forked_child_does_not_wait_for_calls_of_its_parent(pool, name):
    pool.connect(name, 2)
    pool.run(call_of_a_child_with_a_call_in_progress)


def test_the_default_process_group_is_made_only_on_request():
    with connect("torch", world=ALONE):
        assert not torch.distributed.is_initialized()
        with connect("torch", world=ALONE, default_group=True):
            torch.distributed.all_reduce(torch.ones(1))
            hook, opened = sys.excepthook, len(os.listdir("/proc/self/fd"))
            for _ in range(3):
                with pytest.raises(UserError, match="a default process group already"):
                    connect("torch", world=ALONE, default_group=True)
            assert sys.excepthook is hook
            assert len(os.listdir("/proc/self/fd")) < opened + 8  # an open world has 8 descriptors
        assert not torch.distributed.is_initialized()
    with pytest.raises(UserError, match="default_group=True needs the torch backend, and this is local"):
        connect("local", default_group=True)


def test_closing_destroys_only_the_default_group_that_the_backend_made():
    dist = torch.distributed
    with connect("torch", world=ALONE, default_group=True):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_a_default_group_that_cannot_be_made_is_an_error_of_one_line(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("Connection reset\nat frame 1")

    monkeypatch.setattr(torch.distributed, "init_process_group", fail)
    with connect("torch", world=ALONE) as backend, pytest.raises(UserError) as caught:
        backend.make_default_group()
    assert str(caught.value) == "torch.distributed's default process group could not be made: Connection reset"


def free_of_the_default_group(backend, port):
    """Open a world, make a default group that has no backend for CPU tensors, and open two more worlds."""
    dist = torch.distributed
    options = {"rank": backend.rank, "world_size": backend.size, "init_method": f"tcp://127.0.0.1:{port}"}
    world = replace(backend.world, rendezvous=("127.0.0.1", port))
    backend.barrier()
    assert not dist.is_initialized()
    with connect("torch", world=world) as first:
        # The port of a rendezvous is free again once all ranks have joined.
        dist.init_process_group("cuda:gloo", **options)
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.ones(1))
        # Now the store of the program's default group listens at this port.
        with connect("torch", world=world) as second:
            for each in (first, second, second.group(range(backend.size))):
                total = each.allreduce(torch.tensor([float(each.rank + 1)]), "sum")
                assert total.tolist() == [sum(range(1, backend.size + 1))]
            assert second.transport == "shm"
        assert dist.is_initialized()
        with pytest.raises(UserError, match=f"rank {backend.rank} of {backend.size} in torch.distributed's default"):
            connect("auto", world=World(launcher="none"))
        with connect("auto", world=World(backend.rank, backend.size)) as third:  # as the error suggests
            assert third.allgather_object(third.rank) == [*range(backend.size)]
        dist.destroy_process_group()
        assert first.allgather_object("still here") == ["still here"] * backend.size
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_program_may_make_its_default_process_group_before_or_after_connect(pool):
    pool.connect("torch", 2)
    pool.run(free_of_the_default_group, free_port())


def test_an_interface_that_the_host_lacks_is_refused(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    with pytest.raises(UserError, match=r"GLOO_SOCKET_IFNAME='nope0' is not an interface of .*: choose one of .*lo"):
        gloo_interface(World())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert gloo_interface(World()) is None


def closed_group_leaves_nothing(backend):
    """Check that a closed group leaves no thread and no socket behind."""

    def held():
        files = [
            os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")
        ]
        return len(os.listdir("/proc/self/task")), sum("socket" in file for file in files)

    group = backend.group(range(backend.size))
    group.barrier()
    group.close()
    backend.barrier()
    before = held()
    group = backend.group(range(backend.size))
    group.barrier()
    assert held()[0] > before[0]
    backend.barrier()
    group.close()
    backend.barrier()
    deadline = time.monotonic() + 20
    # The counts may be lower than `before`: threads of the first group may have been ending when `before` was read.
    while any(now > then for now, then in zip(held(), before, strict=True)):
        assert time.monotonic() < deadline, (held(), before)
        time.sleep(0.01)


def test_a_closed_group_leaves_no_thread_and_no_socket(pool):
    pool.connect("torch", 2)
    pool.run(closed_group_leaves_nothing)


def calls_of_a_world_of_one(backend):
    group = backend.group([0])
    assert (group.size, backend.size, backend.local_size) == (1, 1, 1)
    for each in (group, backend):
        assert each.allreduce(torch.tensor([3]), "average").tolist() == [3]
        assert each.allgather(torch.ones(2, 2)).shape == (2, 2)
        assert each.alltoall(torch.ones(2), [1])[1].tolist() == [1]
        assert each.reducescatter(torch.ones(3)).tolist() == [1, 1, 1]
        assert each.broadcast_object({"a": 1}) == {"a": 1}


@pytest.mark.parametrize("name", ["torch", "horovod"])
def test_a_world_of_one_rank_supports_groups_and_collective_calls(name, pool):
    if name == "horovod":
        require_horovod()
    pool.connect(name, 1)
    pool.run(calls_of_a_world_of_one)


def launcher_and_transport(backend):
    return backend.world.evidence, backend.world.launcher, backend.transport, backend.device.type


def test_a_world_has_the_given_launcher_and_uses_gloo_on_the_cpu(real):
    assert real(launcher_and_transport) == [((), "environment", "gloo", "cpu")] * real.size


def test_a_rank_0_that_ends_while_the_ranks_connect_is_reported(monkeypatch):
    def ended(*arguments):
        raise torch.distributed.DistStoreError("no process has set 'x' within 1 s")

    before = list(torch_backend._IN_USE)
    monkeypatch.setattr("dualtrain.backends.torch.open_control_channel", ended)
    with pytest.raises(UserError, match="the 1 processes could not connect to each other: no process has set 'x'"):
        connect("torch", world=ALONE)
    assert before == torch_backend._IN_USE


def test_a_failure_after_the_ranks_have_connected_ends_the_groups(monkeypatch):
    def fail(*arguments):
        raise BackendError("a rank has closed its connection")

    before = list(torch_backend._IN_USE)
    monkeypatch.setattr(torch_backend, "cores_of_host", fail)
    with pytest.raises(BackendError, match="has closed its connection"):
        connect("torch", world=ALONE)
    assert before == torch_backend._IN_USE


@pytest.mark.parametrize("peer_failed", [False, True])
def test_the_exit_waits_for_groups_that_end_slowly_unless_a_peer_has_failed(peer_failed, monkeypatch):
    """Without this wait, the thread that ends a group aborts the process, because the interpreter has ended."""
    may_end, ended = threading.Event(), threading.Event()

    class Group:
        def __del__(self):
            may_end.wait(30)
            ended.set()

    for name, empty in (("_IN_USE", []), ("_BACKENDS", set()), ("_ENDING", [])):
        monkeypatch.setattr(torch_backend, name, empty)
    torch_backend._end([Group()], peer_failed=peer_failed)
    if not peer_failed:
        threading.Timer(0.3, may_end.set).start()
    torch_backend._end_all()
    assert ended.is_set() is not peer_failed
    may_end.set()
    assert ended.wait(30)
