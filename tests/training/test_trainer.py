"""``Trainer``: comparisons with training in one process and with torch, and use with a user's model and loader."""

from __future__ import annotations

import copy
import gc
import math
import os
import warnings
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dualtrain import Trainer, UserError, connect
from dualtrain.batchnorm import RankNorm, synchronize_norms
from dualtrain.config import parse
from dualtrain.errors import DivergedError
from dualtrain.models.freezing import freeze_backbone
from dualtrain.trainer.objective import CrossEntropy, metrics, training_metrics
from dualtrain.trainer.precision import Precision
from dualtrain.training.assemble import compiled, determinism
from dualtrain.training.optimizers import make_optimizer, make_schedule, optimizer_names, scaled_lr
from tests.forked import ROOT, run
from tests.models_for_tests import seeded
from tests.threads import run_threads


def data(samples: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(samples, 6, generator=draw), torch.randint(0, 4, (samples,), generator=draw)


def net(seed: int = 0) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)), seed)


def part_of(backend, tensors):
    """Return this rank's samples. Rank 0 has more samples than any other rank."""
    cut = [0, *(len(tensors[0]) - (backend.size - 1 - rank) * 3 for rank in range(backend.size))]
    return [tensor[cut[backend.rank] : cut[backend.rank + 1]] for tensor in tensors]


def train_in_one_process(
    model: nn.Module, optimizer, steps: int, change=lambda model: None, loss=functional.cross_entropy
) -> nn.Module:
    """Train ``model`` in one process with all samples in each step, and return it.

    Call ``change(model)`` before each optimizer step, for example to clip the gradients.
    """
    inputs, targets = data()
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        change(model)
        optimizer.step()
    return model


def assert_close(one: nn.Module, other: nn.Module, tolerance: float = 1e-5) -> None:
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, atol=tolerance, rtol=tolerance, msg=name)


def unequal_batches(backend) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    trainer = Trainer(model, optimizer, backend=backend, clip_norm=0.1)
    inputs, targets = part_of(backend, data())
    for _ in range(4):
        passes = list(zip(inputs.tensor_split(2), targets.tensor_split(2), strict=True))
        # ``expected`` is not the number of samples, so the trainer must rescale the gradients.
        done = trainer.step(passes, expected=40.0, control_flags=(1.0, float(backend.rank == 0), 0.0))
        assert done.control_flags == [float(backend.size), 1.0, 0.0]
        assert done.sums[1].item() == 23
    reference = net()
    train_in_one_process(
        reference,
        torch.optim.SGD(reference.parameters(), 0.5, momentum=0.9),
        4,
        change=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    )
    assert_close(reference, model)


def test_a_clipped_step_of_ranks_with_unequal_batches_and_several_passes_equals_that_of_one_process(spmd):
    spmd(unequal_batches)


def idle_rank(backend) -> float:
    model = net()
    trainer = Trainer(model, torch.optim.Adam(model.parameters(), 0.1), backend=backend, amp="fp16")
    mine = [data(8)] if backend.rank == backend.size - 1 else []
    return trainer.step(mine, 8.0).loss


def test_a_rank_without_samples_takes_part(spmd):
    losses = spmd(idle_rank)
    assert losses == [pytest.approx(losses[0])] * spmd.size


def overflow(backend) -> tuple[float, list[float], list[float]]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 1.0), lambda y, _: y.mean(), backend=backend, amp="fp16")
    before = trainer.precision.scaler.get_scale()
    # On the last rank, the scaled loss is finite, but the gradient is not.
    last = backend.rank == backend.size - 1
    trainer.step([(torch.full((1, 1), 6e4 if last else 1.0), torch.zeros(1))], backend.size)
    trainer.step([(torch.full((1, 1), 6e4 if last else 1.0), torch.zeros(1))], backend.size)
    weight = model.weight.flatten().tolist()
    return trainer.precision.scaler.get_scale() / before, weight, [trainer.precision.scaler.get_scale()]


def test_an_overflow_on_one_rank_skips_the_step_on_all(spmd):
    results = spmd(overflow)
    assert results == results[:1] * spmd.size
    ratio, weight, _ = results[0]
    assert ratio < 1
    assert weight == [1.0]


def averages(backend) -> None:
    model, decay = net(), 0.75
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), backend=backend, ema=decay)
    kept = copy.deepcopy(model)
    for number in range(3):
        trainer.step([tuple(part_of(backend, data()))], 23.0)
        for mean, now in zip(kept.parameters(), model.parameters(), strict=True):
            mean.data = now.data.clone() if number == 0 else decay * mean.data + (1 - decay) * now.data
    assert_close(kept, trainer.evaluated)
    loss = functional.cross_entropy(kept(data()[0]), data()[1]).item()
    assert trainer.evaluate([part_of(backend, data())])["val_loss"] == pytest.approx(loss, abs=1e-6)


def test_averaged_weights_are_evaluated(typical):
    typical(averages)


def compressed(backend) -> list[float]:
    model = net()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, compress="fp16")
    done = trainer.step([tuple(part_of(backend, data()))], 23.0)
    reference = net()
    train_in_one_process(reference, torch.optim.SGD(reference.parameters(), 0.1), 1)
    assert_close(reference, model, 1e-3)
    return [done.loss, functional.cross_entropy(net()(data()[0]), data()[1]).item()]


def test_compressed_gradients_leave_the_metrics_exact(typical):
    for loss, exact in typical(compressed):
        assert loss == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_gradients_that_do_not_fit_into_fp16_are_not_used(amp):
    def body(backend) -> tuple[str, bool]:
        model = net()
        before = copy.deepcopy(model)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, compress="fp16", amp=amp)
        x, y = part_of(backend, data())
        refusal = ""
        try:
            trainer.step([(x, y)], 1e-5)  # an estimate that is far too low
        except DivergedError as error:
            refusal = str(error)
        return refusal, all(map(torch.equal, model.parameters(), before.parameters()))

    message = (
        'gradients that were sent in fp16 (compress="bf16" has a larger range) became infinite or not a number on all ranks'
    )
    assert run_threads(2, body) == [("" if amp == "fp16" else message, True)] * 2  # the scaler skips the step


