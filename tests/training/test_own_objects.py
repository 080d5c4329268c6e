"""Unusual models, data, schedules and batches: each must work, or be refused with a clear error."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import random
from contextlib import nullcontext

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import Dataset, Subset, TensorDataset

from dualtrain import Trainer, UserError, connect
from dualtrain.batchnorm import RankNorm, synchronize_norms
from dualtrain.config import parse
from dualtrain.data.memory import TensorSource
from dualtrain.data.sources import Batch, Task
from dualtrain.data.wrapped import wrap
from dualtrain.models.freezing import freeze_backbone
from dualtrain.models.weights import load_weights
from dualtrain.run_folder import checkpoint
from dualtrain.training import loop
from tests.training.runs import train_alone


def batch(samples: int = 4):
    return torch.linspace(-1, 1, samples * 4).view(samples, 4), torch.arange(samples) % 3


def trainer_of(backend, schedule=None):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Trainer(model, optimizer, backend=backend, schedule=schedule and schedule(optimizer))


def test_numpy_numbers_in_a_state_can_be_saved_and_loaded(tmp_path):
    with connect("local") as backend:
        trainer = trainer_of(backend, lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: numpy.float32(0.5)))
        trainer.step([batch()], 4)
        trainer.save(tmp_path / "state")
        trainer.resume(tmp_path / "state")
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_the_error_for_an_unsupported_value_in_a_state_names_its_path(tmp_path):
    with pytest.raises(TypeError, match=r"and \['schedule'\]\['own'\]\[1\] is a set"):
        checkpoint.write(tmp_path / "state", {"schedule": {"own": [1, {2}]}})


def test_a_schedule_that_needs_a_metric_is_refused():
    with connect("local") as backend, pytest.raises(ValueError, match="leave schedule out"):
        trainer_of(backend, lr_scheduler.ReduceLROnPlateau)


def test_trainer_step_accepts_a_single_batch_instead_of_a_list():
    inputs, targets = batch()
    with connect("local") as backend:
        trainer = trainer_of(backend)
        for one in ((inputs, targets), [inputs[:2], targets[:2]]):
            assert trainer.step(one, len(one[1])).totals[1] == len(one[1])
        for pair in (iter((inputs, targets)), map(torch.clone, (inputs, targets))):
            assert trainer.step([pair], len(targets)).totals[1] == len(targets)
        with pytest.raises(TypeError, match="is given a tensor"):
            trainer.step(inputs, 4)
        # Each slice has two samples, so it could be unpacked like a pair.
        for one in ((inputs[:2], targets[:2], targets[:2]), [inputs[:2]], [(inputs, targets, targets)], [{"x": 1, "y": 2}]):
            with pytest.raises(TypeError, match=r"step\(\) is given a \w+( of 3)? in place of a batch"):
                trainer.step(one, 4)
        with pytest.raises(TypeError, match="pair of tensors"):
            trainer.fit([{"inputs": inputs, "targets": targets}])


@pytest.mark.parametrize("key", [0, "x"], ids=["tuple", "dict"])
@pytest.mark.parametrize("shards", [None, 1])
def test_trainer_step_accepts_a_single_batch_whose_inputs_are_not_a_tensor(key, shards):
    x, targets = batch()
    one = ((x, x) if key == 0 else {key: x}, targets)
    with connect("local") as backend:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = Trainer(
            model, optimizer, backend=backend, forward=lambda inputs: model(inputs[key]), virtual_ranks=shards
        )
        assert trainer.step(one if shards is None else [one], len(targets)).totals[1] == len(targets)


class Mine(nn.BatchNorm1d):
    """A user's subclass of a BatchNorm layer."""


def test_sync_batchnorm_replaces_shared_layers_and_warns_of_subclasses(caplog):
    norm = nn.BatchNorm1d(4)
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm), "mine": Mine(4), "frozen": Mine(4).eval()})
    with connect("local") as backend, caplog.at_level(logging.WARNING, "dualtrain"):
        synchronize_norms(model, backend)
    assert isinstance(model["a"], RankNorm)
    assert model["a"] is model["b"][0]
    assert "'mine' (Mine)" in caplog.text
    assert "frozen" not in caplog.text


