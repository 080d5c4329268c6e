"""dualtrain/hvd/README.md#adasum: results for any number of ranks, compared with a second implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.hvd.worlds import THEIRS, check, library, same, worlds


def reference(vectors):
    """Return the adaptive sum in the order of Horovod's tree.

    Each round adds neighbours. If the number of vectors is odd, the last one is kept for the next round.
    """
    if len(vectors) == 1:
        return vectors[0]
    above = []
    for a, b in zip(vectors[::2], vectors[1::2], strict=False):
        dot, aa, bb = (np.vdot(x, y) for x, y in ((a, b), (a, a), (b, b)))
        above.append((1 - dot / (2 * aa) if aa else 1.0) * a + (1 - dot / (2 * bb) if bb else 1.0) * b)
    return reference(above + vectors[len(above) * 2 :])


def vectors(size, kind):
    """Return one vector per rank."""
    values = np.random.default_rng(7).standard_normal((size, 3, 5))
    if kind == "equal":
        values[:] = values[0]
    if kind == "orthogonal":
        values = np.eye(size, 15).reshape(size, 3, 5) * 3
    if kind == "some zero":
        values[-1] = 0
    return list(values)


KINDS = ["random", "equal", "orthogonal", "some zero"]


def reductions(backend):
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        wanted = {kind: reference(vectors(size, kind)) for kind in KINDS}
        np.testing.assert_allclose(wanted["equal"], vectors(size, "equal")[0], atol=1e-12)
        np.testing.assert_allclose(wanted["orthogonal"], sum(vectors(size, "orthogonal")), atol=1e-12)
        for dtype, near in [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.float16, 2e-2)]:
            tensors = [torch.tensor(vectors(size, kind)[me]).to(dtype) for kind in KINDS]
            kept = [t.clone() for t in tensors]
            found = hvd.grouped_allreduce(tensors, name=f"{dtype}", op=hvd.Adasum)
            for kind, one in zip(KINDS, found, strict=True):
                np.testing.assert_allclose(one.double(), wanted[kind], atol=near, err_msg=kind)
                assert one.dtype == dtype
            result = hvd.allreduce_(tensors[0], op=hvd.Adasum)
            np.testing.assert_allclose(result.double(), wanted["random"], atol=near)
            assert all(torch.equal(a, b) for a, b in zip(tensors[1:], kept[1:], strict=True))
        scaled = hvd.allreduce(kept[0].float(), op=hvd.Adasum, prescale_factor=2.0, postscale_factor=0.5)
        np.testing.assert_allclose(scaled.double(), wanted["random"], atol=5e-3)
        parts = torch.randn(4, 2, generator=torch.Generator().manual_seed(me))
        found = hvd.allreduce(torch.view_as_complex(parts), op=hvd.Adasum)
        assert torch.equal(torch.view_as_real(found), hvd.allreduce(parts, op=hvd.Adasum))


@worlds(("torch", 2), ("torch", 3), ("torch", 4))
def test_adasum_equals_another_implementation(real):
    real(reductions)


def steps_of_deltas(backend, optimizer_class, options):
    """Compare steps of an Adasum optimizer with a reference that combines the ranks' weight changes. Return the weights.

    Such an optimizer refuses ``skip_synchronize``.
    """
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        weights = torch.nn.Parameter(torch.linspace(-1, 1, 6))
        optimizer = hvd.DistributedOptimizer(optimizer_class([weights], **options), [("weights", weights)], op=hvd.Adasum)
        alone = [torch.nn.Parameter(weights.detach().clone()) for _ in range(size)]
        plain_optimizers = [optimizer_class([p], **options) for p in alone]
        for step in range(3):
            start = weights.detach().double().numpy().copy()
            for r, (p, plain_optimizer) in enumerate(zip(alone, plain_optimizers, strict=True)):
                p.data.copy_(weights.data)
                p.grad = torch.sin(torch.arange(6.0) * (r + 1) + step)
                plain_optimizer.step()
            wanted = start + reference([p.detach().double().numpy() - start for p in alone])
            (weights * torch.sin(torch.arange(6.0) * (me + 1) + step)).sum().backward()
            optimizer.synchronize()  # has no effect with Adasum
            optimizer.step()
            optimizer.zero_grad()
            np.testing.assert_allclose(weights.detach(), wanted, atol=1e-5)
        with pytest.raises(AssertionError, match="not supported when using Adasum"), optimizer.skip_synchronize():
            pass
        return weights.detach().tolist()


@worlds(("torch", 2), ("torch", 3))
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.05})],
    ids=["sgd", "adam"],
)
def test_an_adasum_optimizer_combines_weight_changes_instead_of_gradients(real, kind, options):
    results = real(steps_of_deltas, kind, options)
    assert results == results[:1] * real.size


def clipped_step(hvd):
    """Clip the gradient (3, 4) to the norm 1, then take a step of an Adasum optimizer; return the weights."""
    weights = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), [("weights", weights)], op=hvd.Adasum)
    (weights * torch.tensor([3.0, 4.0])).sum().backward()
    torch.nn.utils.clip_grad_norm_([weights], 1.0)
    optimizer.step()
    return weights.tolist()


def clipped(backend):
    with library(backend) as hvd:
        return clipped_step(hvd)


@worlds(("torch", 2))
def test_an_adasum_optimizer_steps_with_clipped_gradients(real):
    # tests/launch/test_adasum.py asserts that Horovod's optimizer ignores clipping.
    np.testing.assert_allclose(real(clipped), [[-0.6, -0.8]] * 2, atol=1e-5)


def frozen_step(backend, on_every_rank):
    """Freeze all parameters of an Adasum optimizer, on every rank or only on rank 0, and take a step."""
    with library(backend) as hvd:
        weights = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), [("weights", weights)], op=hvd.Adasum)
        weights.sum().backward()
        optimizer.step()
        weights.requires_grad_(not on_every_rank and hvd.rank() > 0)
        if on_every_rank:
            optimizer.step()
        else:
            with pytest.raises(hvd.HorovodInternalError):
                optimizer.step()


@worlds(("torch", 2))
@pytest.mark.parametrize("on_every_rank", [True, False])
def test_an_adasum_optimizer_steps_with_frozen_parameters_only_if_every_rank_froze_them(real, on_every_rank):
    real(frozen_step, on_every_rank)


class Plain(torch.optim.SGD):
    """An optimizer that calls the closure as it is, without ``torch.enable_grad``."""

    def step(self, closure):
        loss = closure()
        super().step()
        return loss


def steps_with_a_closure(backend):
    with library(backend) as hvd:
        weights = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(Plain([weights], lr=1.0), [("weights", weights)], op=hvd.Adasum)

        def closure():
            optimizer.zero_grad()
            loss = (weights + 1).sum()
            loss.backward()
            return loss.item()

        return optimizer.step(closure), weights.tolist()


@worlds(("torch", 2))
def test_an_adasum_optimizer_calls_the_closure_with_gradients_enabled(real):
    assert real(steps_with_a_closure) == [(2.0, [-1.0, -1.0])] * 2


def scaled(backend):
    """Call ``scaler.step`` with an optimizer that is not fused, which is refused, then with a fused optimizer.

    In step 1, the gradient of rank 0 is infinite. The fused step of rank 0 then contributes no change.
    """
    with library(backend) as hvd:
        for fused in (False, True):
            weights = torch.nn.Parameter(torch.zeros(2))
            sgd = torch.optim.SGD([weights], lr=1.0, fused=fused)
            optimizer = hvd.DistributedOptimizer(sgd, [(f"fused {fused}", weights)], op=hvd.Adasum)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for step in range(3):
                factor = float("inf") if step == 1 and hvd.rank() == 0 else 1.0
                scaler.scale((weights * factor).sum()).backward()
                if fused:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    with pytest.raises(AssertionError, match="pass fused=True to the optimizer"):
                        scaler.step(optimizer)
                optimizer.zero_grad()
        return weights.tolist()


@worlds(("torch", 2))
def test_loss_scaling_with_adasum_needs_a_fused_optimizer(real):
    assert real(scaled) == [[-3.0, -3.0]] * 2


def not_over_gloo(backend):
    with library(backend) as hvd:
        call = lambda: hvd.allreduce(torch.ones(2), name="adasum", op=hvd.Adasum)  # noqa: E731
        check(hvd, same("adasum", call, "HorovodInternalError"))
        assert hvd.allreduce(torch.ones(2), name="after").tolist() == [1, 1]


@THEIRS
def test_horovod_has_no_adasum_over_gloo(real):
    real(not_over_gloo)


def test_adasum_does_not_depend_on_the_number_of_torchs_threads():
    # Import this here, because tests/launch/test_adasum.py imports this file under mpirun, where dualtrain.hvd is replaced
    # by Horovod itself.
    from dualtrain.hvd.arithmetic import adasum

    generator = torch.Generator().manual_seed(0)
    first, noise = (torch.randn(200_001, generator=generator, dtype=torch.float64) for _ in range(2))
    tensors = [first, first + noise, first - 2 * noise, 3 * first + noise]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(adasum(tensors))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])