def test_sparse_gradients_are_sent_in_their_own_dtype():
    def body(backend) -> torch.Tensor:
        model = nn.EmbeddingBag(9, 4, sparse=True)
        nn.init.ones_(model.weight)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 1.0), backend=backend, compress="fp16")
        trainer.step([(torch.arange(6).view(2, 3), torch.tensor([0, 1]))], 2.0 * backend.size)
        return model.weight.detach()

    one, other = run_threads(2, body)
    assert torch.equal(one, other)
    torch.testing.assert_close(one, run_threads(1, body)[0])


def test_fit_sends_the_average_over_tokens_in_fp16():
    """An average over samples would multiply each gradient by the number of tokens of a sample: too much for fp16."""

    def body(backend) -> list[float]:
        model = net()
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, compress="fp16")
        x = torch.full((1, 300_000, 6), 10.0)
        y = torch.zeros(1, 300_000, dtype=torch.int64)
        y[:, ::2] = -100
        return [step["loss"] for step in trainer.fit([(x, y)], 2)]

    first, second = run_threads(2, body)[0]
    assert second < first


def net_with_norm() -> nn.Module:
    model = net()
    return nn.Sequential(model[0], nn.BatchNorm1d(16), *model[1:])


def whole_norm(backend) -> None:
    model, reference = net_with_norm(), net_with_norm()
    synchronize_norms(model, backend)
    assert isinstance(model[1], RankNorm)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), backend=backend, ema=0.5)
    for _ in range(3):
        trainer.step([tuple(part_of(backend, data()))], 23.0)
    assert_close(train_in_one_process(reference, torch.optim.SGD(reference.parameters(), 0.5), 3), model)
    assert trainer.evaluate([part_of(backend, data())])["val_loss"] > 0


def test_sync_batchnorm_equals_batchnorm_in_one_process(spmd):
    spmd(whole_norm)


def too_few_values(backend, samples: int) -> None:
    model = nn.Sequential(nn.BatchNorm1d(6))
    synchronize_norms(model, backend)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=rf"Expected more than 1 value per channel when training, .* and {samples} over all"
    ):
        model(torch.ones(samples if backend.rank == 0 else 0, 6))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # All ranks have called the same number of collective operations.
    assert model(torch.ones(1, 6) * backend.rank).shape == (1, 6)


@pytest.mark.parametrize("samples", [0, 1])
def test_sync_batchnorm_refuses_fewer_than_two_values_per_channel_on_all_ranks(samples):
    run_threads(2, too_few_values, samples)


def test_frozen_batchnorm_layers_are_not_synchronized():
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4))
    freeze_backbone(model, "1")
    with connect("local") as backend:
        synchronize_norms(model, backend)
    assert not isinstance(model[0], RankNorm)


def own_loader(backend, folder: str) -> list[float]:
    inputs, targets = part_of(backend, data())
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = lr_scheduler.StepLR(optimizer, 2)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), backend=backend, schedule=schedule)
    # Rank 0 has 17 samples or more, and every other rank has 3: the other ranks run out of batches first.
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=4)
    history = trainer.fit(loader, epochs=2)
    trainer.save(f"{folder}/state.safetensors")
    kept = trainer.evaluate(loader)
    after = trainer.fit(loader)
    trainer.resume(f"{folder}/state.safetensors")
    assert trainer.evaluate(loader) == kept
    assert trainer.fit(loader) == after
    return [values["loss"] for values in history] + [kept["val_loss"], kept["val_accuracy"]]


def test_fit_works_with_a_loader_of_the_user_and_after_a_resume(spmd, tmp_path):
    results = spmd(own_loader, str(tmp_path))
    assert results == results[:1] * spmd.size
    first, second, val_loss, accuracy = results[0]
    assert second < first
    assert 0 <= accuracy <= 1
    assert val_loss < first


def no_samples(backend) -> list[dict[str, float]]:
    model = net()
    return Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend).fit([], epochs=1)


def test_fit_with_an_empty_loader_ends_with_a_loss_of_nan(typical):
    assert all(math.isnan(history[0]["loss"]) for history in typical(no_samples))


@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (nn.CrossEntropyLoss(ignore_index=0), (9, 4)),
        (nn.CrossEntropyLoss(label_smoothing=0.2), (9, 4)),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0])), (9, 4)),
        (nn.CrossEntropyLoss(), (3, 4, 4)),
        (nn.CrossEntropyLoss(), (3, 4, 2, 5)),
        (nn.MSELoss(), (9, 4)),
    ],
)
def test_a_loss_of_torch_has_the_same_value_as_in_torch(loss, shape):
    outputs = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    drawn = torch.randint(0, 4, (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(4))
    targets = torch.zeros(shape) if isinstance(loss, nn.MSELoss) else drawn
    model = nn.Identity()
    model.scale = nn.Parameter(torch.ones(()))
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD([model.scale], 0.1), loss, backend=backend)
        assert trainer.evaluate([(outputs, targets)])["val_loss"] == pytest.approx(loss(outputs, targets).item(), abs=1e-6)


class Margin:
    """An objective of the user's own. It leaves out samples with target 0, and counts all others as top-5 hits."""

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counts = targets != 0
        losses = functional.multi_margin_loss(outputs, targets, reduction="none") * counts
        weight = counts.sum()
        correct = ((outputs.argmax(1) == targets) & counts).sum()
        return losses.sum() / weight, torch.stack([losses.sum().detach(), weight, correct, weight]).double()


