"""Virtual ranks: failed and refused steps, control flags, SyncBatchNorm, resume, evaluation, and kept gradients."""

from __future__ import annotations

import logging
import math
from contextvars import ContextVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dualtrain import BackendError, Trainer, UserError, connect
from dualtrain.batchnorm import SyncBatchNorm, synchronize_norms
from dualtrain.errors import DivergedError, RanksDifferError
from tests.hvd.worlds import worlds
from tests.models_for_tests import perceptron, seeded, small_buckets, vectors
from tests.threads import run_threads
from tests.training.virtual import CASES, Statistics, digest, step, trainer_of

RANK: ContextVar[int] = ContextVar("rank")  # rank of the current thread


def samples(number=12):
    return vectors(7, number), torch.arange(number) % 3


def trainer_with(model, backend, shards=4, **options):
    return Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, virtual_ranks=shards, **options)


# -- steps that fail --------------------------------------------------------------------------------------------------


class Failing(nn.Module):
    """Model whose forward raises if the first input is 99."""

    def __init__(self):
        super().__init__()
        self.inner = Statistics()

    def forward(self, x):
        out = self.inner(x)
        if x[0, 0] == 99:
            raise RuntimeError("this sample is bad")
        return out


def tried(backend, bad_shards, value, error):
    """Take a step, fail once in each of ``bad_shards``, then take another step; return the hash of all state."""
    model = seeded(Failing())
    with small_buckets((1 << 3, 1 << 4)):
        trainer = trainer_with(model, backend)
        trainer.step(trainer.split(samples()), 12.0)
        before = digest(trainer)
        for shard in bad_shards:
            inputs, targets = samples()
            inputs[3 * shard, 0] = value
            with pytest.raises(type(error), match=str(error)):
                trainer.step(trainer.split((inputs, targets)), 12.0)
            assert digest(trainer) == before
        trainer.step(trainer.split(samples()), 12.0)
    trainer.close()
    return digest(trainer)


def test_a_step_whose_forward_raised_can_be_repeated():
    error = RuntimeError("this sample is bad")
    with connect("local") as backend:
        undisturbed = tried(backend, [], 0, error)
        for shard in range(4):
            assert tried(backend, [shard, shard], 99, error) == undisturbed


def drawn_after_failures(backend, bad_shard: int) -> list[float]:
    """Return random numbers that are drawn after each of two steps that fail in ``bad_shard``, and after a good step."""
    trainer = trainer_with(nn.Sequential(nn.Dropout(), perceptron()), backend)
    inputs, targets = samples()
    inputs[3 * bad_shard] = math.nan
    drawn = []
    for _ in range(2):
        with pytest.raises(DivergedError):
            trainer.step(trainer.split((inputs, targets)), 12.0)
        drawn.append(torch.rand(()).item())
    trainer.step(trainer.split(samples()), 12.0)
    trainer.close()
    return [*drawn, torch.rand(()).item()]


def test_numbers_drawn_after_a_failed_step_do_not_depend_on_the_shard():
    with connect("local") as backend:
        torch.manual_seed(1)
        first = drawn_after_failures(backend, 0)
        assert len(set(first)) == 3  # so a caller that draws a new batch after a failure gets a different one
        torch.manual_seed(2)
        assert drawn_after_failures(backend, 3) == first


def drawn_after_a_failed_evaluation(backend, bad_shard: int) -> float:
    """Return a random number that is drawn after an evaluation that has failed in ``bad_shard``."""
    trainer = trainer_with(seeded(Failing()), backend)
    inputs, targets = samples()
    inputs[3 * bad_shard] = 99
    with pytest.raises(RuntimeError, match="this sample is bad"):
        trainer.evaluate(trainer.split((inputs, targets)))
    trainer.close()
    return torch.rand(()).item()


def test_numbers_drawn_after_a_failed_evaluation_do_not_depend_on_the_shard():
    with connect("local") as backend:
        torch.manual_seed(1)
        first = drawn_after_a_failed_evaluation(backend, 0)
        torch.manual_seed(2)
        assert drawn_after_a_failed_evaluation(backend, 3) == first