def test_a_batchnorm_layer_alone_cannot_be_synchronized():
    norm = nn.BatchNorm1d(4)
    with connect("local") as backend, pytest.raises(ValueError, match="BatchNorm1d cannot be replaced in place"):
        synchronize_norms(norm, backend)
    assert list(norm.children()) == []


def test_synchronized_layers_are_copied_as_they_are_and_pickled_as_layers_of_torch():
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.Linear(4, 4), norm)
    with connect("local") as backend:
        synchronize_norms(model, backend)
        model(batch()[0])
        copied = copy.deepcopy(model)
        assert isinstance(copied[0], RankNorm)
        assert isinstance(copy.copy(model[0]), RankNorm)
        assert copy.copy(model[0]).weight is model[0].weight
        loaded = pickle.loads(pickle.dumps(model))
        assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
        torch.testing.assert_close(loaded(batch()[0]), copied(batch()[0]))
        nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
        with pytest.raises(RuntimeError, match="parametrized modules"):
            pickle.dumps(model)
    assert type(loaded[0]) is nn.BatchNorm1d
    assert loaded[0] is loaded[2]


def evaluates_alone(backend):
    model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False))
    synchronize_norms(model, backend)
    model.eval()
    inputs = batch()[0] * (1 + backend.rank)
    for _ in range(1 + backend.rank):  # unequal numbers of calls, so that any exchange would time out
        found = model(inputs)
    torch.testing.assert_close(found, nn.functional.batch_norm(inputs, None, None, torch.ones(4), torch.zeros(4), True))


def test_sync_batchnorm_without_running_statistics_exchanges_nothing_in_evaluation(typical):
    typical(evaluates_alone)


class Versioned(nn.Linear):
    """A layer whose state contains a dictionary beside its tensors."""

    def get_extra_state(self):
        return {"version": 2}

    def set_extra_state(self, state):
        raise AssertionError("a file of weights must not set extra state")


@pytest.mark.parametrize("model", [Versioned(4, 3), nn.ModuleDict({"module": nn.Linear(4, 3)})], ids=["extra", "module"])
def test_weights_with_extra_state_or_a_module_prefix_are_loaded(model, tmp_path):
    file = tmp_path / "weights.pt"
    torch.save(model.state_dict(), file)
    wanted = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    load_weights(model, str(file))
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), wanted, strict=True))
    torch.save({f"module.{name}": p for name, p in zip(dict(model.named_parameters()), wanted, strict=True)}, file)
    load_weights(model, str(file))  # weights with DDP's prefix


class Buffered(nn.Linear):
    """A layer with a buffer, which the test chooses."""

    buffer: torch.Tensor

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("own", self.buffer, persistent=False)


def buffered(shape, classes):
    return Buffered(*shape, classes)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.eye(3).to_sparse(), "a Buffered whose 'own' is a sparse tensor: make it an ordinary tensor"),
        (torch.ones(3, dtype=torch.complex128), r"\['own'\] is a tensor of torch.complex128"),
        (torch.ones(1).expand(3), "has 'own', whose elements share memory, as after expand"),
        (torch.ones(0, 3), None),  # an empty buffer is saved, and restored in the second run
    ],
    ids=["sparse", "complex", "expanded", "empty"],
)
def test_a_model_whose_buffer_cannot_be_saved_is_refused_before_training(tmp_path, monkeypatch, buffer, message):
    monkeypatch.setattr(Buffered, "buffer", buffer, raising=False)
    flags = ["--dataset", f"{__name__}:data", "--model", f"{__name__}:buffered", "--workers", "0", "--resume", "auto"]
    for steps in ("1", "2"):
        with connect("local") as backend, pytest.raises(UserError, match=message) if message else nullcontext():
            loop.train(parse([*flags, "--max-steps", steps, "--run-dir", str(tmp_path)]), backend)
    assert message is None or not list(tmp_path.glob("*/step-*"))