def own_objective(backend) -> tuple[list[float], dict[str, float]]:
    model = net()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), Margin(), backend=backend)
    batch = tuple(part_of(backend, data()))
    done = trainer.step([batch], 23.0)
    reference = net()
    train_in_one_process(reference, torch.optim.SGD(reference.parameters(), 0.1), 1, loss=lambda *both: Margin()(*both)[0])
    assert_close(reference, model)
    return done.totals, trainer.evaluate([batch])


def test_a_loss_of_any_class_that_returns_a_pair_is_used_as_an_objective(spmd):
    inputs, targets = data()
    loss, sums = Margin()(net()(inputs), targets)
    for totals, values in spmd(own_objective):
        assert totals == pytest.approx(sums.tolist())
        assert 0 < values["val_loss"] < loss
        assert values["val_top5"] == 1


def test_a_loss_that_returns_neither_a_mean_nor_a_pair_is_refused():
    model = net()
    for returned in ((torch.ones(()),), (torch.ones(()), [1.0, 2.0]), (torch.ones(()), 0.5)):
        with connect("local") as backend:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            trainer = Trainer(model, optimizer, lambda *_, result=returned: result, backend=backend)
            with pytest.raises(TypeError, match="return the mean loss, or this pair"):
                trainer.step([data(4)], 4.0)


@pytest.mark.parametrize(
    ("loss", "accepted"),
    [
        (torch.nn.MSELoss(reduction="sum"), torch.nn.MSELoss()),
        (torch.nn.CrossEntropyLoss(reduction="sum"), torch.nn.CrossEntropyLoss(reduction="mean")),
        (torch.nn.BCEWithLogitsLoss(reduction="none"), torch.nn.KLDivLoss(reduction="batchmean")),
        (partial(functional.mse_loss, reduction="sum"), partial(functional.mse_loss, reduction="mean")),
        (partial(functional.cross_entropy, reduction="sum"), partial(Margin(), reduction="sum")),
    ],
)
def test_a_loss_of_torch_that_does_not_return_a_mean_is_refused(loss, accepted):
    model = net()
    with connect("local") as backend:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(ValueError, match=r"the loss has reduction='(sum|none)'.* use reduction=\"mean\""):
            Trainer(model, optimizer, loss, backend=backend)
        Trainer(model, optimizer, accepted, backend=backend)


def test_outputs_with_other_axes_than_the_targets_are_refused():
    """An RNN without ``batch_first`` returns such outputs: logits for each target, but with time and batch exchanged."""
    model = nn.Linear(4, 3)
    with connect("local") as backend:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = Trainer(model, optimizer, backend=backend, forward=lambda x: model(x).transpose(0, 1))
        batch = torch.randn(4, 5, 4), torch.zeros(4, 5, dtype=torch.int64)
        for use in (lambda: trainer.step([batch], 20.0), lambda: trainer.evaluate([batch])):
            with pytest.raises(UserError, match=r"outputs have the shape \(5, 4, 3\), and the targets \(4, 5\): return"):
                use()
        # With one sample, an exchange of the axes does not change the order of the elements.
        trainer.step([(torch.randn(1, 5, 4), torch.zeros(1, 5, dtype=torch.int64))], 5.0)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_tensor_on_the_meta_device_is_refused(kind):
    model = net()
    getattr(model, f"register_{kind}")("empty", nn.Parameter(torch.zeros(3, device="meta")))
    with connect("local") as backend, pytest.raises(ValueError, match="the model's 'empty' is on the meta device"):
        Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)


@pytest.mark.parametrize("amp", ["bf16", "off"])
def test_an_autocast_of_the_caller_has_no_effect_on_steps(amp):
    losses = []
    for outer in (None, True, False):
        model = net()
        with connect("local") as backend:
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), amp=amp, backend=backend)
            with nullcontext() if outer is None else torch.autocast("cpu", torch.bfloat16, enabled=outer):
                losses.append([trainer.step([data(8)], 8.0).loss for _ in range(4)])
    assert losses[0] == losses[1] == losses[2]
    assert len(set(losses[0])) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_norm": -1.0}, "clip_norm=-1.0 is not above 0"),
        ({"clip_norm": math.nan}, "clip_norm=nan is not above 0"),
        ({"clip_norm": "1"}, "clip_norm='1' is not a number: give one, or None"),
        ({"clip_norm": [1]}, r"clip_norm=\[1\] is not a number"),
        ({"clip_norm": 10**400}, "clip_norm is too large for a float: give a smaller number, or None"),
        ({"clip_norm": torch.ones(2)}, "is not a number"),
        ({"ema": "0.9"}, "ema='0.9' is not a number"),
        ({"ema": True}, "ema=True is not a number"),
        ({"ema": math.nan}, "ema=nan is not from 0 to 1"),
        ({"amp": ["bf16"]}, r"amp=\['bf16'\] is not known"),
        ({"virtual_ranks": True}, "virtual_ranks=True is not a whole number"),
        ({"virtual_ranks": 10**30}, "is more than 65536"),
        ({"virtual_ranks": 2, "seed": 1.5}, "seed=1.5 is not a whole number"),
        ({"compress": "int8"}, "compress='int8' is not known"),
        ({"compress": ["fp16"]}, r"compress=\['fp16'\] is not known"),
        ({"virtual_ranks": 2.5}, "virtual_ranks=2.5 is not a whole number"),
        ({"schedule": lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), 1.0), 1)}, "a different optimizer"),
    ],
)
def test_invalid_options_are_refused(options, words):
    model = net()
    with connect("local") as backend, pytest.raises(ValueError, match=words):
        Trainer(model, torch.optim.SGD(model.parameters(), 0.5), backend=backend, **options)


