"""``horovodize --prove`` with real launchers; tests/horovodize/ tests it without launchers."""

from __future__ import annotations

import html
import json
import os
import tempfile

import pytest

from tests.conftest import require_horovod
from tests.launch.jobs import ENV, processes, run

TRAINING = r"""
import torch
import horovod.torch as hvd
from horovod.torch.mpi_ops import allgather
import horovod.torch.elastic

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 3)).pow(2).mean().backward()
    optimizer.step()
weights = allgather(model.weight.detach(), name="weights")
total = hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum).item()
assert (hvd.size(), total, bool((weights == weights[0]).all())) == (2, 1.0, True)
"""


@pytest.mark.timeout(600)  # enough for three starts on a busy machine
def test_the_prove_command_finds_equal_bits_if_dualtrain_reproduces_a_defect_of_horovod(tmp_path, monkeypatch):
    """Horovod's broadcast of a new optimizer's state takes a step, which decays the weights; dualtrain's takes none."""
    require_horovod()
    script, results = tmp_path / "script.py", tmp_path / "results.json"
    script.write_text(TRAINING)
    options = ["--rounds", "1", "--json", str(results), "--html", str(tmp_path / "page.html")]
    with tempfile.TemporaryDirectory(prefix="dt", dir="/tmp") as temporary:  # tmp_path is too long for sockets
        monkeypatch.setitem(ENV, "TMPDIR", temporary)
        ended = run(["python", "-m", "dualtrain.horovodize", "--prove", *options, str(script)], timeout=560)
        # Only a folder of torch's cache may be left. torch makes it without dualtrain too.
        assert [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")] == []
    assert ended.returncode == 0, ended.stdout + ended.stderr
    line = ended.stdout.splitlines()[-1]
    assert line.startswith(
        "same bits for 3 steps, all that the script takes, once these defects of Horovod are reproduced: "
    )
    assert f"{script}:13: broadcast_optimizer_state takes a step" in ended.stdout
    found = json.loads(results.read_text())
    assert (found["status"], found["difference"]["step"], found["verdict"]) == (0, 0, line)
    (horovod,), (dualtrain,), (compat,) = found["runs"].values()
    assert horovod["weights_sha256"] == compat["weights_sha256"] != dualtrain["weights_sha256"]
    assert horovod["library"].startswith("horovod 0")
    assert html.escape(line) in (tmp_path / "page.html").read_text()
    assert processes(str(script)) == []