class Stateful(nn.Linear):
    """A layer whose extra state is ``values[1]`` while its weight has a gradient, and ``values[0]`` otherwise."""

    values: tuple[object, object]

    def get_extra_state(self):
        return {"seen": self.values[self.weight.grad is not None]}

    def set_extra_state(self, state):
        pass


def stateful(shape, classes):
    return Stateful(*shape, classes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (({1}, 1), r"the state of --model \S+ cannot .*_extra_state'\]\['seen'\] is a set; use numbers"),
        (({torch.int8: 1}, 1), r"the state of --model \S+ cannot .* and a key of \['_extra_state'\]\['seen'\] is a dtype"),
        ((1, numpy.ones(2)), r"the model's state in step 1 cannot .*_extra_state'\]\['seen'\] is a ndarray"),
    ],
)
def test_a_model_with_a_value_that_cannot_be_saved_is_refused(tmp_path, monkeypatch, values, message):
    monkeypatch.setattr(Stateful, "values", values, raising=False)
    flags = ["--dataset", f"{__name__}:data", "--model", f"{__name__}:stateful", "--max-steps", "1", "--workers", "0"]
    with connect("local") as backend, pytest.raises(UserError, match=message):
        loop.train(parse([*flags, "--run-dir", str(tmp_path)]), backend)


def test_a_model_with_lazy_layers_trains_but_cannot_load_a_weights_file(tmp_path):
    flags = ["--dataset", f"{__name__}:data", "--model", f"{__name__}:lazy", "--max-steps", "2", "--workers", "0"]
    with connect("local") as backend:
        assert loop.train(parse([*flags, "--run-dir", str(tmp_path / "run")]), backend)["steps"] == 2
        weights = str(tmp_path / "run" / "model.safetensors")
        with pytest.raises(UserError, match="lazy layers"):
            loop.train(parse([*flags, "--weights", weights, "--run-dir", str(tmp_path / "other")]), backend)


def norm_alone(shape, classes):
    return nn.BatchNorm1d(classes)


def test_a_model_that_is_a_batchnorm_layer_cannot_be_trained_with_sync_batchnorm(tmp_path):
    flags = ["--dataset", f"{__name__}:data", "--model", f"{__name__}:norm_alone", "--sync-batchnorm", "--workers", "0"]
    message = "--sync-batchnorm: a BatchNorm1d cannot be replaced in place: give a model that contains it"
    with connect("local") as backend, pytest.raises(UserError, match=message):
        loop.train(parse([*flags, "--run-dir", str(tmp_path)]), backend)


def changes_folder(folder):
    os.chdir("elsewhere")
    return data(folder)


def test_a_data_function_that_changes_the_current_folder_does_not_change_the_runs_paths(tmp_path, monkeypatch, capsys):
    own = ["--dataset", f"{__name__}:changes_folder", "--model", f"{__name__}:layer", "--workers", "0", "--threads", "1"]
    (tmp_path / "elsewhere").mkdir()
    torch.save(layer((4,), 3).state_dict(), tmp_path / "weights.pt")
    saved = "run/checkpoints/step-00000001.safetensors"
    for number, flags in enumerate(("--run-dir run --resume auto", "--run-dir run --resume auto", f"--resume {saved}")):
        monkeypatch.chdir(tmp_path)
        given = [*own, *flags.split(), "--max-steps", str(number + 1), "--weights", "weights.pt"]
        with connect("local") as backend:
            assert loop.train(parse(given), backend)["steps"] == number + 1
        assert ("resuming from step 1" in capsys.readouterr().out) == (number == 1)
        (tmp_path / "weights.pt").unlink(missing_ok=True)  # a resumed run needs no initial weights
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "run", "runs"]
    assert not list((tmp_path / "elsewhere").iterdir())