def test_arguments_that_a_trainer_cannot_use_are_refused():
    model = net()
    with pytest.raises(TypeError, match=r"backend is a NoneType: give what connect\(\) returns"):
        Trainer(model, torch.optim.SGD(model.parameters(), 0.5), backend=None)
    with connect("local") as backend, pytest.raises(TypeError, match="model is a function: give a module"):
        Trainer(lambda x: x, torch.optim.SGD(model.parameters(), 0.5), backend=backend)
    with connect("local") as backend, pytest.raises(TypeError, match="optimizer is a generator: give an optimizer"):
        Trainer(model, model.parameters(), backend=backend)
    with connect("local") as backend, pytest.raises(ValueError, match="LBFGS needs a closure"):
        Trainer(model, torch.optim.LBFGS(model.parameters()), backend=backend)
    for loss, words in (
        (nn.MSELoss, r"the class MSELoss: give an instance of it, such as MSELoss\(\)"),
        ("mse", "the loss is 'mse', which cannot be called"),
    ):
        with connect("local") as backend, pytest.raises(TypeError, match=words):
            Trainer(model, torch.optim.SGD(model.parameters(), 0.5), loss, backend=backend)
    for options, words in (
        ({"forward": "net"}, "forward is 'net', which cannot be called: give a function"),
        ({"measure": nn.MSELoss}, "measure is the class MSELoss: give an instance of it, or a function"),
        ({"schedule": "cosine"}, "schedule is 'cosine', not a scheduler: give one that has the trainer's optimizer"),
        ({"schedule": torch.optim.lr_scheduler.StepLR}, r"schedule is <class '.*StepLR'>, not a scheduler"),
    ):
        with connect("local") as backend, pytest.raises(TypeError, match=words):
            Trainer(model, torch.optim.SGD(model.parameters(), 0.5), backend=backend, **options)


@pytest.mark.parametrize(
    "expected",
    [0.0, -1.0, math.nan, math.inf, [3], None, torch.ones(2), torch.tensor(math.inf), pytest.param(10**400, id="huge")],
)
def test_the_argument_expected_must_be_positive_and_finite(expected):
    model = net()
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), backend=backend)
        with pytest.raises(ValueError, match="is not a finite number above 0"):
            trainer.step([data(8)], expected)


def test_epochs_and_states_of_wrong_types_are_refused():
    model = net()
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), backend=backend)
        with pytest.raises(ValueError, match=r"epochs=1\.5 is not a whole number: give one"):
            trainer.fit([data(8)], 1.5)
        assert len(trainer.fit([data(8)], torch.tensor(2))) == 2
        with pytest.raises(TypeError, match="state is of type NoneType: give what state_dict"):
            trainer.load_state_dict(None)
        with pytest.raises(ValueError, match="the state has no 'optimizer': give what state_dict"):
            trainer.load_state_dict({"model": model.state_dict()})
        state = trainer.state_dict()
        for malformed in (5, {"state": {}, "param_groups": 5}, {**state["optimizer"], "state": {0: 5}}):
            with pytest.raises(ValueError, match=r"the state's 'optimizer' cannot be loaded \(.*\): give what state_dict"):
                trainer.load_state_dict({**state, "optimizer": malformed})
        del state["ranks"]
        with pytest.raises(ValueError, match="the state has no 'ranks': give what state_dict"):
            trainer.load_state_dict(state)


@pytest.mark.parametrize("compress", ["none", "bf16"])
def test_control_flags_are_refused_if_they_are_not_three_numbers(compress):
    model = net()
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), backend=backend, compress=compress)
        for flags in ((1.0, 0.0), (1.0,) * 4):
            with pytest.raises(ValueError, match=f"control_flags has {len(flags)} numbers: give 3"):
                trainer.step([data(8)], 8.0, flags)
        for flags in (None, 1.0, (None, 0.0, 0.0), "123", ["1", "2", "3"], torch.zeros(3, 2), (10**400, 0, 0)):
            with pytest.raises(ValueError, match="does not consist of numbers: give 3, such as zeros"):
                trainer.step([data(8)], 8.0, flags)
        assert trainer.step([data(8)], 8.0, torch.tensor([1.0, 0.0, 2.0])).control_flags == [1.0, 0.0, 2.0]


def test_a_trainer_is_freed_without_the_garbage_collector():
    model = net()
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), backend=backend)
        trainer.close()
        reference = weakref.ref(trainer)
        gc.disable()
        try:
            del trainer
            assert reference() is None
        finally:
            gc.enable()


def test_clip_norm_applies_to_the_unscaled_gradients_with_fp16():
    weights = []
    for clip_norm in (None, 100.0):  # 100 is between the gradients' norm and the scaled gradients' norm
        model = net()
        with connect("local") as backend:
            optimizer = torch.optim.SGD(model.parameters(), 0.5)
            trainer = Trainer(model, optimizer, amp="fp16", clip_norm=clip_norm, backend=backend)
            trainer.precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
            trainer.step([data(8)], 8.0)
        weights.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *weights))
    assert not any(map(torch.equal, weights[0], net().parameters()))  # the scaler has not skipped the step


def own_loss(outputs, targets):
    """A loss of the user's own: its mean over no samples is not a number."""
    return (outputs[:, 0] - targets).square().mean()


@pytest.mark.parametrize("call", ["fit", "step"])
@pytest.mark.parametrize("loss", [nn.NLLLoss(), own_loss])
def test_an_empty_batch_changes_no_weights(loss, call):
    weights = []
    for batches in ([data(8), data(0), data(5)], [data(8), data(5)]):
        model = net()
        with connect("local") as backend:
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), loss, backend=backend)
            trainer.fit(batches) if call == "fit" else trainer.step(batches, 13.0)
        weights.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *weights))


