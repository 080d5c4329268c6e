"""dualtrain/hvd/README.md#syncbatchnorm: SyncBatchNorm on CPUs equals BatchNorm in one process on all ranks' samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.hvd.worlds import OURS, THEIRS, check, library, same


def samples(rank, rows, shape):
    return torch.randn(rows, 3, *shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * (rank + 1)


def against_one_process(backend):
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        for shape, kind in [
            ((), nn.BatchNorm1d),
            ((5,), nn.BatchNorm1d),
            ((2, 2), nn.BatchNorm2d),
            ((1, 2, 2), nn.BatchNorm3d),
        ]:
            for uneven in (False, True):
                rows = [3 + r * uneven for r in range(size)]
                torch.manual_seed(0)
                one = kind(3).double()
                nn.init.normal_(one.weight)
                ours = hvd.SyncBatchNorm(3).double()
                ours.load_state_dict(one.state_dict())
                batch = torch.cat([samples(r, rows[r], shape) for r in range(size)])
                part = slice(sum(rows[:me]), sum(rows[: me + 1]))
                whole = batch.clone().requires_grad_()
                mine = batch[part].clone().requires_grad_()
                for _ in range(2):
                    wanted, found = one(whole), ours(mine)
                torch.testing.assert_close(found, wanted[part])
                torch.testing.assert_close(ours.running_mean, one.running_mean)
                torch.testing.assert_close(ours.running_var, one.running_var)
                assert ours.num_batches_tracked == one.num_batches_tracked == 2
                wanted.square().mul(batch).sum().backward()
                found.square().mul(batch[part]).sum().backward()
                torch.testing.assert_close(mine.grad, whole.grad[part])
                for p, q in zip(ours.parameters(), one.parameters(), strict=True):
                    torch.testing.assert_close(hvd.allreduce(p.grad, op=hvd.Sum), q.grad)
                one.eval()
                ours.eval()
                torch.testing.assert_close(ours(mine), one(batch[part]))


@OURS
def test_sync_batch_norm_equals_batchnorm_in_one_process_on_all_samples(real):
    real(against_one_process)


def converted(backend):
    with library(backend) as hvd:
        model = nn.Sequential(
            nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, momentum=None), nn.Sequential(nn.BatchNorm2d(3, affine=False))
        )
        weights = dict(model.named_parameters())
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
        assert isinstance(model[1], hvd.SyncBatchNorm)
        assert isinstance(model[2][0], hvd.SyncBatchNorm)
        assert dict(model.named_parameters()) == weights
        # Use two SyncBatchNorm layers. On Horovod, the calls of all layers have the same names, and can collide.
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), 0)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(2 + hvd.rank(), 3, 2, 2)).square().mean().backward()
            optimizer.step()
        for value in model.state_dict().values():
            everyone = hvd.allgather(value[None])
            torch.testing.assert_close(everyone[0], everyone[-1])
        with pytest.raises(ValueError, match="2D"):
            model[1](torch.ones(3))
        for channels, layer in (
            (1, hvd.SyncBatchNorm(3)),
            (3, hvd.SyncBatchNorm(1)),
            (1, hvd.SyncBatchNorm(3, affine=False)),
        ):
            with pytest.raises(ValueError, match=rf"channels \(got input of shape \(2, {channels}\)"):
                layer(torch.ones(2, channels))


@OURS
def test_a_converted_model_has_equal_statistics_on_all_ranks_and_refuses_wrong_shapes(real):
    real(converted)


class Shared(nn.Module):
    """Model that contains one BatchNorm layer three times: as two attributes, and in ``block``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(3)
        self.second = self.first
        self.block = nn.Sequential(nn.Linear(3, 3), self.first)


def shared_layer(backend):
    with library(backend) as hvd:
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(Shared())
        assert type(model.first) is hvd.SyncBatchNorm
        assert model.first is model.second is model.block[1]
        one = nn.BatchNorm1d(3).double()
        batch = torch.cat([samples(r, 4, ()) for r in range(hvd.size())])
        found = model.double().second(batch[4 * hvd.rank() :][:4])
        torch.testing.assert_close(found, one(batch)[4 * hvd.rank() :][:4])


@OURS
def test_a_layer_with_several_names_becomes_one_converted_layer(real):
    real(shared_layer)


def not_on_cpus(backend):
    with library(backend) as hvd:
        check(hvd, same("cpu", lambda: hvd.SyncBatchNorm(3)(torch.ones(2, 3)), "ValueError"))


@THEIRS
def test_horovods_sync_batch_norm_needs_a_gpu(real):
    real(not_on_cpus)