class Pairs(Dataset):
    """A dataset whose inputs come from ``draw``."""

    classes = 3

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 8

    def __getitem__(self, number):
        return torch.full((4,), self.draw()), number % 3


def drawn(folder):
    value = torch.rand(()).item() + random.random() + numpy.random.rand()
    return Pairs(lambda: value), Pairs(lambda: value)


def test_random_numbers_of_a_data_function_depend_on_the_seed_alone(tmp_path):
    own = ["--dataset", f"{__name__}:drawn", "--model", f"{__name__}:layer", "--workers", "0", "--threads", "1"]
    hashes = []
    for number, seed in enumerate("112"):
        for unseed in (torch.seed, random.seed, numpy.random.seed):
            unseed()
        flags = ["--max-steps", "1", "--run-dir", str(tmp_path / str(number)), "--seed", seed]
        hashes.append(train_alone(*own, *flags)["weights_sha256"])
    assert hashes[0] == hashes[1] != hashes[2]


class Scaled(Dataset):
    """A dataset that depends on a global variable and on torch's default dtype."""

    factor, classes = 1.0, 3

    def __len__(self):
        return 8

    def __getitem__(self, number):
        return torch.full((4,), self.factor), number % 3


def scaled(folder):
    Scaled.factor = float(folder)
    torch.set_default_dtype(torch.float64)
    return Scaled(), Scaled()


@pytest.mark.parametrize(("factor", "warned"), [("1.0", False), ("2.0", True)])
def test_workers_have_the_ranks_default_dtype_and_a_warning_names_other_differences(
    tmp_path, monkeypatch, caplog, factor, warned
):
    monkeypatch.setattr(Scaled, "factor", 1.0)
    (tmp_path / factor).mkdir()
    monkeypatch.chdir(tmp_path)
    own = ["--dataset", f"{__name__}:scaled", "--model", f"{__name__}:layer", "--threads", "1", "--workers", "1"]
    try:
        train_alone(*own, "--data-dir", factor, "--max-steps", "1", "--run-dir", str(tmp_path / "run"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert ("data workers read a different training sample 0 than the rank" in caplog.text) == warned


def source(first_value, samples=8):
    inputs = torch.zeros(samples, 4)
    inputs[:1] = first_value
    return TensorSource(inputs, torch.arange(samples) % 3)


#: Functions that return the data of a run's first start (argument 0) or second start (argument 1).
KINDS = {
    "same": lambda start: Task(source(0), source(0), (4,), 3),  # the data do not change
    "stored": lambda start: Task(source(start), source(0), (4,), 3),  # a training sample changes
    "validation": lambda start: Task(source(0), source(start), (4,), 3),  # a validation sample changes
    "size": lambda start: Task(source(0), source(0, 8 + start), (4,), 3),  # a validation sample is added
    "computed": lambda start: (Pairs(lambda: float(start)), Pairs(lambda: 0.0)),  # the dataset computes other samples
    # each read of a sample gives a different value
    "random": lambda start: (Pairs(random.SystemRandom().random), Pairs(random.SystemRandom().random)),
}
CURRENT: list = []


def of_current_kind(folder):
    kind, start = CURRENT
    return KINDS[kind](start)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("same", None),
        ("stored", "trained with other data: training sample 0 has changed since then; give the same data, or start anew"),
        ("validation", "trained with other data: validation sample 0 has changed since then"),
        ("size", "with 8 validation samples, and this run has .* with 9 validation samples"),
        ("computed", None),
        ("random", None),
    ],
)
def test_a_resume_with_changed_data_is_refused_or_causes_a_warning(tmp_path, caplog, kind, reason):
    own = ["--dataset", f"{__name__}:of_current_kind", "--model", f"{__name__}:layer", "--workers", "0", "--threads", "1"]
    for start in (0, 1):
        CURRENT[:] = kind, start
        refused = pytest.raises(UserError, match=reason) if start and reason else nullcontext()
        with refused, connect("local") as backend:
            loop.train(
                parse([*own, "--max-steps", str(1 + start), "--run-dir", str(tmp_path), "--resume", "auto"]), backend
            )
    warned = "training sample 0 is not what it was before the checkpoint" in caplog.text
    assert warned == (kind == "computed")


