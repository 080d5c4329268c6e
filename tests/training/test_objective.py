"""Trainer with torch's losses and the user's: several ranks compute the same results as one process with all samples."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from dualtrain import Trainer, connect
from dualtrain.trainer.objective import NOT_COUNTED
from dualtrain.trainer.torch_losses import as_objective
from tests.threads import run_threads


def batch(samples: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(samples, 7, generator=draw), torch.randint(0, 6, (samples,), generator=draw)


def one_epoch(backend, loss, parts):
    """Evaluate the batches ``parts``, and then train one epoch on them.

    Returns:
        The weights, the metrics of the training, and the metrics of the evaluation.
    """
    model = nn.Linear(7, 6)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 42).view(6, 7).sin())
        model.bias.zero_()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), loss, backend=backend)
    before = trainer.evaluate(parts)
    history = trainer.fit(parts)
    trainer.close()
    return model.weight.detach(), history[0], before


WEIGHTS = torch.tensor([0.1, 5.0, 1.0, 0.5, 2.0, 3.0])


@pytest.mark.parametrize(
    ("loss", "class_weights"),
    [
        (nn.CrossEntropyLoss(weight=WEIGHTS), WEIGHTS),
        (nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=1, label_smoothing=0.1), WEIGHTS * (torch.arange(6) != 1)),
        (nn.CrossEntropyLoss(ignore_index=2), (torch.arange(6) != 2).float()),
        (functional.cross_entropy, torch.ones(6)),
        (partial(functional.cross_entropy, weight=WEIGHTS), WEIGHTS),
        (nn.NLLLoss(weight=WEIGHTS, ignore_index=1), WEIGHTS * (torch.arange(6) != 1)),
        (partial(functional.nll_loss, ignore_index=2), (torch.arange(6) != 2).float()),
    ],
)
def test_a_weighted_loss_over_all_ranks_equals_the_loss_of_the_whole_batch(typical, loss, class_weights):
    inputs, targets = batch()
    with connect("local") as alone:
        weight, trained, evaluated = one_epoch(alone, loss, [(inputs, targets)])
    model = nn.Linear(7, 6)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 42).view(6, 7).sin())
        model.bias.zero_()
    mean = loss(model(inputs), targets)
    mean.backward()
    weights, best = class_weights[targets], model(inputs).topk(5, 1).indices == targets[:, None]
    accuracy, top5 = (((weights * hits).sum() / weights.sum()).item() for hits in (best[:, 0], best.any(1)))
    assert trained == pytest.approx({"loss": mean.item(), "accuracy": accuracy})
    assert accuracy > 0
    assert evaluated["val_loss"] == pytest.approx(mean.item())
    assert evaluated["val_accuracy"] == pytest.approx(accuracy)
    assert evaluated["val_top5"] == pytest.approx(top5)
    assert accuracy < top5 < 1
    torch.testing.assert_close(weight, model.weight - 0.5 * model.weight.grad)
    for found, *values in typical(on_each_rank, loss):
        torch.testing.assert_close(found, weight)
        assert [values[0], values[1]] == [pytest.approx(trained), pytest.approx(evaluated)]


def on_each_rank(backend, loss):
    cuts = tuple(range(5, 10 * backend.size - 5, 10))  # 5 samples for rank 0, then 10 per rank, and the rest for the last
    inputs, targets = (tensor.tensor_split(cuts)[backend.rank] for tensor in batch())
    return one_epoch(backend, loss, [(inputs, targets)])


PIXEL_LOSS = nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=1)


def segmentation_step(backend, parts, loss):
    model = nn.Conv1d(1, 6, 1)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 6).view(6, 1, 1))
        model.bias.zero_()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), loss, backend=backend)
    history = trainer.fit(parts)
    trainer.close()
    return model, history[0]


def uneven_segmentation(backend, loss, ignored):
    """Train on images with different numbers of ignored pixels; all pixels of rank 0's first image are ignored."""
    mine = tuple(tensor.tensor_split(backend.size)[backend.rank] for tensor in pixels(ignored))
    model, metrics = segmentation_step(backend, [mine], loss)
    return model.weight.detach(), metrics