@pytest.mark.parametrize("shard", range(4))
def test_a_loss_that_is_not_finite_changes_no_state_and_its_error_names_the_rank(shard):
    undisturbed = run_threads(1, tried, [], 0, None)[0]
    for size in (1, 2, 3, 5):
        rank = {1: [0, 0, 0, 0], 2: [0, 0, 1, 1], 3: [0, 0, 1, 2], 5: [0, 1, 2, 3]}[size][shard]
        error = DivergedError(rf"infinite or not a number on (rank {rank}$|all ranks)")
        assert run_threads(size, tried, [shard], math.inf, error) == [undisturbed] * size


def partly_sent(backend):
    """Take a step in which the last shard's backward raises after a bucket was sent."""
    model = perceptron()
    with small_buckets((1 << 3, 1 << 4)):
        trainer = trainer_with(model, backend)
        trainer.step(trainer.split(samples()), 12.0)
        seen = []

        def fail_in_last_shard(gradient):
            seen.append(gradient)
            if len(seen) == 4:
                raise RuntimeError("backward is bad")

        handle = model[0].weight.register_hook(fail_in_last_shard)
        with pytest.raises(RuntimeError, match="backward is bad"):
            trainer.step(trainer.split(samples()), 12.0)
        handle.remove()
        model.register_forward_hook(
            lambda *_: pytest.fail("a shard was computed, though the buffers have sums of the failed step")
        )
        with pytest.raises(BackendError, match="after some of its gradients had been sent"):
            trainer.step(trainer.split(samples()), 12.0)
    trainer.close()


def test_a_step_is_refused_after_a_step_that_failed_while_sending_gradients():
    with connect("local") as backend:
        partly_sent(backend)


# -- ranks without shards ---------------------------------------------------------------------------------------------


def flagged(backend):
    trainer = trainer_with(perceptron(), backend, shards=2)
    for sender in range(backend.size):
        flags = (float(backend.rank == sender), 1.0, 0.0)
        done = trainer.step(trainer.split(samples()), 12.0, flags)
        assert done.control_flags == [1.0, float(backend.size), 0.0]
        assert done.totals[1] == 12
    trainer.close()
    return trainer.shards


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_control_flags_are_summed_over_all_ranks_and_ranks_without_shards_cause_a_warning(size, caplog):
    with caplog.at_level(logging.WARNING, "dualtrain"):
        shards = run_threads(size, flagged)
    assert sum(map(len, shards)) == 2
    said = [record.getMessage() for record in caplog.records if "nothing to compute" in record.getMessage()]
    idle = {1: [], 2: [], 3: ["rank 2 has"], 5: ["ranks 2 to 4 have"]}[size]
    assert [text.partition(" nothing")[0] for text in said] == idle


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(backend):
    model = perceptron()
    with pytest.raises(ValueError, match="virtual_ranks and compress exclude each other"):
        trainer_with(model, backend, compress="fp16")
    with pytest.raises(ValueError, match="the number of shards must be 1 or more, not 0"):
        trainer_with(model, backend, shards=0)
    trainer = trainer_with(model, backend)
    mine = trainer.split(samples())
    with pytest.raises(ValueError, match=r"fit\(\) is given each rank's own batches"):
        trainer.fit([samples()])
    for wrong in (mine[1:], [*mine, None]):
        given = "1 shard" if len(wrong) == 1 else f"{len(wrong)} shards"
        with pytest.raises(ValueError, match=rf"this rank has shards .*given batches for {given}$"):
            trainer.step(wrong, 12.0)
        with pytest.raises(ValueError, match=rf"this rank has shards .*given batches for {given}$"):
            trainer.evaluate([[] for _ in wrong])
    with pytest.raises(TypeError, match=r"given to step\(\) is a tensor: give one entry for each"):
        trainer.step(samples() * (len(trainer.shards) // 2), 12.0)
    inputs, targets = samples()
    # Indexing of a tuple by a tensor of one number would select one of its tensors, instead of one sample of each.
    for batch, found in ((((inputs, inputs), targets), "tuple, Tensor"), (({"x": inputs}, targets), "dict, Tensor")):
        with pytest.raises(TypeError, match=rf"pair of tensors, .*not tuple of {found}: split other batches"):
            trainer.split(batch)
    # Batches of other objects can be split if sample numbers are valid indices, as they are for an array.
    assert all(len(part[1]) for part in trainer.split((inputs.numpy(), targets)))
    trainer.close()
    plain = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)
    with pytest.raises(ValueError, match="only a trainer with virtual_ranks has shards"):
        plain.split(samples())
    for one, other, message in (
        (trainer, plain, "is of a trainer with virtual_ranks=4: make this trainer with the same number"),
        (trainer, trainer_with(model, backend, shards=2), "virtual_ranks=4, not 2: give virtual_ranks=4"),
    ):
        with pytest.raises(UserError, match=message):
            other.load_state_dict(one.state_dict())


@pytest.mark.parametrize("size", [1, 2])
def test_arguments_that_do_not_fit_virtual_ranks_are_refused(size):
    run_threads(size, refused)


def other_threads(backend):
    with pytest.raises(RanksDifferError, match=r"torch\.get_num_threads\(\).*1.*2"):
        trainer_with(perceptron(), backend)
    model = perceptron()
    Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend).close()


