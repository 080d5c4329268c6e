"""Private parts of torch that the backends use: a failure names the missing part and what it is used for."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist

ASYNC_OPTIONS = "the options of operations in process groups other than the default group"
OWN_GROUPS = "process groups that are not subsets of the default group"
INTERFACE = "the network interface of one Gloo group"
USED = {
    "torch._C._distributed_c10d.AllreduceOptions.reduceOp": ASYNC_OPTIONS,
    "torch._C._distributed_c10d.AllgatherOptions": ASYNC_OPTIONS,
    "torch._C._distributed_c10d.AllToAllOptions": ASYNC_OPTIONS,
    "torch._C._distributed_c10d.BroadcastOptions.rootRank": ASYNC_OPTIONS,
    "torch._C._distributed_c10d.BroadcastOptions.rootTensor": ASYNC_OPTIONS,
    "torch.distributed.ProcessGroup._allgather_base": "gathering into one tensor",
    "torch.distributed.ProcessGroup.alltoall_base": "sending slices of one tensor",
    "torch.distributed.ProcessGroupGloo": OWN_GROUPS,
    "torch.distributed.ProcessGroupGloo.create_device": INTERFACE,
    "torch.distributed.ProcessGroupGloo._Options._devices": INTERFACE,
    "torch.distributed.ProcessGroupGloo._Options._timeout": OWN_GROUPS,
    "torch.distributed.ProcessGroupGloo._Options._threads": OWN_GROUPS,
    "torch.distributed.distributed_c10d._get_default_store": "the store of a default group that the program has made",
}
NCCL = {
    "torch.distributed.ProcessGroupNCCL.Options": OWN_GROUPS,
    "torch.distributed.ProcessGroupNCCL.Options._timeout": OWN_GROUPS,
}


def find(path):
    """Import the longest prefix of ``path`` that is a module, and return the attribute that the rest names."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for name in parts[count:]:
            found = getattr(found, name)
        return found
    raise ImportError(path)


def require(path, purpose):
    try:
        find(path)
    except (ImportError, AttributeError):
        pytest.fail(f"this torch has no {path}: dualtrain/backends/torch.py uses it for {purpose}, and needs a replacement")


@pytest.mark.parametrize("path", USED)
def test_torch_has_the_private_parts_that_the_backend_uses(path):
    require(path, USED[path])


@pytest.mark.parametrize("path", NCCL)
def test_a_cuda_build_of_torch_has_the_private_parts_that_the_backend_uses(path):
    if not dist.is_nccl_available():
        pytest.skip("needs a CUDA build of torch")
    require(path, NCCL[path])


def test_a_missing_part_is_named_with_its_purpose():
    with pytest.raises(
        pytest.fail.Exception, match=r"no torch.distributed.gone: .* uses it for a purpose, and needs a replacement"
    ):
        require("torch.distributed.gone", "a purpose")


def test_torch_makes_views_whose_values_are_the_negated_values_in_memory():
    view = getattr(torch, "_neg_view", None)
    assert view is not None, f"torch {torch.__version__} has no torch._neg_view: change ordinary in backends/inference.py"
    memory = torch.ones(2)
    assert view(memory).tolist() == [-1.0, -1.0]
    assert view(memory).data_ptr() == memory.data_ptr()