def pixels(ignored):
    draw = torch.Generator().manual_seed(3)
    targets = torch.randint(0, 6, (6, 8), generator=draw)
    targets[0] = 1
    return torch.randn(6, 1, 8, generator=draw), targets.where(targets != 1, ignored)


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        (PIXEL_LOSS, 1),
        (nn.CrossEntropyLoss(weight=WEIGHTS), -100),
        (nn.CrossEntropyLoss(), -100),
        (functional.cross_entropy, -100),
        (nn.NLLLoss(), -100),
    ],
)
def test_a_loss_of_pixels_over_all_ranks_equals_the_loss_of_the_whole_batch(typical, loss, ignored):
    inputs, targets = pixels(ignored)
    with connect("local") as alone:
        model, metrics = segmentation_step(alone, [(inputs, targets)], loss)
    other = nn.Conv1d(1, 6, 1)
    with torch.no_grad():
        other.weight.copy_(torch.linspace(-1, 1, 6).view(6, 1, 1))
        other.bias.zero_()
    mean = loss(other(inputs), targets)
    mean.backward()
    assert metrics["loss"] == pytest.approx(mean.item())
    torch.testing.assert_close(model.weight, other.weight - 0.5 * other.weight.grad)
    for weight, found in typical(uneven_segmentation, loss, ignored):
        torch.testing.assert_close(weight, model.weight.detach())
        assert found == pytest.approx(metrics)


def ignored_pixels(backend):
    model = nn.Conv1d(1, 6, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), nn.CrossEntropyLoss(), backend=backend)
    before = model.weight.detach().clone()
    step = trainer.step([(torch.ones(2, 1, 8), torch.full((2, 8), -100))], 4.0)
    trainer.close()
    assert step.totals == [0.0] * 4
    assert torch.equal(model.weight, before)
    assert not model.weight.grad.any()


def test_a_step_with_only_ignored_pixels_on_all_ranks_has_gradients_of_zero(typical):
    typical(ignored_pixels)


def weight_of_images(backend):
    model = nn.Conv1d(1, 6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), backend=backend, compress="fp16")
    inputs, targets = torch.full((3, 1, 30_000), 10.0), torch.zeros(3, 30_000, dtype=torch.int64)
    # The second argument is the expected weight of the step. Gradients are sent after multiplication by real weight /
    # expected weight. If each pixel had weight 1, the gradients would not fit into fp16.
    step = trainer.step([(inputs, targets)], 3.0 * backend.size)
    trainer.close()
    return step.totals[1]


def test_without_ignored_pixels_each_sample_of_a_step_has_weight_1():
    outputs, targets = torch.randn(3, 6, 7), torch.randint(0, 6, (3, 7))
    # The objective's weight is the number of pixels, 3 × 7. The trainer divides it by the number of pixels per sample.
    loss, sums = as_objective(nn.CrossEntropyLoss())(outputs, targets)
    assert torch.equal(loss, functional.cross_entropy(outputs, targets))
    assert sums == [loss.item() * 21, 21.0, NOT_COUNTED, NOT_COUNTED]
    assert run_threads(2, weight_of_images) == [6.0, 6.0]


LENGTHS = 3, 9, 5, 2, 7, 4  # the length of the sequences in each batch


def sequences(kind):
    """Return the batches of one step. Targets have the shape (n, length), or (n, 6, length) if they are probabilities."""
    draw = torch.Generator().manual_seed(4)
    found = []
    for number, length in enumerate(LENGTHS):
        shape = (1 + number % 3, length)
        targets = torch.rand(shape, generator=draw)
        if kind == "probabilities":
            targets = torch.rand(shape[0], 6, length, generator=draw).softmax(1)
        if kind == "classes":
            targets = torch.where(targets < 0.3, -100, (targets * 6).long())
            if number in (1, 4):  # all batches of rank 1, in a world of 3 ranks
                targets[:] = -100
        found.append((torch.randn(*shape, 2, generator=draw), targets))
    return found