def test_ranks_with_different_numbers_of_threads_are_refused(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 + RANK.get())
    run_threads(2, lambda backend: (RANK.set(backend.rank), other_threads(backend)))


def test_a_state_saved_with_another_number_of_threads_causes_a_warning(monkeypatch, caplog):
    with connect("local") as backend:
        trainer = trainer_with(perceptron(), backend)
        state = trainer.state_dict()
        trainer.load_state_dict(state)
        assert not caplog.records
        monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
        trainer.load_state_dict(state)
        assert "was 1 when the state was saved, and is 7 in this process: call torch.set_num_threads(1)" in caplog.text


def sparse(backend):
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    trainer = trainer_with(model, backend)
    tokens = torch.arange(24).view(12, 2) % 9
    with pytest.raises(BackendError, match=r"the gradient of '0\.weight' is sparse.*leave sum_order \(virtual_ranks\) out"):
        trainer.step(trainer.split((tokens, samples()[1])), 12.0)
    trainer.close()


@pytest.mark.parametrize("size", [1, 3])
def test_sparse_gradients_are_refused(size):
    run_threads(size, sparse)


def loaded(backend, kind):
    """Train with the batches of a loader, which are lists, or with the pairs of ``split``."""
    trainer = trainer_with(perceptron(), backend, shards=2)
    inputs, targets = samples(4)
    batches = trainer.split((inputs, targets))
    if kind == "loader":
        batches = list(DataLoader(TensorDataset(inputs, targets), batch_size=2))[: len(batches)]
    trainer.step(batches, 4.0)
    trainer.close()
    return digest(trainer)


def evaluated(backend):
    """Evaluate three samples, given as ``split`` returns them, then given as a list of batches for each shard."""
    trainer = trainer_with(perceptron(), backend)
    parts = trainer.split(samples(3))
    found = trainer.evaluate(parts)
    assert found == trainer.evaluate([[] if part is None else [part] for part in parts])
    trainer.close()
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_split_batch_can_be_evaluated(size):
    assert math.isfinite(run_threads(size, evaluated)[0]["val_loss"])


def test_a_batch_may_be_a_list_of_inputs_and_targets():
    with connect("local") as backend:
        assert loaded(backend, "loader") == loaded(backend, "split")


def with_an_empty_batch(backend):
    """Train with a loss that is a mean over elements. In the first step, the batch of the first shard has no samples."""
    trainer = trainer_with(seeded(nn.Linear(4, 3)), backend, loss=nn.MSELoss())
    x, y = samples()[0], vectors(8, 12)[:, :3]
    totals = []
    for bounds in ([0, 0, 3, 6, 12], [0, 3, 5, 7, 12]):
        shards = [slice(*bounds[shard : shard + 2]) for shard in trainer.shards]
        totals.append(trainer.step([(x[shard], y[shard]) for shard in shards], 12.0).totals)
    trainer.close()
    return digest(trainer), totals


def test_the_first_batch_of_a_step_may_have_no_samples():
    alone = run_threads(1, with_an_empty_batch)
    assert run_threads(2, with_an_empty_batch) == alone * 2


def without_samples_on_rank_0(backend):
    """Take a step with a loss that is a mean over elements. The last rank has all samples."""
    trainer = trainer_with(seeded(nn.Linear(4, 3)), backend, shards=None, loss=nn.MSELoss())
    x, y = samples()[0], vectors(8, 12)[:, :3]
    mine = slice(0 if backend.rank == backend.size - 1 else 12, 12)
    result = trainer.step([(x[mine], y[mine])], 12.0)
    trainer.close()
    return digest(trainer), result.totals


