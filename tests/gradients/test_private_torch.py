"""Private parts of torch that this package's gradients, optimizers and ``hvd`` use: a failed test names what torch lacks.

Where the package uses such a part, a comment usually says that it is private in torch, or has no public alternative.
"""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.torch_version import TorchVersion

from dualtrain.gradients.parameters import is_sharded
from dualtrain.hvd import compat

VERSION = f"torch {torch.__version__}"


def test_torch_lists_the_hooks_of_a_parameter():
    p = nn.Parameter(torch.zeros(2))
    handle = p.register_post_accumulate_grad_hook(hook := lambda _: None)
    found = getattr(p, "_post_accumulate_grad_hooks", None) or {}
    assert list(found.values()) == [hook], (
        f"{VERSION} does not keep a parameter's hooks in _post_accumulate_grad_hooks: change gradients/hooks.py (restore, "
        "has_later_hook, _watchers, remove_freed) and gradients/slots.py (copy_to_bucket)"
    )
    handle.remove()
    assert not p._post_accumulate_grad_hooks


def test_torch_lists_the_hooks_of_a_node_and_runs_them_after_those_of_the_parameter():
    p = nn.Parameter(torch.zeros(2))
    order = []
    node = torch.autograd.graph.get_gradient_edge(p).node
    node.register_hook(lambda *_: order.append("node"))
    p.register_post_accumulate_grad_hook(lambda _: order.append("parameter"))
    p.sum().backward()
    assert order == ["parameter", "node"], f"{VERSION} runs hooks in a different order: {order}: see gradients/hooks.py"
    handle = torch.autograd.graph.get_gradient_edge(p).node.register_hook(lambda *_: None)
    found = handle.hooks_dict_ref()
    handle.remove()
    assert len(found) == 1, f"{VERSION} does not list the hooks of a node: change _node_hooks in gradients/hooks.py"


def test_torch_calls_back_at_the_end_of_a_backward_pass():
    order = []
    p = nn.Parameter(torch.zeros(2))
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    assert hasattr(engine, "queue_callback"), (
        f"{VERSION} has no Variable._execution_engine.queue_callback: change at_end_of_pass in gradients/passes.py"
    )

    def hook(_):
        order.append("hook")
        engine.queue_callback(lambda: order.append("end"))

    p.register_post_accumulate_grad_hook(hook)
    (p * 2).sum().backward()
    assert order == ["hook", "end"], f"{VERSION} runs callbacks of a backward pass in a different order: {order}"


def test_torch_distinguishes_outer_and_inner_backward_passes():
    current = getattr(torch._C, "_current_autograd_node", None)
    assert current is not None, f"{VERSION} has no torch._C._current_autograd_node: change EndOfPass in gradients/passes.py"
    seen = []

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            inner = torch.zeros(1, requires_grad=True)
            inner.register_post_accumulate_grad_hook(
                lambda _: torch.autograd.Variable._execution_engine.queue_callback(lambda: seen.append(current()))
            )
            with torch.enable_grad():
                (inner * 2).sum().backward()
            return grad

    x = torch.zeros(1, requires_grad=True)
    assert current() is None
    Outer.apply(x).sum().backward()
    assert [type(node).__name__ for node in seen] == ["OuterBackward"], (
        f"{VERSION}: at the end of an inner backward pass the current node is {seen}, not that of the outer pass: change "
        "EndOfPass in gradients/passes.py"
    )


def test_torch_counts_changes_in_place():
    buffer = torch.zeros(4)
    before = getattr(buffer, "_version", None)
    assert before is not None, f"{VERSION} has no Tensor._version: change is_reduced in gradients/exchange.py"
    buffer[:2].detach().mul_(2)  # clipping changes gradients in buckets in this way
    assert buffer._version > before, f"{VERSION} does not count changes of views and detached tensors in Tensor._version"


def test_torch_copies_or_adds_many_tensors_in_one_call():
    assert hasattr(torch, "_foreach_copy_"), (
        f"{VERSION} has no torch._foreach_copy_: change copy_all in gradients/shard_sums.py"
    )
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3, dtype=torch.float64)]
    torch._foreach_copy_(targets, sources)
    assert all(bool(target.eq(1).all()) for target in targets)
    assert hasattr(torch, "_foreach_add_"), f"{VERSION} has no torch._foreach_add_: change gradients/shard_sums.py"
    torch._foreach_add_(targets, [torch.ones(2), torch.ones(3)])
    assert all(bool(target.eq(2).all()) for target in targets)


def test_torch_has_private_accessors_of_uncoalesced_sparse_tensors():
    grad = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,), check_invariants=False)
    for name, where in {
        "_nnz": "gradients/sparse.py",
        "_indices": "gradients/sparse.py and hvd/gather_ops.py",
        "_values": "gradients/sparse.py and hvd/gather_ops.py",
    }.items():
        assert hasattr(grad, name), f"{VERSION} has no Tensor.{name}: change {where}"
    assert grad._nnz() == 2
    assert grad._indices().tolist() == [[1, 1]]


def test_torch_keeps_the_parameters_and_submodules_of_a_module_in_dicts():
    model = nn.Sequential(nn.Linear(2, 2))
    found = [getattr(model[0], "_parameters", {}).get("weight"), getattr(model, "_modules", {}).get("0")]
    assert found == [model[0].weight, model[0]], (
        f"{VERSION} keeps parameters or submodules elsewhere: change _on_parameter and _on_module in gradients/hooks.py"
    )


