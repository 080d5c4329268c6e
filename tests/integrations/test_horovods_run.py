"""``horovod.run`` of dualtrain and of Horovod: one program has the same results with both."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys

from dualtrain.functions import horovod_run
from dualtrain.functions.local import ARGUMENTS
from tests.conftest import require_horovod
from tests.pool import ROOT

SECONDS = 240.0

PROGRAM = """
import json
import horovod
from tests.integrations import functions

def scaled(values, by=1):
    import horovod.torch as hvd
    hvd.init()
    return [by * value + hvd.rank() for value in values]

def fails():
    import horovod.torch as hvd
    hvd.init()
    if hvd.rank() == 1:
        raise ValueError("no such thing")

# Horovod's own run() imports this program again in helper processes.
if __name__ == "__main__":
    found = horovod.run(functions.train, (3,), {"lr": 0.2}, num_proc=2, use_gloo=True)
    found += horovod.run(scaled, args=([5, 6],), kwargs={"by": 10}, use_gloo=True)
    try:
        horovod.run(fails, num_proc=2, use_gloo=True)
    except RuntimeError:
        found.append("RuntimeError")
    print(">", json.dumps(found))
"""


def results(command, folder):
    file = folder / "program.py"
    file.write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, file], cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("> "))
    return json.loads(line[2:])


def test_run_returns_the_same_results_as_horovods_run(tmp_path):
    require_horovod()
    theirs, ours = results([], tmp_path), results(["-m", "dualtrain.horovodize"], tmp_path)
    assert [theirs[rank].pop("library") for rank in range(2)] == ["horovod"] * 2
    assert [ours[rank].pop("library") for rank in range(2)] == ["dualtrain"] * 2
    assert ours == theirs
    assert ours[2:] == [[50, 60], "RuntimeError"]


def test_every_argument_of_horovods_run_is_known():
    require_horovod()
    import horovod

    theirs = list(inspect.signature(horovod.run).parameters)
    assert theirs[:4] == list(inspect.signature(horovod_run).parameters)[:4]
    assert set(theirs) == ARGUMENTS