def layer(shape, classes):
    return nn.Linear(*shape, classes)


@pytest.mark.parametrize(("dataset", "split"), [("ignored", "validation"), ("unlabelled", "training")])
def test_data_with_only_ignored_targets_are_refused(dataset, split, tmp_path):
    flags = ["--dataset", f"{__name__}:{dataset}", "--model", f"{__name__}:lazy", "--max-steps", "2", "--workers", "0"]
    with connect("local") as backend, pytest.raises(UserError, match=f"no {split} target has a loss"):
        loop.train(parse([*flags, "--run-dir", str(tmp_path)]), backend)


def test_metrics_of_steps_without_a_target_are_null(tmp_path):
    flags = ["--dataset", f"{__name__}:unlabelled", "--model", f"{__name__}:lazy", "--global-batch-size", "4"]
    with connect("local") as backend:
        loop.train(parse([*flags, "--max-steps", "1", "--log-every", "1", "--run-dir", str(tmp_path)]), backend)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((tmp_path / "summary.json").read_text())
    losses = [line.get("loss", line.get("train_loss", "missing")) for line in lines]
    assert [*losses, summary["train_loss"], summary["train_accuracy"]] == [None] * 4


class Numbered(TensorDataset):
    """A dataset that gives the number of its classes."""

    classes = 3


def data(folder):
    return Numbered(*batch(8)), Numbered(*batch(8))


def ignored(folder):
    return Numbered(*batch(8)), Numbered(batch(8)[0], torch.full((8,), -100))


def unlabelled(folder):
    return Numbered(batch(8)[0], torch.full((8,), -100)), Numbered(*batch(8))


def lazy(shape, classes):
    return nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(classes))


def test_a_data_source_without_a_close_method_is_accepted():
    class Source:
        def __len__(self):
            return 1

    Task(Source(), Source(), (4,), 3).close()


def test_both_sources_are_closed_even_if_one_raises_an_error():
    closed = []

    class Source:
        def close(self):
            closed.append(self)
            raise ValueError("the pool is gone")

    with pytest.raises(ValueError, match="the pool is gone"):
        Task(Source(), Source(), (4,), 3).close()
    assert len(closed) == 2


class Local(Dataset):
    """A dataset that cannot be pickled."""

    def __init__(self):
        self.change = lambda x: x

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return torch.zeros(4), 0


def test_a_dataset_that_cannot_be_sent_to_workers_is_refused_with_the_cure():
    task = wrap(Local(), Local(), classes=3, workers=1)
    with pytest.raises(UserError, match=r"cannot be sent to worker processes .* or give --workers 0"):
        next(task.train.stream([Batch(torch.arange(2))], torch.device("cpu")))
    task.close()


class OpenedAtFirstRead(Dataset):
    """A dataset that cannot be pickled after the first read."""

    file = None

    def __len__(self):
        return 4

    def __getitem__(self, number):
        self.file = self.file or open(__file__, "rb")  # noqa: SIM115 -- stays open, as in many datasets
        self.file.seek(number)
        return torch.tensor([float(self.file.read(1)[0])]), 0


def test_a_dataset_that_opens_a_file_at_the_first_read_can_be_sent_to_workers():
    part = OpenedAtFirstRead()
    task = wrap(part, Subset(part, [0]), classes=3, workers=1)
    try:
        for source in (task.train, task.val):
            assert next(source.stream([Batch(torch.arange(1))], torch.device("cpu")))[0].item() == ord('"')
    finally:
        task.close()
        part.file.close()


def test_a_head_that_shares_weights_cannot_be_trained_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(UserError, match=r"head '1' shares '0\.weight'"):
        freeze_backbone(model, "1")
    assert all(p.requires_grad for p in model.parameters())