class TokenModel(nn.Module):
    """Model for inputs of shape (n, length, 2). Its outputs have the shape that the loss needs."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(2, 1 if kind == "numbers" else 6, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.linspace(-1, 1, len(self.linear.weight))[:, None].sin())

    def forward(self, x):
        y = self.linear(x)
        return y[..., 0] if self.kind == "numbers" else y.transpose(1, 2)


def over_sequences(backend, loss, kind, virtual_ranks):
    """Train two steps, the second after a resume; return the weights, the losses of the steps and the last evaluation."""
    batches, losses, state = sequences(kind), [], None
    mine = batches[backend.rank :: backend.size]
    for _ in range(2):
        model = TokenModel(kind)
        optimizer, options = torch.optim.SGD(model.parameters(), 0.5), {"clip_norm": 0.2, "virtual_ranks": virtual_ranks}
        trainer = Trainer(model, optimizer, loss, backend=backend, **options)
        if virtual_ranks is not None:
            mine = [batches[shard::virtual_ranks] for shard in trainer.shards]
        if state is not None:
            trainer.load_state_dict(state)
        losses.append(trainer.step(mine, 7.0).loss)
        evaluated = trainer.evaluate(mine)["val_loss"]
        state = copy.deepcopy(trainer.state_dict())
        trainer.close()
    return model.linear.weight.detach(), losses, evaluated


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (nn.CrossEntropyLoss(), "classes"),
        (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), "classes"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "probabilities"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), "numbers"),
        (partial(functional.smooth_l1_loss, beta=0.5), "numbers"),
        (functional.multilabel_soft_margin_loss, "numbers"),
    ],
)
def test_each_target_counts_alike_if_batches_have_unequal_numbers_of_targets_per_sample(loss, kind):
    batches, model, losses = sequences(kind), TokenModel(kind), []
    weights = WEIGHTS if getattr(loss, "weight", None) is not None else torch.ones(6)
    divisors = [
        weights[y.clamp(0)][y >= 0].sum() if kind == "classes" else torch.tensor(x.shape[0] * x.shape[1])
        for x, y in batches
    ]

    def mean():
        return sum(loss(model(x), y) * w for (x, y), w in zip(batches, divisors, strict=True) if w) / sum(divisors)

    for _ in range(2):
        total = mean()
        losses.append(total.item())
        model.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        torch.optim.SGD(model.parameters(), 0.5).step()
    for size, virtual_ranks in ((1, None), (3, None), (2, 4)):
        for weight, found, evaluated in run_threads(size, over_sequences, loss, kind, virtual_ranks):
            torch.testing.assert_close(weight, model.linear.weight.detach())
            assert [*found, evaluated] == pytest.approx([*losses, mean().item()])


def test_a_batch_with_only_ignored_targets_changes_neither_weights_nor_metrics():
    loss = nn.CrossEntropyLoss(ignore_index=3)
    inputs, targets = batch()
    with connect("local") as backend:
        first = one_epoch(backend, loss, [(inputs, targets), (inputs[:4], torch.full((4,), 3))])
        second = one_epoch(backend, loss, [(inputs, targets)])
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss(), lambda y, t: (y - t).abs().mean()])
def test_the_results_have_no_accuracy_if_the_targets_are_not_class_indices(loss):
    inputs, targets = batch()
    with connect("local") as backend:
        _, trained, evaluated = one_epoch(backend, loss, [(inputs, functional.one_hot(targets, 6).float())])
    assert list(trained) == ["loss"]
    assert list(evaluated) == ["val_loss"]


def trained_on_mixed_targets(backend):
    """Evaluate and train on batches with class indices and, on the last rank, one with probabilities, as MixUp makes them.

    Return the names of the metrics of the training and of the evaluation.
    """
    inputs, targets = batch()
    parts = [(inputs, targets)] * 5
    if backend.rank == backend.size - 1:
        parts.append((inputs, functional.one_hot(targets, 6).float()))
    _, trained, evaluated = one_epoch(backend, nn.CrossEntropyLoss(), parts)
    return list(trained), list(evaluated)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_results_have_no_accuracy_if_one_batch_has_no_class_indices(ranks):
    assert run_threads(ranks, trained_on_mixed_targets) == [(["loss"], ["val_loss"])] * ranks


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "loss", [None, nn.CrossEntropyLoss(ignore_index=3), nn.NLLLoss(weight=torch.arange(200.0)), nn.CrossEntropyLoss()]
)
def test_class_indices_of_dtype_uint8_count_as_those_of_dtype_int64(loss, training):
    targets = torch.tensor([156, 3, 199])
    outputs = functional.one_hot(targets, 200).float().requires_grad_(training)
    found = as_objective(loss)(outputs, targets.to(torch.uint8))[1]
    assert found == as_objective(loss)(outputs, targets)[1]
    assert found[2] == found[1] > 0


def test_a_loss_of_torch_is_recognized_after_torch_compile():
    compiled = partial(torch.compile, backend="eager")
    try:
        compiled(functional.cross_entropy)
    except AssertionError:
        pytest.skip(f"torch {torch.__version__} cannot compile functions of torch")
    weighted = partial(functional.cross_entropy, weight=WEIGHTS, ignore_index=2)
    outputs, classes = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(1)), torch.arange(20).view(4, 5) % 6
    classes[0] = -100
    for compiled_loss, loss, targets in (
        (compiled(nn.CrossEntropyLoss()), nn.CrossEntropyLoss(), classes),
        (compiled(nn.CrossEntropyLoss(WEIGHTS, ignore_index=2)), weighted, classes.clamp(0)),
        (compiled(functional.cross_entropy), functional.cross_entropy, classes),
        (compiled(weighted), weighted, classes.clamp(0)),
        (partial(compiled(functional.cross_entropy), **weighted.keywords), weighted, classes.clamp(0)),
        (compiled(functional.mse_loss), functional.mse_loss, outputs.clone().zero_()),
    ):
        found = as_objective(compiled_loss)(outputs, targets)[1]
        assert found == pytest.approx(as_objective(loss)(outputs, targets)[1])
        assert found[1] != len(targets)
    for loss in (nn.MSELoss(reduction="sum"), partial(functional.mse_loss, reduction="sum")):
        with pytest.raises(ValueError, match="the loss has reduction='sum'"):
            as_objective(compiled(loss))
    namespace = {}
    # The globals of a function that exec has made may lack __name__; sympy.lambdify makes such functions.
    exec("def loss(outputs, targets): return (outputs - targets).mean()", namespace)
    assert as_objective(namespace["loss"]).loss is namespace["loss"]


class WithoutInit(nn.Module):
    def __init__(self):
        """Don't call the base class, so that the module lacks most attributes."""

    def __call__(self, outputs, targets):
        return outputs.mean()