def an_empty_batch_with_sync_batchnorm(backend) -> None:
    """Train on a batch that is empty on all ranks but the first; compare with one process that has rank 0's samples."""

    model, reference = net_with_norm(), net_with_norm()
    synchronize_norms(model, backend)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), own_loss, backend=backend)
    trainer.fit([data(0) if backend.rank else data()])
    assert_close(train_in_one_process(reference, torch.optim.SGD(reference.parameters(), 0.5), 1, loss=own_loss), model)


def test_a_batch_with_sync_batchnorm_may_be_empty_on_some_ranks():
    run_threads(2, an_empty_batch_with_sync_batchnorm)


def steps_with_an_empty_first_batch(backend, expected: list[torch.Tensor]):
    """Take three steps. Rank 1 has no samples, so it must get the number of targets per sample from rank 0."""
    model = net()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), nn.CrossEntropyLoss(), backend=backend)
    for _ in range(2):  # in these two steps, no rank has a target
        trainer.step([data(0)], 1.0)
    trainer.step([data(0) if backend.rank else data(8)], 8.0)
    torch.testing.assert_close(list(model.parameters()), expected)


def test_the_first_batch_may_be_empty_on_some_ranks():
    model = net()
    with connect("local") as backend:
        Trainer(model, torch.optim.SGD(model.parameters(), 0.5), nn.CrossEntropyLoss(), backend=backend).step(
            [data(8)], 8.0
        )
    run_threads(2, steps_with_an_empty_first_batch, [p.detach() for p in model.parameters()])


def refilled(backend, count: int):
    """Yield batches for this rank that lie in the same memory, one after another."""
    inputs, targets = (torch.zeros_like(tensor) for tensor in data(8))
    for start in range(count):
        for buffer, tensor in zip((inputs, targets), data(64), strict=True):
            buffer.copy_(tensor[backend.rank :: backend.size].roll(-3 * start, 0)[:8])
        yield inputs, targets


def reads_from_refilled_memory(backend) -> list[list[torch.Tensor]]:
    def copies(count: int):
        return [(inputs.clone(), targets.clone()) for inputs, targets in refilled(backend, count)]

    results = []
    for read in (copies, partial(refilled, backend)):
        model, sharded = net(), net(1)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), backend=backend)
        trainer.fit(read(5), epochs=1)
        trainer.step(read(3), 24.0 * backend.size)
        trainer.close()
        trainer = Trainer(sharded, torch.optim.SGD(sharded.parameters(), 0.5), backend=backend, virtual_ranks=2)
        trainer.step([read(3) for _ in trainer.shards], 48.0)
        trainer.close()
        results.append([p.detach() for p in (*model.parameters(), *sharded.parameters())])
    assert all(map(torch.equal, *results))
    return results[1]


def test_batches_may_lie_in_memory_that_the_loader_fills_again(typical):
    typical(reads_from_refilled_memory)


def adversaries(backend, virtual_ranks: int | None) -> list[torch.Tensor]:
    """Train two models, each with its own trainer. The second trainer's loss also gives gradients to the first model."""
    critic, maker = seeded(nn.Linear(6, 4)), seeded(nn.Linear(6, 6), 1)
    options = {"backend": backend, "virtual_ranks": virtual_ranks}
    first = Trainer(critic, torch.optim.SGD(critic.parameters(), 0.5), **options)
    second = Trainer(
        maker,
        torch.optim.SGD(maker.parameters(), 0.5),
        lambda outputs, _: -functional.softmax(critic(outputs), 1)[:, 0].mean(),
        **options,
    )
    for _ in range(3):
        with torch.no_grad():
            generated = maker(data(8)[0]), data(8)[1]
        for trainer, whole in ((first, generated), (second, data(8))):
            if virtual_ranks:
                trainer.step(trainer.split(whole), 8.0)
            else:  # rank 0 has one backward pass, and every other rank has two
                mine = [tensor[backend.rank :: backend.size] for tensor in whole]
                passes = zip(*(tensor.tensor_split(1 + (backend.rank > 0)) for tensor in mine), strict=True)
                trainer.step(list(passes), 8.0)
    first.close()
    second.close()
    return [p.detach() for p in (*critic.parameters(), *maker.parameters())]


@pytest.mark.parametrize("virtual_ranks", [None, 3])
def test_the_loss_of_a_trainer_may_use_the_model_of_another_one(virtual_ranks):
    with connect("local") as backend:
        reference = adversaries(backend, virtual_ranks)
    for ranks in (2, 3):
        for weights in run_threads(ranks, adversaries, virtual_ranks):
            exact = {"rtol": 0, "atol": 0} if virtual_ranks else {}
            torch.testing.assert_close(weights, reference, **exact)


def test_an_iterator_that_is_exhausted_in_the_second_epoch_is_refused():
    def body(backend) -> None:
        model = net()
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)
        with pytest.raises(
            ValueError, match=r"no rank's loader has batches in epoch 2 of this fit\(\): a generator can be"
        ):
            trainer.fit((batch for batch in [data(4)] * 2), epochs=3)
        trainer.close()

    run_threads(2, body)


class Masked:
    """A loader of one batch. In the second epoch, no target counts."""

    epochs = 0

    def __iter__(self):
        self.epochs += 1
        inputs, targets = data(4)
        yield inputs, torch.full_like(targets, -100) if self.epochs == 2 else targets


def test_fit_continues_after_an_epoch_in_which_no_target_counts():
    def body(backend) -> list[float]:
        model = net()
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)
        return [epoch["loss"] for epoch in trainer.fit(Masked(), epochs=3)]

    for first, second, third in run_threads(2, body):
        assert math.isnan(second)
        assert third < first


class Sized:
    """A loader of ``batches`` batches. ``len()`` of it returns ``length``, or fails if ``length`` is ``None``."""

    def __init__(self, batches: int, length: object) -> None:
        self.batches, self.length = batches, length

    def __len__(self) -> object:
        if self.length is None:
            raise AttributeError("no length")
        return self.length

    def __iter__(self):
        return iter([data(4)] * self.batches)


