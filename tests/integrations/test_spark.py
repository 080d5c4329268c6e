"""``dualtrain.spark`` and TorchDistributor, on Spark in local mode."""

from __future__ import annotations

import inspect
import json
import sys

import pytest

pytestmark = [pytest.mark.usefixtures("java"), pytest.mark.xdist_group("spark")]

HEAD = """
import json, time
from pyspark.sql import SparkSession
import dualtrain.horovodize
from tests.integrations import functions
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
def show(value):
    print(">", json.dumps(value), flush=True)
def failure(call):
    try:
        call()
    except Exception as error:
        lines = str(error).splitlines()
        show([type(error).__name__, lines[0], "in fails" in str(error), "at org.apache" in str(error)])
"""


def test_ranks_in_barrier_tasks_and_on_the_driver_have_the_same_results(program):
    lines = program(
        HEAD
        + """
from dualtrain.spark import HorovodRunner, run
show(run(functions.train, (3,), {"lr": 0.2}, num_proc=2))
show(HorovodRunner(np=2).run(functions.train, steps=3, lr=0.2))
show(HorovodRunner(np=-2).run(functions.train, steps=3, lr=0.2))
scale = 10
def by_value(x):  # defined in __main__
    import os
    return scale * x + int(os.environ["HOROVOD_RANK"]), os.environ["MINE"], functions.launcher()
show(run(by_value, (4,), num_proc=2, env={"MINE": "m", "HOROVOD_RANK": "7"}))
"""
    )
    ranks, in_tasks, on_driver, by_value = map(json.loads, lines)
    assert [rank["place"] for rank in ranks] == [[0, 2, 0, 2], [1, 2, 1, 2]]
    assert {rank["library"] for rank in ranks} == {"dualtrain"}
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert in_tasks == on_driver == ranks[0]
    assert by_value == [[40, "m", "spark"], [41, "m", "spark"]]


def test_errors_name_the_failed_rank_and_later_spark_jobs_still_run(program):
    lines = program(
        HEAD
        + """
from dualtrain.spark import run
failure(lambda: run(functions.fails, num_proc=2))
failure(lambda: run(functions.dies, num_proc=2))
failure(lambda: run(functions.launcher, num_proc=3, start_timeout=3))
failure(lambda: run(functions.launcher, num_proc=0))
show(run(functions.launcher, num_proc=2))
spark.stop()
failure(lambda: run(functions.launcher, num_proc=2))
"""
    )
    raised, died, crowded, none, later, stopped = map(json.loads, lines)
    assert raised == ["RankFailedError", "rank 1 of 2 failed: ValueError: no such thing", True, False]
    assert died == ["RankFailedError", "rank 1 of 2 was ended by SIGKILL before its function returned", False, False]
    assert crowded[0] == "UserError"
    assert crowded[1].startswith("Spark started 0 of 3 tasks within 3 s")
    assert none[:2] == ["UserError", "num_proc=0 is not a number of ranks: give a whole number from 1"]
    assert later == ["spark", "spark"]
    assert stopped[1].startswith("there is no SparkContext")


def test_torch_distributor_runs_an_unmodified_function_with_the_hook(program):
    lines = program(
        HEAD
        + """
from pyspark.ml.torch.distributor import TorchDistributor
def main(steps):
    import dualtrain.horovodize; dualtrain.horovodize.install()
    return functions.train(steps), functions.launcher()
for local in (True, False):
    show(TorchDistributor(num_processes=2, local_mode=local, use_gpu=False).run(main, 3))
"""
    )
    for result, launcher in map(json.loads, lines):
        rank = result["place"][0]  # TorchDistributor returns the result of whichever rank wrote its file last
        assert rank in (0, 1)
        assert (result["place"], result["library"], launcher) == ([rank, 2, rank, 2], "dualtrain", "torchrun")
    assert len(lines) == 2


@pytest.mark.usefixtures("import_hook")
def test_horovod_spark_is_dualtrain_spark():
    import horovod.spark
    from horovod.spark import run

    import dualtrain.spark

    assert horovod.spark is dualtrain.spark
    assert run is dualtrain.spark.run
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'horovod\.spark\.torch': dualtrain covers"):
        import horovod.spark.torch


def test_spark_run_has_the_parameters_of_horovods_run():
    names = [
        *("fn", "args", "kwargs", "num_proc", "start_timeout", "use_mpi", "use_gloo", "extra_mpi_args", "env", "stdout"),
        *("stderr", "verbose", "nics", "prefix_output_with_timestamp", "executable"),
    ]
    import dualtrain.spark

    assert list(inspect.signature(dualtrain.spark.run).parameters) == names


def test_unsupported_arguments_are_refused():
    from dualtrain import UserError
    from dualtrain.spark import HorovodRunner, run

    with pytest.raises(UserError, match="stdout and stderr cannot be redirected"):
        run(print, stdout=sys.stdout)
    with pytest.raises(UserError, match="cannot be called"):
        run("train.py")
    for np in (0, True, "2"):
        with pytest.raises(UserError, match=r"HorovodRunner\(np="):
            HorovodRunner(np)
    with pytest.raises(UserError, match="driver_log_verbosity='x' is unknown"):
        HorovodRunner(2, driver_log_verbosity="x")
