"""``dualtrain.ray`` on a local Ray cluster."""

from __future__ import annotations

import json

import pytest

from dualtrain import UserError

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray")]

HEAD = """
import json, os, pathlib, signal, threading, time
import ray
from ray.util import placement_group_table
from tests.integrations import functions
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=os.environ["RAY_FOLDER"])
def show(value):
    print(">", json.dumps(value), flush=True)
def failure(call):
    try:
        call()
    except Exception as error:
        show([isinstance(error, ValueError), type(error).__name__, str(error)])
"""


def test_ray_actors_keep_their_object_between_calls_and_run_unmodified_functions(program):
    lines = program(
        HEAD
        + """
from dualtrain.ray import RayExecutor
class Model:
    def __init__(self, x, y=0):
        self.x = x + y
executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=2)
executor.start(Model, [3], {"y": 4}, extra_env_vars={"MINE": 5, "HOROVOD_RANK": "7"})
show(executor.run(functions.train, [3], {"lr": 0.2}))
show(ray.get(executor.run_remote(functions.train, [3], {"lr": 0.2})))
def add(model):
    import os
    model.x += int(os.environ["RANK"])
    return model.x, os.environ["MINE"], os.environ["HOROVOD_RANK"], functions.launcher()
show([executor.execute(add), executor.execute(add), executor.execute_single(lambda model: model.x)])
failure(lambda: executor.start())
executor.shutdown()
executor.shutdown()
failure(lambda: executor.run(functions.launcher))
executor.start()
show(executor.run(functions.launcher))
executor.shutdown()
"""
    )
    first, second, kept, twice, over, again = map(json.loads, lines)
    assert [rank["place"] for rank in first] == [[0, 2, 0, 2], [1, 2, 1, 2]]
    assert {rank["library"] for rank in first} == {"dualtrain"}
    assert first[0]["weights"] == first[1]["weights"]
    assert second == first
    assert kept == [[[7, "5", "0", "ray"], [8, "5", "1", "ray"]], [[7, "5", "0", "ray"], [9, "5", "1", "ray"]], 7]
    assert (twice[1], over[1]) == ("UserError", "UserError")
    assert "start() was called twice" in twice[2]
    assert "call start() first" in over[2]
    assert again == ["ray", "ray"]


def test_a_failed_ray_call_names_the_rank_and_frees_the_reserved_resources(program):
    lines = program(
        HEAD
        + """
from dualtrain.ray import RayExecutor
settings = RayExecutor.create_settings(timeout_s=120, placement_group_timeout_s=2)
with_two = RayExecutor(settings, num_workers=2)
with_two.start()
failure(lambda: with_two.run(functions.fails))
failure(lambda: with_two.run(functions.launcher))
with_two.start()
failure(lambda: with_two.run(functions.dies))
with_two.start()
file = pathlib.Path("rank-0").resolve()
failure(lambda: with_two.run(functions.fails_while_rank_0_sleeps, [str(file)]))
folder = pathlib.Path("/proc", file.read_text())
deadline = time.monotonic() + 60
while folder.exists() and time.monotonic() < deadline:
    time.sleep(0.05)
show(folder.exists())
failure(lambda: RayExecutor(settings, num_workers=3).start())
failure(lambda: RayExecutor(settings, num_hosts=2, num_workers_per_host=1).start())
one_host = RayExecutor(settings, num_hosts=1, num_workers_per_host=2)
one_host.start()
show(one_host.run(functions.launcher))
def interrupted(call):  # by Ctrl-C after 3 s
    began = time.monotonic()
    threading.Timer(3, os.kill, [os.getpid(), signal.SIGINT]).start()
    try:
        call()
    except KeyboardInterrupt:
        show("interrupted" if time.monotonic() - began < 60 else "too late")
interrupted(lambda: one_host.run(time.sleep, [100]))
failure(lambda: one_host.run(functions.launcher))
patient = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=100), num_workers=3)
interrupted(patient.start)
show([group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED"])
one_host.start()
ray.shutdown()
failure(lambda: one_host.run(functions.launcher))
one_host.shutdown()
show(ray.is_initialized())
failure(one_host.start)
"""
    )
    raised, ended, died, raised_alone, rank_0_runs, crowded, spread, packed, *rest = map(json.loads, lines)
    interrupted_run, no_workers, interrupted_start, groups, gone, restarted, stopped = rest
    assert raised[0]  # the error is also a ValueError
    assert "ValueError: no such thing" in raised[2]
    assert "rank 1 of 2" in raised[2]
    assert ended[1:] == ["UserError", "RayExecutor has no workers, because run() has failed: call start() first"]
    assert "rank-1-of-2" in died[2]
    assert (raised_alone[0], rank_0_runs) == (True, False)  # after rank 1's failure, rank 0's process was ended too
    assert crowded[1:] == ["UserError", crowded[2]]
    assert "could not reserve 3 times {'CPU': 1} within 2 s" in crowded[2]
    assert "could not reserve 2 times {'CPU': 1} within 2 s" in spread[2]
    assert packed == ["ray", "ray"]
    assert (interrupted_run, interrupted_start, groups) == ("interrupted", "interrupted", [])
    assert "RayExecutor has no workers, because run() has failed" in no_workers[2]
    assert restarted is False  # shutdown() after ray.shutdown() starts no new Ray
    assert all("Ray is not initialized: call ray.init()" in error[2] for error in (gone, stopped))