@pytest.mark.parametrize(("length", "steps"), [(5, 5), (None, 6), (2, 5), (9, 6)])
def test_fit_takes_a_step_without_samples_only_if_the_loader_has_no_length_or_one_that_is_too_large(length, steps):
    """A rank with fewer batches takes part in all steps; each sample counts once."""

    def body(backend):
        model, done = net(), []
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)
        step = trainer.step
        trainer.step = lambda *arguments: done.append(step(*arguments)) or done[-1]
        trainer.fit(Sized(5 - 2 * backend.rank, length and max(0, length - 2 * backend.rank)))
        trainer.close()
        return len(done), sum(each.totals[1] for each in done)

    assert run_threads(2, body) == [(steps, 32.0)] * 2


class Listed(Sized):
    """A loader of the given batches. ``len()`` of it returns ``length``, or fails if ``length`` is ``None``."""

    def __init__(self, batches: list[tuple[torch.Tensor, torch.Tensor]], length: object) -> None:
        super().__init__(len(batches), length)
        self.list = batches

    def __iter__(self):
        return iter(self.list)


@pytest.mark.parametrize("length", [6, None, 9])
@pytest.mark.filterwarnings("error")
def test_fit_advances_the_schedule_in_steps_without_a_target_but_not_in_steps_without_a_batch(length):
    def body(backend) -> int:
        masked = (0, 3) if backend.rank else (0, 3, 4)  # batch 4 has targets only on rank 1
        batches = [data(4) for _ in range(6)]
        batches = [(x, torch.full_like(y, -100) if number in masked else y) for number, (x, y) in enumerate(batches)]
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = lr_scheduler.StepLR(optimizer, 1)
        trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), backend=backend, schedule=schedule)
        trainer.fit(Listed(batches, length))
        return schedule.last_epoch

    assert run_threads(2, body) == [6, 6]


@pytest.mark.parametrize("virtual_ranks", [None, 2])
@pytest.mark.filterwarnings("error")
def test_a_step_without_a_target_changes_nothing(virtual_ranks):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    with connect("local") as backend:
        trainer = Trainer(model, optimizer, backend=backend, schedule=schedule, virtual_ranks=virtual_ranks)
        batch = data(4)[0], torch.full((4,), -100)
        trainer.step([batch] if virtual_ranks is None else trainer.split(batch), 4)
        assert optimizer.param_groups[0]["lr"] == 0.1
        trainer.advance_schedule()
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.param_groups[0]["lr"] == 0.05  # without a warning of a wrong order of calls


class Reassigned(nn.Linear):
    """A layer whose forward puts a new tensor into its buffer."""

    def __init__(self):
        super().__init__(6, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + 1.0
        return super().forward(x) * self.seen


def test_an_evaluation_restores_a_buffer_that_forward_replaces():
    model = Reassigned()
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), backend=backend)
        trainer.step([data(8)], 8.0)
        trainer.evaluate([data(8)])
        assert model.seen.item() == 1.0


def old_names(backend) -> list[float]:
    model = net()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)
    with pytest.warns(DeprecationWarning, match="use control_flags"):
        done = trainer.step([data(4)], 4.0 * backend.size, news=(1.0, 0.0, 0.0))
    with pytest.warns(DeprecationWarning, match=r"use Step\.control_flags"):
        return done.news


def test_deprecated_names_of_0_1_0_work_with_a_warning():
    with connect("local") as backend:
        assert old_names(backend) == [1.0, 0.0, 0.0]


def test_a_batch_that_is_not_a_pair_is_refused_and_an_evaluation_keeps_the_models_mode():
    model = net()
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)
        for batch, found in (
            ({"x": torch.ones(1)}, "dict"),
            ((torch.ones(1),), "tuple of Tensor"),
            ([tensor.numpy() for tensor in data(4)], "list of ndarray, ndarray"),
            ("text", "str"),
            ((), "tuple"),
        ):
            with pytest.raises(TypeError, match=rf"pair of tensors, \(inputs, targets\), not {found}: give a DataLoader"):
                trainer.evaluate([batch])
        for use in (trainer.fit, trainer.evaluate):
            with pytest.raises(TypeError, match="targets of a batch have no dimension: give a DataLoader of the dataset"):
                use(TensorDataset(*data(4)))
        model.eval()
        trainer.evaluate([data(4)])
        assert not model.training


def bad_loss(backend) -> str:
    model = net()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)
    inputs, targets = data(4)
    before = [p.detach().clone() for p in model.parameters()]
    if backend.rank == 0:
        inputs = inputs * float("inf")
    with pytest.raises(DivergedError) as stop:
        trainer.step([(inputs, targets)] * 2, 8.0 * backend.size)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    return str(stop.value)


def test_a_loss_that_is_not_finite_is_attributed_to_its_rank(typical):
    messages = typical(bad_loss)
    assert set(messages) == {"the loss became infinite or not a number on rank 0"}


def bad_loss_in_a_group(backend) -> str | None:
    group = backend.group([1, 3])
    return None if group is None else bad_loss(group)


def test_a_loss_that_is_not_finite_in_a_group_is_attributed_to_its_rank_in_the_job():
    _, first, _, last = run_threads(4, bad_loss_in_a_group)
    assert first == last == "the loss became infinite or not a number on rank 1"


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_targets_may_be_a_column(grad_enabled):
    logits, targets = torch.randn(4, 7), torch.randint(0, 7, (4, 1))
    with torch.set_grad_enabled(grad_enabled):
        mean, sums = CrossEntropy()(logits, targets)
    assert mean.item() == pytest.approx(functional.cross_entropy(logits, targets[:, 0]).item())
    assert sums[1] == 4


