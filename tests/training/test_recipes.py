"""Each recipe trains on small data. Most recipes are also interrupted and resumed, and end with the same bits."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import dualtrain.training.loop as loop
from dualtrain.backends import connect
from dualtrain.config import parse
from dualtrain.errors import StoppedError, UserError
from dualtrain.models.weights import published
from dualtrain.torchvision_shim import torchvision
from dualtrain.training.signals import STOP_SIGNALS
from tests.conftest import require_horovod
from tests.data.test_data_sources import write_cifar, write_mnist
from tests.pool import Pool

TEXT = "the quick brown fox jumps over the lazy dog . " * 60
SMALL = ("--run-dir", "{run}", "--checkpoint-every", "1000", "--log-every", "1", "--workers", "0", "--epochs", "2")
#: Flags of each run, besides ``SMALL``. The texts in braces are replaced by paths.
CASES: dict[str, tuple[str, ...]] = {
    "digits": ("--global-batch-size", "200"),
    "everything": (
        *("--global-batch-size", "300", "--accumulate", "3", "--ema", "0.8", "--clip-norm", "0.5", "--optimizer", "adamw"),
        *("--schedule", "cosine", "--warmup-steps", "3", "--label-smoothing", "0.1", "--lr", "0.003", "--amp", "bf16"),
    ),
    "fp16": (
        *("--model", "tests.training.test_recipes:linear", "--global-batch-size", "300", "--amp", "fp16"),
        *("--schedule", "one-cycle", "--compress", "fp16"),
    ),
    "mnist-net": ("--recipe", "mnist-net", "--data-dir", "{data}", "--global-batch-size", "16"),
    "mnist-convnet": ("--recipe", "mnist-convnet", "--data-dir", "{data}", "--global-batch-size", "16"),
    "mnist-resnet18": (
        *("--recipe", "mnist-resnet18", "--model", "shufflenet_v2_x0_5", "--data-dir", "{data}", "--epochs", "1"),
        *("--global-batch-size", "15"),
    ),
    "bert-mlm": (
        *("--recipe", "bert-mlm", "--text-file", "{text}", "--sequence-length", "16", "--global-batch-size", "8"),
        *("--warmup-steps", "2"),
    ),
    "synthetic": (
        *("--recipe", "synthetic", "--model", "shufflenet_v2_x0_5", "--shape", "3,16,16", "--classes", "10"),
        *("--samples", "40", "--global-batch-size", "10"),
    ),
    "imagenet-resnet50": (
        *("--recipe", "imagenet-resnet50", "--model", "shufflenet_v2_x0_5", "--data-dir", "{tree}", "--image-size", "32"),
        *("--global-batch-size", "4", "--warmup-steps", "2"),
    ),
    "dropout": ("--model", "tests.models_for_tests:dropout_net", "--global-batch-size", "200"),
}


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Make data for the recipes that need files; return the paths."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("recipes")
    write_mnist(folder, 60)
    (folder / "words.txt").write_text(TEXT)
    draw = torch.Generator().manual_seed(0)
    for part, each in (("train", 6), ("val", 2)):
        for kind in ("cat", "dog"):
            (folder / "tree" / part / kind).mkdir(parents=True)
            for number in range(each):
                pixels = torch.randint(0, 256, (40, 48, 3), dtype=torch.uint8, generator=draw)
                Image.fromarray(pixels.numpy()).save(folder / "tree" / part / kind / f"{number}.png")
    return {"data": str(folder), "text": str(folder / "words.txt"), "tree": str(folder / "tree")}


def flags(case: str, paths: dict[str, str], run: Path) -> list[str]:
    return [flag.format(run=run, **paths) for flag in (*SMALL, *CASES[case])]


def train(
    backend, arguments: list[str], stop_after: int | None = None, signum: int = signal.SIGTERM
) -> dict[str, Any] | str:
    """Train; in step ``stop_after``, if given, send ``signum`` to the last rank.

    Return the summary, or the message of the error if the signal ended the run.
    """
    step = loop.Run._step

    def step_and_stop(run: loop.Run) -> list[float]:
        if run.cursor.step + 1 == stop_after and backend.rank == backend.size - 1:
            os.kill(os.getpid(), signum)
        return step(run)

    loop.Run._step = step_and_stop
    kept = loop.threads
    loop.threads = lambda backend: 1
    try:
        return loop.train(parse(arguments), backend)
    except StoppedError as stopped:
        return str(stopped)
    finally:
        loop.Run._step = step
        loop.threads = kept


def train_alone(arguments: list[str], stop_after: int | None = None, signum: int = signal.SIGTERM) -> Any:
    with connect("local") as backend:
        return train(backend, arguments, stop_after, signum)


@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_run_ends_with_the_same_bits(case, paths, tmp_path):
    whole = train_alone(flags(case, paths, tmp_path / "whole"))
    part = flags(case, paths, tmp_path / "part")
    said = train_alone(part, stop_after=3)
    assert "SIGTERM ended the run after step 3 of" in said
    resumed = train_alone([*part, "--resume"])
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    for name in ("train_loss", "val_loss", "val_accuracy", "best", "steps"):
        assert resumed[name] == whole[name], name
    lines = [json.loads(line) for line in (tmp_path / "part" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, whole["steps"] + 1))


def test_a_frozen_model_trains_only_its_head(tmp_path, monkeypatch):
    write_cifar(tmp_path, 4)
    name = published("shufflenet_v2_x0_5").url.rpartition("/")[2]
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    before = torchvision().models.shufflenet_v2_x0_5().state_dict()
    torch.save(before, tmp_path / "hub" / "checkpoints" / name)
    run = tmp_path / "run"
    arguments = ["--recipe", "cifar10-resnet50-frozen", "--model", "shufflenet_v2_x0_5", "--data-dir", str(tmp_path)]
    arguments += ["--global-batch-size", "8"]
    train_alone([*arguments, "--epochs", "1", "--run-dir", str(run)])
    for name, tensor in safetensors.torch.load_file(run / "model-best.safetensors").items():
        assert name.startswith("fc.") or torch.equal(tensor, before[name]), name


def test_ranks_are_interrupted_together_and_resume_to_the_same_bits(processes, paths, tmp_path):
    # The model has BatchNorm and dropout, so each rank must get its own statistics and random state back.
    whole = processes(train, flags("dropout", paths, tmp_path / "whole"))[0]
    part = flags("dropout", paths, tmp_path / "part")
    said = processes(train, part, 3)
    assert len(set(said)) == 1
    assert "after step 3" in said[0]
    assert processes(train, [*part, "--resume"])[0]["weights_sha256"] == whole["weights_sha256"]


def test_a_run_resumes_on_the_other_backend_with_the_same_bits(pool: Pool, paths, tmp_path):
    require_horovod()
    arguments = flags("mnist-convnet", paths, tmp_path / "part")
    pool.connect("torch", 2)
    whole = pool.run(train, flags("mnist-convnet", paths, tmp_path / "whole"))[0]
    pool.run(train, arguments, 5)
    pool.connect("horovod", 2)
    assert pool.run(train, [*arguments, "--resume"])[0]["weights_sha256"] == whole["weights_sha256"]


def test_a_run_resumes_at_another_world_size(processes, paths, tmp_path):
    # Each step has 300 samples on any number of ranks, so all runs have the same batches.
    arguments = [*flags("digits", paths, tmp_path / "part")[:-1], "300"]
    whole = train_alone([*flags("digits", paths, tmp_path / "whole")[:-1], "300"])
    assert "after step 4" in train_alone(arguments, stop_after=4)
    resumed = processes(train, [*arguments, "--resume"])[0]
    assert resumed["val_accuracy"] == whole["val_accuracy"]
    one, other = (safetensors.torch.load_file(tmp_path / run / "model.safetensors") for run in ("whole", "part"))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, atol=1e-5, rtol=0)


@contextmanager
def handling_hangups(handler: int) -> Iterator[None]:
    """Set SIGHUP's handler at the start of the block; at its end, assert that SIGHUP has this handler again.

    Without this, the handler would depend on how pytest was started: nohup makes processes ignore the signal.
    """
    earlier = signal.signal(signal.SIGHUP, handler)
    try:
        yield
        assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, earlier)


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_a_signal_saves_and_ends_the_run(paths, tmp_path, signum):
    with handling_hangups(signal.SIG_DFL):
        said = train_alone(flags("digits", paths, tmp_path), 2, signum)
    assert said.startswith(f"{signum.name} ended the run after step 2 of 16, saved in {tmp_path}")
    assert (tmp_path / "checkpoints" / "step-00000002.safetensors").exists()


def test_a_run_under_nohup_continues_after_a_hangup(paths, tmp_path):
    with handling_hangups(signal.SIG_IGN):
        assert train_alone(flags("digits", paths, tmp_path), 2, signal.SIGHUP)["steps"] == 16


def test_a_run_that_was_stopped_after_its_last_step_is_evaluated_by_its_resume(paths, tmp_path):
    whole = train_alone(flags("digits", paths, tmp_path / "whole"))
    part = flags("digits", paths, tmp_path / "part")
    assert "after step 16 of 16" in train_alone(part, stop_after=16)
    resumed = train_alone([*part, "--resume"])
    kept = ("weights_sha256", "val_loss", "train_loss", "best", "epochs")
    assert {name: resumed[name] for name in kept} == {name: whole[name] for name in kept}
    again = train_alone([*part, "--resume"])
    assert {name: again[name] for name in kept} == {name: whole[name] for name in kept}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--model", "tests.training.test_recipes:pair"], ["tuple", "one row of logits"]),
        (["--model", "tests.training.test_recipes:one_row"], ["(1, 10) for targets of shape (2,)", "one row of logits"]),
        (["--model", "tests.training.test_recipes:narrow"], ["class indices", "the model has 3 outputs"]),
        # The targets are 3, the smallest class index that this model does not have.
        (
            [
                "--model",
                "tests.training.test_recipes:narrow",
                "--dataset",
                "tests.training.test_recipes:threes",
                "--classes",
                "10",
            ],
            ["from 0 to 2, since the model has 3 outputs, and one target is 3"],
        ),
        # Each sample has two targets, and the model returns a row of logits for each target. The second target is wrong.
        (
            [
                "--model",
                "tests.training.test_recipes:two_rows",
                "--dataset",
                "tests.training.test_recipes:two_targets",
                "--classes",
                "10",
            ],
            ["from 0 to 2, since the model has 3 outputs, and one target is 7"],
        ),
        # All targets are 0, which this model has. It is refused because of --classes 10: later targets may be up to 9.
        (
            [
                "--model",
                "tests.training.test_recipes:narrow",
                "--dataset",
                "tests.training.test_recipes:zeros",
                "--classes",
                "10",
            ],
            ["3 logits for each target", "the data has 10 classes"],
        ),
        (["--model", "tests.training.test_recipes:misfit"], ["(1, 8, 8)", "RuntimeError"]),
        (["--model", ":build"], ["':build'", "pkg.mod:function"]),
        (["--dataset", "tests.training.test_recipes:nothing", "--classes", "10"], ["no samples to evaluate on"]),
        (["--optimizer-options", "nesterov=["], ["'['", "true or false"]),
        (["--model", "squeezenet1_1"], ["squeezenet1_1", "do not fit"]),
    ],
)
def test_models_data_and_options_that_do_not_fit_are_refused_before_the_run(tmp_path, arguments, parts):
    with pytest.raises(UserError) as refusal:
        train_alone(["--max-steps", "1", "--run-dir", str(tmp_path / "run"), "--global-batch-size", "8", *arguments])
    assert "\n" not in str(refusal.value)
    for part in parts:
        assert part in str(refusal.value)
    assert not (tmp_path / "run").exists()


class Pair(nn.Flatten):
    def forward(self, inputs):
        return super().forward(inputs), inputs


def one_row():
    """Return a model that returns a single row of logits for a whole batch."""
    return nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (1, -1)), nn.AdaptiveAvgPool1d(64), nn.Linear(64, 10))


def pair():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Pair())


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def narrow():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def two_rows():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Unflatten(1, (2, 3)))


def two_targets():
    samples = [(torch.zeros(1, 8, 8), torch.tensor([2, 7]))] * 20
    return samples, samples


def misfit():
    return nn.Sequential(nn.Flatten(), nn.Linear(63, 10))


def threes():
    samples = [(torch.zeros(1, 8, 8), 3)] * 20
    return samples, samples


def zeros():
    samples = [(torch.zeros(1, 8, 8), 0)] * 20
    return samples, samples


def nothing():
    samples = [(torch.zeros(1, 8, 8), 0)] * 20
    return samples, []


def test_sigusr1_saves_and_the_run_continues(paths, tmp_path):
    summary = train_alone([*flags("digits", paths, tmp_path), "--keep", "9"], 2, signal.SIGUSR1)
    assert summary["steps"] == 16
    assert (tmp_path / "checkpoints" / "step-00000002.safetensors").exists()


def test_the_newest_checkpoints_and_the_best_one_are_kept(paths, tmp_path):
    summary = train_alone([*flags("digits", paths, tmp_path), "--epochs", "5", "--keep", "2", "--best", "val_accuracy"])
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["best.safetensors", "step-00000032.safetensors", "step-00000040.safetensors"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    best = max((line for line in lines if line["kind"] == "epoch"), key=lambda line: line["val_accuracy"])
    assert summary["best"]["step"] == best["step"]
    best_one = str(tmp_path / "checkpoints" / "best.safetensors")
    resumed = train_alone([*flags("digits", paths, tmp_path / "more"), "--epochs", "5", "--resume", best_one])
    assert resumed["steps"] == 40
    assert (tmp_path / "model-best.safetensors").exists()


def test_training_stops_after_the_given_number_of_epochs_without_a_better_metric(paths, tmp_path):
    arguments = [*flags("digits", paths, tmp_path), "--lr", "1e-9", "--momentum", "0", "--best", "val_accuracy"]
    summary = train_alone([*arguments, "--epochs", "50", "--early-stop", "2"])
    assert summary["epochs"] == summary["best"]["epoch"] + 2 < 10


def test_a_full_disk_is_reported_and_training_continues(paths, tmp_path, monkeypatch, caplog):
    write, failed = loop.checkpoint.Packed.write, []

    def full(packed, path, lock):
        if "step-00000008" in path.name:
            failed.append(path)
            raise OSError(28, "No space left on device")
        write(packed, path, lock)

    monkeypatch.setattr(loop.checkpoint.Packed, "write", full)
    summary = train_alone(flags("digits", paths, tmp_path))
    assert failed
    assert summary["steps"] == 16
    assert "the checkpoint of step 8 could not be written" in caplog.text
    assert (tmp_path / "checkpoints" / "step-00000016.safetensors").exists()


def test_tensorboard_gets_the_metrics(paths, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summary = train_alone([*flags("digits", paths, tmp_path), "--tensorboard"])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("epoch/val_loss")] == [8, 16]
    assert events.Scalars("epoch/val_loss")[-1].value == pytest.approx(summary["val_loss"])
    assert len(events.Scalars("step/lr")) == 16