def test_a_module_that_has_not_called_its_base_class_init_may_be_a_loss():
    outputs, targets = torch.ones(2, 3), torch.zeros(2)
    assert as_objective(WithoutInit())(outputs, targets)[1] == [2.0, 2.0, NOT_COUNTED, NOT_COUNTED]
    model = nn.Linear(7, 6)
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), backend=backend)
        found = trainer.evaluate([batch()], WithoutInit())["val_loss"]
    assert found == pytest.approx(model(batch()[0]).mean().item())


@dataclass(slots=True)
class Output:
    """Outputs of a model: logits, and a value that is not a tensor."""

    logits: torch.Tensor
    name: str = "model"


def masked_mean(outputs, targets):
    """An objective: the mean loss of the targets above 2, which is 0/0 if there are none."""
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    kept = targets > 2
    losses = functional.cross_entropy(logits, targets, reduction="none") * kept
    mean = losses.sum() / kept.sum()
    return mean, torch.stack([mean.detach() * kept.sum(), kept.sum(), *(torch.tensor(-1.0),) * 2])


@pytest.mark.parametrize("form", [lambda logits: logits, Output])
def test_a_batch_in_which_an_objective_counts_nothing_has_no_effect(form):
    def body(backend, parts):
        model = nn.Linear(7, 6)
        nn.init.eye_(model.weight)
        nn.init.zeros_(model.bias)
        trainer = Trainer(
            *(model, torch.optim.SGD(model.parameters(), 0.5), masked_mean),
            forward=lambda inputs: form(model(inputs)),
            backend=backend,
        )
        mine = parts[backend.rank :: backend.size]
        found = [trainer.step(mine, 24.0).loss, *trainer.evaluate(mine).values()]
        trainer.close()
        return found, model.weight.detach()

    inputs, targets = batch()
    order = targets.argsort()
    parts = [(inputs[rows], targets[rows]) for rows in (order[:4], order[4:])]  # the first one has no target above 2
    with connect("local") as backend:
        whole = body(backend, [(inputs, targets)])
    for found in run_threads(2, body, parts):
        torch.testing.assert_close(found, whole)