@pytest.mark.parametrize("count", [50, 300])
@pytest.mark.parametrize("classes", [2, 7])
def test_training_and_evaluation_count_the_same_correct_predictions(classes, count):
    torch.manual_seed(0)
    logits, targets = torch.randn(count, classes, requires_grad=True), torch.randint(0, classes, (count,))
    targets[::7] = -100
    loss, trained = CrossEntropy()(logits, targets)
    with torch.no_grad():
        _, evaluated = CrossEntropy()(logits, targets)
    assert trained == [pytest.approx(evaluated[0]), *evaluated[1:3], 0]  # training does not count the top 5
    assert evaluated[1] == (targets != -100).sum()
    assert evaluated[3] >= evaluated[2] > 0
    assert set(training_metrics(trained, "train_")) == {"train_loss", "train_accuracy"}
    assert loss.requires_grad


def test_an_outer_autocast_is_off_in_a_trainer_without_mixed_precision():
    with torch.autocast("cpu", torch.bfloat16):
        for context in Precision("off", torch.device("cpu")).contexts():  # of the forward pass, and of the backward pass
            with context:
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_ignored_tokens_are_left_out():
    logits, targets = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    targets[0, :] = -100
    mean, sums = CrossEntropy()(logits, targets)
    assert mean.item() == pytest.approx(functional.cross_entropy(logits[1:].flatten(0, 1), targets[1:].flatten()).item())
    assert sums[1] == 10
    top5 = logits[1:].topk(5, -1).indices
    assert sums[3] == (top5 == targets[1:, :, None]).sum().item()
    nothing, none = CrossEntropy()(logits.requires_grad_(), torch.full((3, 5), -100))
    nothing.backward()
    assert none == [0, 0, 0, 0]
    assert logits.grad.abs().sum() == 0
    assert all(math.isnan(value) for value in metrics(none, "val_").values())


def rates(arguments: list[str], steps: int) -> list[float]:
    config = parse(["--lr", "0.5", "--global-batch-size", "8", *arguments])
    optimizer = make_optimizer(config.step, net(), config.schedule.lr)
    schedule = make_schedule(config.schedule, optimizer, config.schedule.lr, steps)
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return values


def torch_rates(build, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(net().parameters(), 0.5)
    schedule = build(optimizer)
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule.step()
    return values


@pytest.mark.parametrize(
    ("arguments", "build"),
    [
        (["--schedule", "constant"], lambda o: lr_scheduler.ConstantLR(o, 1.0)),
        (["--schedule", "cosine", "--lr-min", "0.1"], lambda o: lr_scheduler.CosineAnnealingLR(o, 20, 0.1)),
        (["--schedule", "polynomial", "--lr-power", "2"], lambda o: lr_scheduler.PolynomialLR(o, 20, 2.0)),
        (["--schedule", "step", "--lr-step", "7", "--lr-gamma", "0.5"], lambda o: lr_scheduler.StepLR(o, 7, 0.5)),
        (["--schedule", "multistep", "--lr-milestones", "4,9"], lambda o: lr_scheduler.MultiStepLR(o, [4, 9])),
        (["--schedule", "one-cycle"], lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20, cycle_momentum=False)),
    ],
)
def test_schedules_give_the_learning_rates_of_torchs_schedulers(arguments, build):
    assert rates(arguments, 20) == pytest.approx(torch_rates(build, 20), abs=1e-9)


def test_the_warmup_raises_the_learning_rate_linearly_to_that_of_the_schedule():
    assert rates(["--warmup-steps", "4"], 6) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])


def test_the_computation_of_a_scaled_learning_rate_is_reported():
    linear = parse(["--lr", "0.1", "--batch-size", "32", "--lr-scale", "linear"])
    assert scaled_lr(linear.schedule, linear.step, 4) == (pytest.approx(0.4), "learning rate 0.1 × 128/32 = 0.4 (linear)")
    root = parse(["--lr", "0.1", "--global-batch-size", "64", "--lr-batch", "16", "--lr-scale", "sqrt"])
    assert scaled_lr(root.schedule, root.step, 2) == (pytest.approx(0.2), "learning rate 0.1 × √(64/16) = 0.2 (sqrt)")
    default = parse([])
    assert scaled_lr(default.schedule, default.step, 4)[0] == 0.05


@pytest.mark.parametrize("name", sorted(optimizer_names()))
def test_every_optimizer_of_torch_steps(name):
    model = nn.Sequential(nn.Linear(6, 4, bias=False))  # Muon accepts matrices only
    optimizer = make_optimizer(parse(["--optimizer", name, "--global-batch-size", "8"]).step, model, 0.01)
    before = model[0].weight.detach().clone()
    model(data()[0]).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def schedule_of(arguments):
    config = parse(arguments)
    return make_schedule(config.schedule, make_optimizer(config.step, net(), config.schedule.lr), config.schedule.lr, 10)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--optimizer", "lion"], ["'lion'", "adamw"]),
        (["--optimizer", "adam", "--momentum", "0.9"], ["--momentum 0.9", "adam has no such option"]),
        (["--optimizer-options", "nestorov=true"], ["'nestorov'", "did you mean nesterov"]),
        (["--optimizer-options", "nesterov"], ["name=value"]),
        (["--optimizer-options", "lr=3"], ["learning rate has its own flag: give --lr"]),
        (["--optimizer-options", "nesterov=true,nesterov=false"], ["'nesterov' has two values"]),
        (["--momentum", "0.5", "--optimizer-options", "momentum=0.8"], ["--momentum", "exclude each other: give one"]),
        (["--optimizer-options", "nesterov=true", "--momentum", "0"], ["refuses its options"]),
        (["--schedule", "multistep", "--lr-milestones", "4,x"], ["--lr-milestones", "'4,x'"]),
        (["--schedule", "cosine", "--lr-min", "1"], ["--lr-min 1", "above"]),
        (["--schedule", "step", "--lr-step", "4", "--lr-gamma", "1e300"], ["--lr-gamma 1e+300", "lower it"]),
        (["--schedule", "multistep", "--lr-milestones", "4,9", "--lr-gamma", "1e25"], ["--lr-gamma 1e+25", "lower it"]),
    ],
)
def test_bad_options_of_optimizers_and_schedules_are_refused_in_one_line(arguments, parts):
    with pytest.raises(UserError) as refusal:
        schedule_of(["--global-batch-size", "8", *arguments])
    assert "\n" not in str(refusal.value)
    for part in parts:
        assert part in str(refusal.value)