def test_the_rank_of_a_ray_actor_replaces_the_rank_that_it_inherits(monkeypatch):
    from dualtrain.ray import actors

    inherited = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "KEPT": "k"}
    monkeypatch.setattr(actors.os, "environ", inherited)
    monkeypatch.setattr(actors, "prepare", lambda: None)
    actors.Worker(1, 2).set_variables({"RANK": "1"})
    assert inherited == {"RANK": "1", "KEPT": "k"}


@pytest.mark.usefixtures("import_hook")
def test_horovods_ray_modules_provide_dualtrains_rayexecutor():
    from horovod.ray import RayExecutor
    from horovod.ray.runner import RayExecutor as Same

    import dualtrain.ray

    assert RayExecutor is Same is dualtrain.ray.RayExecutor


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "num_workers=None and num_hosts=None: give one"),
        ({"num_workers": 2, "num_hosts": 1}, "give one of them"),
        ({"num_workers": 0}, "cannot have 0 ranks"),
        ({"num_hosts": -2, "num_workers_per_host": -2}, "cannot have -2 hosts"),
        ({"num_hosts": 1, "num_workers_per_host": 0.5}, "cannot have 0.5 ranks per host"),
        ({"num_workers": 2, "min_workers": 1}, r"RayExecutor\(min_workers=1\) is elastic"),
        ({"num_workers": 2, "gpus_per_worker": 2}, "without use_gpu=True"),
        ({"num_workers": 2, "cpus_per_worker": -1}, r"cpus_per_worker=-1\) is not a finite number from 0"),
        ({"num_workers": 2, "cpus_per_worker": "2"}, "is not a finite number from 0"),
        ({"num_workers": 2, "cpus_per_worker": 0}, "reserves nothing"),
        ({"num_workers": 2, "use_gpu": True, "gpus_per_worker": -1}, r"gpus_per_worker=-1\) is not"),
    ],
)
def test_ray_executor_refuses_bad_arguments(arguments, said):
    from dualtrain.ray import RayExecutor

    with pytest.raises(UserError, match=said):
        RayExecutor(None, **arguments)


def test_gpus_of_a_host_are_reserved_in_one_bundle_and_visible_to_all_of_its_ranks():
    from dualtrain.ray.executor import visible_gpus
    from dualtrain.ray.settings import placement

    places = [(7, ["2"]), (7, ["0"]), (8, ["0"])]
    assert [visible_gpus(rank, places).get("CUDA_VISIBLE_DEVICES") for rank in range(3)] == ["2,0", "2,0", "0"]
    assert visible_gpus(1, [(7, ["0"]), (7, ["0"])]) == {"CUDA_VISIBLE_DEVICES": "0"}
    assert visible_gpus(0, [(7, [])]) == {}
    wanted = placement(None, 2, 3, 2, True, None, True)
    assert wanted.bundles == [{"CPU": 6, "GPU": 3}] * 2
    assert [wanted.bundle_of(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