@pytest.mark.parametrize(
    "dict_of",
    [
        lambda y: {"scale": 2.0, "class": y, "other": y},
        lambda y: {"class": {"scale": torch.tensor(2.0), "class": y}, "name": "a"},
        lambda y: {"size": {"image": torch.ones(3)}, "class": y},
        lambda y: {"name": "a", "class": list(y)},
    ],
    ids=["tensors", "nested", "own before nested", "lists"],
)
def test_samples_of_a_dict_of_targets_are_counted_in_its_tensors_or_lists(dict_of):
    def loss(outputs, targets):
        found = targets["class"]
        found = found["class"] if isinstance(found, dict) else found
        return functional.cross_entropy(outputs, torch.stack(list(found)))

    def body(backend, parts):
        model = nn.Linear(7, 6)
        nn.init.eye_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        trainer = Trainer(model, optimizer, loss, backend=backend)
        mine = parts[backend.rank :: backend.size]
        found = trainer.step([(x, dict_of(y)) for x, y in mine], 24.0)
        trainer.close()
        return found.loss, model.weight.detach()

    inputs, targets = batch()
    with connect("local") as backend:
        whole = body(backend, [(inputs, targets)])
    for found in run_threads(2, body, [(inputs[:5], targets[:5]), (inputs[5:], targets[5:])]):
        torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("targets", [None, 3, torch.tensor(3)])
def test_targets_without_a_length_are_refused(targets):
    with pytest.raises(TypeError, match=r"have no length, .* cannot be counted: return the pair of the mean loss and"):
        as_objective(lambda outputs, _: outputs.mean())(torch.ones(2), targets)


@pytest.mark.parametrize("names", [("measure",), ("loss", "forward")])
def test_a_batch_in_which_nothing_counts_has_no_effect_if_no_output_tensor_is_known(names):
    """With ``measure``, the trainer gets no outputs. The ``forward`` below returns an object of an unknown class."""
    models = [nn.Linear(7, 6), nn.Linear(7, 6)]
    models[1].load_state_dict(models[0].state_dict())
    inputs, targets = batch()
    order = targets.argsort()
    parts = [(inputs[rows], targets[rows]) for rows in (order[:4], order[4:])]  # the first one has no target above 2
    with connect("local") as backend:
        for model, batches in zip(models, (parts, parts[1:]), strict=True):
            options = {
                "measure": lambda x, y, model=model: list(masked_mean(model(x), y)),
                "loss": masked_mean,
                "forward": lambda x, model=model: SimpleNamespace(logits=model(x)),
            }
            optimizer = torch.optim.SGD(model.parameters(), 0.5)
            trainer = Trainer(model, optimizer, backend=backend, **{name: options[name] for name in names})
            trainer.step(parts[:1], 4.0)  # nothing counts in the whole step
            trainer.step(batches, 24.0)
            trainer.close()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    assert models[0].weight.isfinite().all()


@pytest.mark.parametrize("loss", [None, 0.0])
def test_an_evaluation_uses_the_sums_of_an_objective_and_not_its_loss(loss):
    """The second batch has weight 0."""
    model = nn.Linear(7, 6)
    inputs, targets = batch()
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), backend=backend)
        found = trainer.evaluate(
            [(inputs, targets), (inputs, targets + 6)], lambda x, y: (loss, [(y < 6).sum() * 0.5, (y < 6).sum(), -1, -1])
        )
    assert found == {"val_loss": 0.5}