def test_optimizer_options_reach_the_optimizer():
    options = "nesterov=true,dampening=0"
    group = make_optimizer(parse(["--optimizer-options", options]).step, net(), 0.1).param_groups[0]
    assert (group["nesterov"], group["dampening"], group["momentum"]) == (True, 0, 0.9)
    adam = make_optimizer(parse(["--optimizer", "adam", "--optimizer-options", "betas=0.8:0.9,eps=1e-5"]).step, net(), 0.1)
    assert adam.param_groups[0]["betas"] == (0.8, 0.9)
    assert adam.param_groups[0]["eps"] == 1e-5


def test_deterministic_algorithms_are_disabled_at_the_end_of_the_block():
    with determinism(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def train_compiled_and_plain(tmp_path):
    import dualtrain.training.loop as loop

    summaries = []
    for name, extra in (("plain", []), ("compiled", ["--compile"])):
        arguments = ["--max-steps", "12", "--run-dir", str(tmp_path / name), *extra]
        with connect("local") as backend:
            summaries.append(loop.train(parse(arguments), backend))
    assert summaries[1]["train_loss"] == pytest.approx(summaries[0]["train_loss"], abs=1e-4)


def in_segments(backend, reentrant):
    """Train with activation checkpointing of each layer, or without it if ``reentrant`` is ``None``.

    Return the sample count of each step, and the weights.
    """
    layers = [seeded(nn.Linear(6, 6), number) for number in range(4)]

    def forward(x):
        x = x.requires_grad_()
        for layer in layers:
            x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        return x

    model = nn.Sequential(*layers)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, forward=forward)
    counts = []
    for start in range(3):
        batch = [tensor[start + backend.rank :: backend.size][:5] for tensor in data()]
        counts.append(trainer.step([tuple(batch)], 5 * backend.size).sums[1].item())
    trainer.close()
    return counts, [p.detach().clone() for p in model.parameters()]


def test_reentrant_activation_checkpointing_changes_neither_counts_nor_weights():
    plain, reentrant = (run_threads(2, in_segments, how) for how in (None, True))
    for (counts, weights), (counted, found) in zip(plain, reentrant, strict=True):
        assert counts == counted == [10.0] * 3
        torch.testing.assert_close(found, weights)


def check_errors_of_the_compiler():
    """Check that an error of the compiler becomes one line, and an error of the model is raised unchanged."""

    def failing(graph, inputs):
        raise RuntimeError("no C++ compiler\nand more")

    class Broken(nn.Module):
        def forward(self, inputs):
            raise KeyError("of the model's own")

    plain = torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda model: plain(model, backend=failing))
        with pytest.raises(UserError) as refusal:
            compiled(nn.Linear(3, 1))(torch.ones(2, 3))
        patch.setattr(torch, "compile", lambda model: plain(model, backend="eager"))
        with pytest.raises(KeyError, match="of the model's own"):
            compiled(Broken())(torch.ones(2, 3))
    cause = "backend='failing' raised: RuntimeError: no C++ compiler"
    assert str(refusal.value) == f"--compile fails with this model on this host ({cause}): leave out --compile"


# Program that uses torch.compile without code generation, because generating code takes seconds.
# tests/launch/test_compile.py compiles with code generation.
COMPILED = """
import sys
from pathlib import Path
import torch
from tests.training import test_trainer
models, plain = [], torch.compile
torch.compile = lambda model: models.append(model) or plain(model, backend="eager")
test_trainer.train_compiled_and_plain(Path(sys.argv[1]))
assert len(models) == 1
torch.compile = plain
test_trainer.check_errors_of_the_compiler()
print("done")
"""


def test_compiling_changes_no_result_and_a_model_that_cannot_be_compiled_is_refused(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    end = run(("-c", COMPILED, tmp_path), tmp_path, env=env)
    assert end.returncode == 0, end.stderr
    assert end.stdout.splitlines()[-1] == "done"


class WithoutTruth:
    """A callable that has no length and so no truth value, like a module that ``torch.compile`` has made."""

    def __init__(self, function) -> None:
        self.function = function

    def __len__(self) -> int:
        raise TypeError("no length")

    def __call__(self, *arguments):
        return self.function(*arguments)


def test_forward_and_measure_may_be_objects_without_a_truth_value():
    losses = []
    for make in (
        lambda model: {},
        lambda model: {"forward": WithoutTruth(model)},
        lambda model: {"measure": WithoutTruth(lambda inputs, targets: CrossEntropy()(model(inputs), targets))},
    ):
        model = net()
        with connect("local") as backend:
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, **make(model))
            losses.append([trainer.step([data()], 23.0).loss for _ in range(2)])
    assert losses[0] == losses[1] == losses[2]


def test_a_loss_without_gradient_is_refused():
    model = net()
    with connect("local") as backend:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = Trainer(model, optimizer, lambda outputs, targets: outputs.detach().mean(), backend=backend)
        with pytest.raises(UserError, match="the loss has no gradient"):
            trainer.step([data()], 23.0)
