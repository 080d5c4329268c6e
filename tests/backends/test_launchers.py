"""Detection of each launcher from its variables, and the errors for variables that make no sense."""

from __future__ import annotations

import json

import numpy
import pytest

from dualtrain import UserError
from dualtrain.launchers import World, detect_world, new_job, spawned, without_launchers

# Two hosts have four processes each; this process is the second one on the second host.
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
HOROVODRUN = {
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4000",
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "4",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPIEXEC = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
ENVIRONMENT = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
SPAWN = {**ENVIRONMENT, "DUALTRAIN_SPAWNED": "1"}
SPARK = {**ENVIRONMENT, "DUALTRAIN_SPAWNED": "spark"}
RAY = {**ENVIRONMENT, "DUALTRAIN_SPAWNED": "ray"}
RAY_TRAIN = {**ENVIRONMENT, "RAY_RAYLET_PID": "7", "NODE_RANK": "1"}

LAUNCHERS = {
    "torchrun": TORCHRUN,
    "horovodrun --gloo": HOROVODRUN,
    "mpirun": MPIRUN,
    "mpiexec": MPIEXEC,
    "spark": SPARK,
    "ray": RAY,
    "spawn": SPAWN,
    "srun": SRUN,
    "environment": ENVIRONMENT,
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_rank_and_size_are_read_from_the_variables_of_every_launcher(launcher):
    env = LAUNCHERS[launcher]
    world = detect_world(env)
    assert world.launcher == launcher
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 8, 1, 4)
    assert (world.cross_rank, world.cross_size) == (1, 2)
    assert world.rendezvous == (("node1", 29500) if "MASTER_PORT" in env else None)
    assert dict(world.evidence).items() <= env.items()
    assert not world.single_host


def test_without_a_launcher_the_world_has_one_process():
    assert detect_world({}) == detect_world({"MASTER_ADDR": "leftover", "SLURM_JOB_ID": "7"}) == World()
    assert (World().rank, World().size, World().launcher, World().rendezvous) == (0, 1, "none", None)
    assert World().single_host


def test_detect_world_reads_the_process_environment_by_default(monkeypatch):
    for name, value in MPIRUN.items():
        monkeypatch.setenv(name, value)
    assert detect_world().rank == 5


@pytest.mark.parametrize("outer", [SRUN, MPIRUN])
@pytest.mark.parametrize("inner", ["torchrun", "horovodrun --gloo"])
def test_the_innermost_launcher_is_detected(inner, outer):
    assert detect_world({**outer, **LAUNCHERS[inner]}).launcher == inner


def test_mpirun_inside_a_slurm_allocation_is_mpirun():
    assert detect_world({**SRUN, **MPIRUN}).launcher == "mpirun"


@pytest.mark.parametrize("inner", ["torchrun", "horovodrun --gloo", "mpirun", "mpiexec"])
def test_a_launcher_that_a_spawned_rank_has_started_is_detected(inner):
    assert detect_world({**SPAWN, **LAUNCHERS[inner]}).launcher == inner


@pytest.mark.parametrize("step", ["0", "batch"])
def test_a_spawned_rank_is_recognised_inside_a_slurm_step_and_a_batch_script(step):
    assert detect_world({**SRUN, "SLURM_STEP_ID": step, **SPAWN}).launcher == "spawn"


def test_a_spawned_rank_reads_its_world_from_variables_of_its_parent():
    world = detect_world(spawned(1, 3, ("127.0.0.1", 4000), "s", "j"))
    assert (world.rank, world.size, world.local_rank, world.local_size) == (1, 3, 1, 3)
    assert (world.launcher, world.rendezvous, world.single_host) == ("spawn", ("127.0.0.1", 4000), True)
    assert (world.job, world.job_key) == ("j", "")


def test_a_rank_of_spark_or_ray_reads_its_world_from_the_engines_variables():
    spark = detect_world(spawned(3, 4, ("node1", 4000), "s", "j", (1, 2), "spark"))
    ray = detect_world(spawned(3, 4, ("node1", 4000), "s", "j", (1, 2), "ray"))
    for world, launcher in ((spark, "spark"), (ray, "ray")):
        assert (world.launcher, world.rank, world.size, world.local_rank, world.local_size) == (launcher, 3, 4, 1, 2)
        assert (world.rendezvous, world.secret, world.job, world.single_host) == (("node1", 4000), "s", "j", False)
    # `served` is True if a parent process of a rank serves the store that all worlds of the job share. With Spark, that
    # process is the task that started rank 0.
    assert [world.served for world in (spark, detect_world(SPAWN))] == [True, True]
    assert [world.served for world in (ray, detect_world(TORCHRUN))] == [False, False]


def test_a_ray_train_worker_is_recognised_unless_it_starts_another_launcher():
    assert detect_world(RAY_TRAIN).launcher == detect_world({**SRUN, **RAY_TRAIN}).launcher == "ray"
    assert detect_world({**RAY_TRAIN, **SPAWN}).launcher == "spawn"
    assert detect_world({**RAY_TRAIN, **TORCHRUN}).launcher == "torchrun"
    assert detect_world({"RAY_RAYLET_PID": "7"}) == World()
    assert detect_world({"RAY_RAYLET_PID": "7", "RANK": "0", "WORLD_SIZE": "2"}).launcher == "environment"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_without_launchers_removes_the_variables_of_every_launcher(launcher):
    env = {**LAUNCHERS[launcher], "TORCHELASTIC_RESTART_COUNT": "1", "DUALTRAIN_SECRET": "x", "PATH": "/bin"}
    assert detect_world(without_launchers(env)) == World()
    assert without_launchers(env)["PATH"] == "/bin"


def test_a_slurm_batch_script_is_not_a_launched_rank():
    assert detect_world({**SRUN, "SLURM_STEP_ID": "batch"}) == World()
    assert detect_world({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}) == World()


@pytest.mark.parametrize("step", ["4294967290", "4294967291"])
def test_a_reserved_slurm_step_is_not_a_launched_rank(step):
    # Slurm's step numbers of salloc's shell on a node, and of a batch script. Neither is a task of the job.
    shell = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_ID": step}
    assert detect_world(shell) == World()


def test_local_rank_and_size_are_optional_without_a_known_launcher_and_with_mpiexec():
    world = detect_world({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"})
    assert (world.local_rank, world.local_size) == (0, 2)
    assert detect_world({"PMI_RANK": "1", "PMI_SIZE": "2"}).local_size == 2


NEEDED = {
    "torchrun": ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"],
    "horovodrun --gloo": [
        "HOROVOD_GLOO_RENDEZVOUS_PORT",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
    ],
    "mpirun": ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"],
    "mpiexec": ["PMI_RANK", "PMI_SIZE"],
    "spark": ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"],
    "ray": ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"],
    "spawn": ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"],
    "srun": ["SLURM_NTASKS"],
    "environment": ["RANK", "WORLD_SIZE", "MASTER_PORT"],
}


@pytest.mark.parametrize(("launcher", "name"), [(launcher, name) for launcher in NEEDED for name in NEEDED[launcher]])
def test_the_error_names_a_missing_variable(launcher, name):
    env = {key: value for key, value in LAUNCHERS[launcher].items() if key != name}
    with pytest.raises(UserError, match=f"{name} is not set, but .* would train alone") as caught:
        detect_world(env)
    assert any(f" {other}" in str(caught.value) for other in env)


def test_pmi_variables_inside_a_slurm_step_come_from_srun_if_they_equal_its_own_and_else_from_mpiexec():
    pmi = {"PMI_RANK": SRUN["SLURM_PROCID"], "PMI_SIZE": SRUN["SLURM_NTASKS"]}
    assert detect_world(SRUN | pmi).launcher == "srun"
    assert detect_world(SRUN | MPIEXEC | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}).launcher == "mpiexec"


NUMBERS = [
    (launcher, name)
    for launcher, env in LAUNCHERS.items()
    for name, value in env.items()
    if value.isdigit() and name not in ("SLURM_STEP_ID", "DUALTRAIN_SPAWNED")
]


@pytest.mark.parametrize(("launcher", "name"), NUMBERS)
def test_the_error_names_a_variable_that_is_not_a_number(launcher, name):
    with pytest.raises(UserError, match=f"{name}='x' is not a whole number"):
        detect_world({**LAUNCHERS[launcher], name: "x"})


@pytest.mark.parametrize("tasks", ["x", "x(x2)", "x,3"])
def test_the_error_names_an_invalid_tasks_per_node_variable(tasks):
    with pytest.raises(UserError, match="SLURM_STEP_TASKS_PER_NODE='x"):
        detect_world({**SRUN, "SLURM_STEP_TASKS_PER_NODE": tasks})


@pytest.mark.parametrize("tasks", ["4", "4(x2)", "4,3", "4(x2),3", "4,2(x3)"])
def test_tasks_per_node_may_be_uneven(tasks):
    assert detect_world({**SRUN, "SLURM_STEP_TASKS_PER_NODE": tasks}).local_size == 4


@pytest.mark.parametrize(
    ("nodes", "tasks", "host"),
    [
        ("gpu[01-03,07],login", "2(x4)", "gpu01"),
        ("rack1n[3,5],a", "4,4", "rack1n3"),
        ("a,b", "4(x2)", "a"),
        ("a", "8", "127.0.0.1"),
        (None, "8", "127.0.0.1"),
    ],
)
def test_the_rendezvous_of_srun_is_on_the_first_host(nodes, tasks, host):
    env = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_JOB_ID": "123456"}
    env |= {"SLURM_STEP_NODELIST": nodes} if nodes else {}
    world = detect_world(env)
    assert world.rendezvous is not None
    assert world.rendezvous[0] == host
    assert 15000 <= world.rendezvous[1] < 30000
    other = detect_world({**env, "SLURM_STEP_ID": "1"})
    assert other.rendezvous is not None
    assert other.rendezvous[1] != world.rendezvous[1]


RANKS = {"torchrun": "RANK", "horovodrun --gloo": "HOROVOD_RANK", "mpirun": "OMPI_COMM_WORLD_RANK", "srun": "SLURM_PROCID"}


@pytest.mark.parametrize("launcher", RANKS)
@pytest.mark.parametrize("rank", ["8", "-1"])
def test_a_rank_outside_the_world_is_refused_and_the_error_names_the_variable(launcher, rank):
    with pytest.raises(UserError, match=f"{launcher} gave rank {rank} in a world of 8 .*{RANKS[launcher]}={rank}"):
        detect_world({**LAUNCHERS[launcher], RANKS[launcher]: rank})


def test_a_size_that_does_not_fit_into_a_signed_32_bit_integer_is_refused():
    with pytest.raises(
        UserError, match=r"gave rank 0 in a world of 2147483648 \(.*WORLD_SIZE=2147483648.*no job has so many"
    ):
        detect_world({"RANK": "0", "WORLD_SIZE": "2147483648", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})


@pytest.mark.parametrize("numbers", [("0", "2"), (None, 2), (0, 2.0)])
def test_a_world_made_by_the_program_needs_whole_numbers(numbers):
    with pytest.raises(UserError, match="are not two whole numbers: give World whole numbers"):
        World(*numbers)


def test_a_rank_outside_a_world_made_by_the_program_is_refused():
    with pytest.raises(UserError, match=r"^rank 2 in a world of 2 does not exist: ranks go from 0 .* give World the rank"):
        World(2, 2)


NO_ADDRESSES = [("a", "29500"), ("a", 0), ("a", 65536), ("a..b", 1), "a:29500", (None, 29500), ("a", 1, 2)]


@pytest.mark.parametrize("rendezvous", NO_ADDRESSES)
def test_a_rendezvous_that_is_not_an_address_is_refused(rendezvous):
    with pytest.raises(UserError, match="is not an address: give World the host of rank 0 as text, and a port from 1 to"):
        World(0, 2, rendezvous=rendezvous)


@pytest.mark.parametrize("rendezvous", [("a", "29500"), ("", 0), (None, None)])
def test_a_world_of_one_rank_needs_no_address(rendezvous):
    assert World(rendezvous=rendezvous).size == 1


def test_integers_of_numpy_in_a_world_become_ints():
    world = World(numpy.int64(1), numpy.int32(2), rendezvous=["a", numpy.int16(29500)])
    assert json.loads(json.dumps([world.rank, world.size, world.rendezvous])) == [1, 2, ["a", 29500]]
    assert hash(world) == hash(World(1, 2, rendezvous=("a", 29500)))


def test_a_slurm_step_id_that_is_not_a_number_is_not_a_step():
    assert detect_world({**SRUN, "SLURM_STEP_ID": "²"}).launcher == "none"


PLACEMENTS = {
    "filled in order": "aabb",
    "interleaved": "abab",
    "uneven": "aaabcc",
    "uneven, interleaved": "abacbaca",
    "one host": "aaaa",
    "one rank per host": "abc",
    "one rank": "a",
}


@pytest.mark.parametrize("hosts", PLACEMENTS.values(), ids=PLACEMENTS)
def test_local_and_cross_ranks_follow_from_the_hosts(hosts):
    size = len(hosts)
    worlds = [World(rank, size, launcher="mpirun").placed(rank, hosts) for rank in range(size)]
    for rank, world in enumerate(worlds):
        assert (world.rank, world.size, world.launcher) == (rank, size, "mpirun")
        # The ranks of a host have the local ranks 0, 1, 2 and so on, in rank order.
        neighbours = [other for other in worlds if hosts[other.rank] == hosts[rank]]
        assert [neighbour.local_rank for neighbour in neighbours] == list(range(len(neighbours)))
        assert world.local_size == len(neighbours)
        # Ranks with the same local rank are on different hosts, and have the cross ranks 0, 1, 2 and so on.
        peers = [other for other in worlds if other.local_rank == world.local_rank]
        assert sorted(peer.cross_rank for peer in peers) == list(range(len(peers)))
        assert world.cross_size == len(peers)
        assert world.single_host == (len(set(hosts)) == 1)
    # Every host has the local ranks below `shared`. Within a host, the ranks with these local ranks have equal cross ranks.
    shared = min(hosts.count(host) for host in hosts)
    for host in hosts:
        numbers = {world.cross_rank for world in worlds if hosts[world.rank] == host and world.local_rank < shared}
        assert len(numbers) == 1


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_variable_dualtrain_job_names_the_job_and_an_invalid_name_is_refused(launcher):
    assert detect_world(LAUNCHERS[launcher]).job == ""
    assert detect_world({**LAUNCHERS[launcher], "DUALTRAIN_JOB": "night-7.a"}).job == "night-7.a"
    assert detect_world({"DUALTRAIN_JOB": "night-7.a"}) == World(job="night-7.a")
    for bad in ("../up", ".", "a b", "a/b", "x" * 101, "-x"):
        with pytest.raises(UserError, match=r"DUALTRAIN_JOB=.* cannot name a job: give it up to 100 letters"):
            detect_world({**LAUNCHERS[launcher], "DUALTRAIN_JOB": bad})


def test_the_job_name_stays_the_same_after_restarts_and_requeues():
    assert new_job() != new_job()
    agents = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert detect_world(agents).job_key == "dualtrain/job/none"
    assert detect_world({**agents, "TORCHELASTIC_USE_AGENT_STORE": "False"}).job_key == ""
    batch = {**SRUN, "SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "c", "ENVIRONMENT": "BATCH"}
    first = detect_world(batch)
    assert (first.job, first.job_key) == ("slurm-c-7.0", "")
    assert detect_world({**batch, "SLURM_RESTART_COUNT": "1"}).job == first.job
    assert detect_world({**batch, "SLURM_STEP_ID": "1"}).job == "slurm-c-7.1"
    assert detect_world({**batch, "MASTER_ADDR": "h", "MASTER_PORT": "1"}).job == first.job
    # Only batch jobs get a name. A step of salloc is not requeued, and may be a shell that starts several runs.
    assert detect_world({name: value for name, value in batch.items() if name != "ENVIRONMENT"}).job == ""
