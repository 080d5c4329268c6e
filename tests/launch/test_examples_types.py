"""Type checks of the pages' examples.

mypy takes a minute to read all of torch. So this file is in tests/launch: only ``launch/test.sh --all`` runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile

import pytest

from tests.pool import ROOT
from tests.test_package import built  # noqa: F401 - a fixture
from tests.test_readme import EXAMPLES

pytestmark = pytest.mark.xdist_group("package")  # test_package.py also builds the package: never build twice at once

#: Uses of ``dualtrain.hvd`` that the examples lack.
HOROVOD_SCRIPT = """
import torch

import dualtrain.hvd as hvd

hvd.init()
model = torch.nn.Linear(2, 2)
inner = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), compression=hvd.Compression.fp16, op=hvd.Adasum)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
mean: torch.Tensor = hvd.allreduce(torch.ones(2), name="x", op=hvd.Average)
handle: int = hvd.allreduce_async(torch.ones(2))
hvd.synchronize(handle)
optimizer.synchronize()
with optimizer.skip_synchronize():
    optimizer.step()
names: list[str] = hvd.allgather_object("x")
last: int = hvd.join()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    state.commit()


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0))
"""


def test_examples_in_the_documentation_pass_mypy_strict(built, tmp_path):  # noqa: F811
    """Check the examples against the unpacked wheel. mypy reads the wheel's types because the wheel has py.typed."""
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(tmp_path / "site")
    programs = {**EXAMPLES, "horovod": HOROVOD_SCRIPT}
    for name, text in programs.items():
        (tmp_path / f"{name.replace('-', '_')}.py").write_text(text)
    files = [f"{name.replace('-', '_')}.py" for name in programs]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache" / "examples"), *files]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