def test_torch_keeps_the_step_hooks_of_an_optimizer():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        assert getattr(optimizer, name, None) == {}, f"{VERSION} has no Optimizer.{name}: change DistributedOptimizer.step"
    optimizer.register_step_pre_hook(lambda *_: None)
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_torch_has_a_base_class_of_batch_norm_layers():
    from torch.nn.modules import batchnorm

    base = getattr(batchnorm, "_BatchNorm", None)
    assert base is not None, (
        f"{VERSION} has no torch.nn.modules.batchnorm._BatchNorm: change batchnorm.py and models/freezing.py"
    )
    assert all(issubclass(kind, base) for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))


@pytest.mark.parametrize(("originals", "mark"), [(False, "_is_flat_param"), (True, "_fsdp_flattened")])
def test_fsdp_marks_its_parameters(originals, mark):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns that a world of one rank is not sharded
            model = FullyShardedDataParallel(nn.Linear(2, 2), use_orig_params=originals, device_id=torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    found = [getattr(p, mark, False) for p in model.parameters()]
    assert found, model
    assert all(found), (
        f"{VERSION}: FSDP with use_orig_params={originals} does not set {mark}: change check_supported in "
        "gradients/parameters.py; otherwise shards are averaged without an error"
    )


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 15), reason="older versions may not mark parameters that fully_shard replaces"
)
def test_fully_shard_marks_the_parameters_that_it_replaces():
    model = nn.Linear(2, 2)
    from torch.distributed.fsdp import fully_shard  # torch 2.5 has it in another module

    replaced = list(model.parameters())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()
    assert all(map(is_sharded, replaced)), (
        f"{VERSION}: fully_shard does not set _fsdp_orig_uid: change is_sharded in gradients/parameters.py; otherwise a "
        "wrapped optimizer keeps parameters that the model no longer has"
    )


def test_gradscaler_reads_the_attribute_step_supports_amp_scaling():
    reads = []

    class Scaled(torch.optim.SGD):
        @property
        def _step_supports_amp_scaling(self):
            reads.append(True)
            return False

    p = nn.Parameter(torch.ones(2))
    scaler = torch.amp.GradScaler("cpu")
    optimizer = Scaled([p])
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    assert reads, f"{VERSION}: GradScaler does not read _step_supports_amp_scaling: change DistributedOptimizer"


def test_torch_counts_the_tensors_that_share_a_storage():
    tensor = torch.zeros(3)
    count = getattr(torch._C, "_storage_Use_Count", None)
    assert count is not None, f"{VERSION} has no torch._C._storage_Use_Count: change may_be_kept in gradients/slots.py"
    storage = tensor.untyped_storage()  # this object may be counted too: keep it while both counts are read
    before = count(storage._cdata)
    view = tensor.view(-1)
    assert count(storage._cdata) == before + 1, (
        f"{VERSION} does not count views in _storage_Use_Count: change may_be_kept in gradients/slots.py"
    )
    assert getattr(view, "_base", None) is tensor, f"{VERSION} has no Tensor._base: change gradients/packed.py"
    assert tensor._base is None


def test_torch_has_the_private_attributes_that_exclude_functions_from_compilation():
    marked = importlib.import_module("torch._dynamo").disable(lambda: None)
    assert getattr(marked, "_torchdynamo_disable", False), (
        f"{VERSION} does not mark functions with _torchdynamo_disable: change not_compiled in backends/compilation.py"
    )
    engine = torch._C._dynamo.eval_frame
    if not hasattr(engine, "set_code_exec_strategy"):
        known = TorchVersion(torch.__version__) < "2.15"
        assert known, f"{VERSION} has no set_code_exec_strategy: change not_compiled in backends/compilation.py"
        pytest.skip("needs a torch that has set_code_exec_strategy")
    strategy = engine._FrameExecStrategy(engine._FrameAction.SKIP, engine._FrameAction.SKIP)
    assert strategy.cur_action == engine._FrameAction.SKIP


def test_a_scheduler_adds_only_known_attributes_to_its_optimizer():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    optimizer.step()
    before = compat.reproduced()
    compat.without_state(optimizer)
    assert compat.reproduced() == before, (
        f"{VERSION}: a scheduler adds an unknown attribute to its optimizer: add it to _NOT_COMPARED in hvd/compat.py: "
        f"{sorted(vars(optimizer))}"
    )


def test_references_from_cpp_are_counted():
    count = getattr(torch.Tensor, "_use_count", None)
    assert count is not None, f"{VERSION} has no Tensor._use_count: change gradients/slots.py"
    p, q = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    grad = torch.zeros(1)
    counts = [count(grad)]
    p.grad = grad
    counts.append(count(grad))
    q.grad = grad
    counts.append(count(grad))
    assert counts == [1, 2, 3], (
        f"{VERSION} does not count references from C++ in Tensor._use_count: change have_views and may_be_kept"
    )


def test_views_of_a_tensor_from_dlpack_count_for_its_own_storage_object():
    whole = torch.zeros(4)
    own = torch.from_dlpack(whole)
    assert own.data_ptr() == whole.data_ptr()
    count = torch._C._storage_Use_Count
    storages = [each.untyped_storage() for each in (whole, own)]
    before = [count(each._cdata) for each in storages]
    view = own[1:]
    assert [count(each._cdata) for each in storages] == [before[0], before[1] + 1], (
        f"{VERSION} counts views of a tensor from DLPack not only for its own storage object: change gradients/exposed.py"
    )
    del view
