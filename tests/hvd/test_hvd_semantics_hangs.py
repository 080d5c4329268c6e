"""SEMANTICS.md 2.3, 2.6, 2.16: where Horovod hangs or crashes, in processes of its own; ours does not."""

from __future__ import annotations

import subprocess

import pytest

from tests.conftest import require_horovod
from tests.launch.jobs import ENV, ROOT

pytestmark = pytest.mark.launch

START = """
import os, sys, threading
import torch
if sys.argv[1] == "ours":
    import dualtrain.hvd as hvd
else:
    import horovod.torch as hvd
hvd.init()
me, size = hvd.rank(), hvd.size()
def give_up():
    print("HANGS", flush=True)
    os._exit(7)
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0)  # its imports take seconds; not on the timer's account
threading.Timer(float(sys.argv[2]), give_up).start()
"""
END = """
print("ENDS", flush=True)
hvd.shutdown()
os._exit(0)
"""
SCRIPTS = {
    "alltoall without a dimension": """
try:
    hvd.alltoall(torch.tensor(1.0))
except ValueError:
    pass
""",
    "unnamed calls of another kind on one rank": """
if me == 0:
    extra = hvd.allgather_async(torch.ones(1))
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
""",
    "unnamed calls after join": """
if me == 0:
    hvd.allreduce(torch.ones(1), name="alone")
hvd.join()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
""",
    "a group of which only some ranks use a parameter": """
p, q = (torch.nn.Parameter(torch.ones(1)) for _ in "pq")
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, q], 1.0), [("p", p), ("q", q)], groups=[[p, q]])
(p.sum() + (q.sum() if me == 0 else 0)).backward()
optimizer.step()
assert q.item() == 0.5
""",
}


def run(launcher, *command):
    env = {**ENV, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*launcher, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=150)


@pytest.mark.parametrize("title", SCRIPTS)
def test_where_horovod_does_not_end_and_ours_does(title, tmp_path):
    require_horovod()
    script = tmp_path / "script.py"
    script.write_text(START + SCRIPTS[title] + END)
    end = run(["torchrun", "--nproc_per_node=2"], str(script), "ours", "60")
    assert end.stdout.count("ENDS") == 2, end.stderr
    assert end.returncode == 0, end.stderr
    end = run(["horovodrun", "--gloo", "-np", "2"], "python", str(script), "theirs", "6")
    assert end.returncode != 0
    assert "ENDS" not in end.stdout