def test_without_virtual_ranks_the_first_batch_with_targets_gives_the_number_of_targets_per_sample():
    assert run_threads(2, without_samples_on_rank_0) == run_threads(1, without_samples_on_rank_0) * 2


# -- BatchNorm over all ranks -----------------------------------------------------------------------------------------


def synchronized(backend):
    """Return a hash of a model with SyncBatchNorm, trained with as many ranks as shards."""
    generator = torch.Generator().manual_seed(1)
    layers = nn.Linear(6, 300), nn.BatchNorm1d(300), nn.Tanh(), nn.Linear(300, 3)
    model = seeded(nn.Sequential(*layers))
    synchronize_norms(model, backend)
    trainer = trainer_with(model, backend, shards=backend.size)
    for _ in range(4):
        batch = torch.randn(5 * backend.size, 6, generator=generator), torch.arange(5 * backend.size) % 3
        trainer.step(trainer.split(batch), float(len(batch[1])))
    trainer.close()
    return digest(trainer)


@worlds(("torch", 3), ("horovod", 3), ("shm", 3), ("torch", 4))
def test_synchronized_statistics_have_the_same_bits_over_every_transport(real):
    assert real(synchronized) == run_threads(real.size, synchronized)


def unsynchronized(backend):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    synchronize_norms(model, backend)
    with pytest.raises(ValueError, match=rf"'1' needs the statistics of all shards.* start 3 ranks, not {backend.size}"):
        trainer_with(model, backend, shards=3)
    for kind in (SyncBatchNorm, nn.SyncBatchNorm):
        with pytest.raises(ValueError, match="'1' needs the statistics of all shards at once"):
            trainer_with(nn.Sequential(nn.Linear(4, 3), kind(3)), backend, shards=backend.size)


def test_synchronized_statistics_need_a_rank_for_each_shard():
    run_threads(2, unsynchronized)


# -- saved and resumed ------------------------------------------------------------------------------------------------


def continued(backend, path, first_step, steps):
    """Resume from ``path`` unless ``first_step`` is 0, take ``steps`` steps, save to ``path``; return the state's hash."""
    case = CASES["narrow"]
    trainer = trainer_of(backend, case)
    if first_step:
        trainer.resume(path)
    for number in range(first_step, first_step + steps):
        step(trainer, case, number)
    trainer.save(path)
    trainer.close()
    return digest(trainer)


def test_a_saved_state_resumes_on_any_number_of_ranks(tmp_path):
    whole = run_threads(2, continued, str(tmp_path / "whole"), 0, 6)[0]
    for number, size in enumerate((4, 1, 3, 2, 6, 5)):
        found = run_threads(size, continued, str(tmp_path / "chain"), number, 1)
    assert found == [whole] * 5


# -- gradients that the program keeps ---------------------------------------------------------------------------------


def with_constant_gradients(backend, shards=8):
    """Train with two hooks: one returns a view of the program's own tensor, the other keeps the gradient of each shard."""
    model = seeded(nn.Linear(4, 3))
    constant, kept = torch.full((12,), 0.01), []
    model.weight.register_hook(lambda _: constant.view(3, 4))
    model.bias.register_hook(lambda grad: kept.append((grad, grad.clone())))
    trainer = trainer_with(model, backend, shards)
    before = model.weight.detach().clone()
    inputs = torch.arange(64.0).view(16, 4) / 64
    trainer.step(trainer.split((inputs, torch.arange(16) % 3)), 16.0)
    trainer.close()
    torch.testing.assert_close(before - model.weight.detach(), torch.full((3, 4), 0.1 * 0.01))
    assert torch.equal(constant, torch.full((12,), 0.01))
    assert all(torch.equal(grad, copy) for grad, copy in kept)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_partial_sums_are_not_added_to_gradients_that_the_program_keeps(size):
    run_threads(size, with_constant_gradients)


def with_gradients_of_zeros(backend):
    """Take steps in which all gradients are zeros, since there is only one class; return the weights."""
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    trainer = trainer_with(model, backend, clip_norm=1.0)
    for _ in range(2):
        trainer.step(trainer.split((torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))), 8.0)
    return model.weight.tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_clipped_gradients_of_zeros_leave_the_weights_unchanged(size):
    assert run_threads(size, with_gradients_of_zeros) == [[[1.0, 1.0, 1.0]]] * size
