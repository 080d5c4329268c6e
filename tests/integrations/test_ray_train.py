"""Ray Train's ``TorchTrainer`` with a function that was written for Horovod."""

from __future__ import annotations

import json

import pytest

from tests.integrations.test_ray import HEAD

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray")]


def test_ray_train_runs_an_unmodified_function_with_the_hook(program):
    lines = program(
        HEAD
        + """
import pathlib
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
folder = pathlib.Path("results").resolve()
folder.mkdir()
def train(config):
    import dualtrain.horovodize; dualtrain.horovodize.install()
    found = functions.train(config["steps"])
    found["launcher"] = functions.launcher()
    (folder / str(found["place"][0])).write_text(json.dumps(found))
TorchTrainer(
    train, train_loop_config={"steps": 3}, scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=str(folder / "runs")),
).fit()
for rank in range(2):
    show(json.loads((folder / str(rank)).read_text()))
"""
    )
    ranks = [json.loads(line) for line in lines]
    assert [rank["place"] for rank in ranks] == [[0, 2, 0, 2], [1, 2, 1, 2]]
    assert {(rank["library"], rank["launcher"]) for rank in ranks} == {("dualtrain", "ray")}
    assert ranks[0]["weights"] == ranks[1]["weights"]
