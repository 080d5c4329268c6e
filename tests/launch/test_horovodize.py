"""A Horovod script under torchrun and horovodize; tests/horovodize/ tests longer ones on forked ranks."""

from __future__ import annotations

from tests.horovodize.test_horovodize import python

TRAINING = r"""
import sys
import torch
import horovod.torch as hvd
from horovod.torch.mpi_ops import allgather
import horovod.torch.elastic

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 3)).pow(2).mean().backward()
    optimizer.step()
weights = allgather(model.weight.detach(), name="weights")
total = hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum).item()
# One write call: under torchrun, stdout is unbuffered and print would write the parts of a line separately.
sys.stdout.write(f"done {hvd.rank()} {hvd.size()} {bool((weights == weights[0]).all())} {total}\n")
"""


def test_a_script_trains_under_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TRAINING)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    ended = python(*torchrun, "-m", "dualtrain.horovodize", script)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["done 0 2 True 1.0", "done 1 2 True 1.0"]
