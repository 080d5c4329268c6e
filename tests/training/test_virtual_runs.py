"""Runs of the command line with ``--virtual-ranks``: one result on any number of ranks, also after a resume."""

from __future__ import annotations

import itertools
import json
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dualtrain.training.loop as loop
from dualtrain import connect
from dualtrain.config import parse
from dualtrain.errors import StoppedError, UserError
from dualtrain.run_folder import checkpoint
from tests.conftest import Spmd, require_horovod
from tests.training.virtual import hash_of

TEXT = "the quick brown fox jumps over the lazy dog . " * 40
COMMON = ("--log-every", "1", "--checkpoint-every", "1000", "--workers", "0")
RUNS = {
    # The last batch of an epoch has 1 sample, so three of its four shards are empty.
    "digits": (
        *("--model", "tests.training.virtual:dropout_net", "--batch-size", "359", "--accumulate", "2", "--epochs", "3"),
        *("--virtual-ranks", "4", "--ema", "0.9", "--momentum", "0.9", "--lr", "0.02", "--lr-scale", "linear"),
    ),
    # Each of the two shards of the evaluation data takes several batches.
    "evaluation": (
        *("--model", "tests.training.virtual:relative", "--batch-size", "70", "--max-steps", "3", "--virtual-ranks", "2"),
    ),
    "text": (
        *("--recipe", "bert-mlm", "--model", "tests.training.virtual:text", "--text-file", "{text}", "--vocabulary", "60"),
        *(
            "--sequence-length",
            "16",
            "--batch-size",
            "3",
            "--max-steps",
            "5",
            "--warmup-steps",
            "2",
            "--virtual-ranks",
            "3",
        ),
    ),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "words.txt"
    file.write_text(TEXT)
    return str(file)


def arguments(name, texts, folder):
    return [flag.format(text=texts) for flag in (*RUNS[name], *COMMON)] + ["--run-dir", str(folder)]


def train(backend, flags, stop_after=None):
    """Train; return the weights' hash, or the message of the error if a signal on the last rank ended the run."""
    step = loop.Run._step

    def step_and_stop(run):
        if run.cursor.step + 1 == stop_after and backend.rank == backend.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(run)

    loop.Run._step = step_and_stop
    try:
        return loop.train(parse(flags), backend)["weights_sha256"]
    except StoppedError as stopped:
        return str(stopped)
    finally:
        loop.Run._step = step


def result(folder):
    """Return a run's metrics without times and speeds, part of its summary, and a hash of its last checkpoint's trainer."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    records = [{k: v for k, v in line.items() if k not in ("samples_per_second", "time")} for line in lines]
    names = ("steps", "train_loss", "val_loss", "val_accuracy", "weights_sha256")
    last = sorted((folder / "checkpoints").glob("step-*"))[-1]
    return records, {name: summary[name] for name in names}, hash_of(checkpoint.load(last)["trainer"])


def train_alone(flags, stop_after=None):
    with connect("local") as backend:
        return train(backend, flags, stop_after)


@pytest.fixture(scope="module")
def expected(texts, tmp_path_factory):
    """Return the result of each run on one rank."""
    results = {}
    for name in RUNS:
        folder = tmp_path_factory.mktemp("alone") / "run"
        train_alone(arguments(name, texts, folder))
        results[name] = result(folder)
    return results


# On Horovod, this tests only "evaluation".
# test_an_interrupted_run_resumes_on_another_backend_and_world_size tests the other runs.
@pytest.mark.parametrize(
    ("real", "name"),
    [*itertools.product([("torch", 2), ("torch", 4)], RUNS), (("horovod", 3), "evaluation")],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
    indirect=["real"],
)
def test_a_run_with_virtual_ranks_has_the_same_result_on_one_and_several_ranks(real, name, texts, tmp_path, expected):
    hashes = real(train, arguments(name, texts, tmp_path))
    assert hashes == [expected[name][1]["weights_sha256"]] * real.size
    assert result(tmp_path) == expected[name]


CHAIN = [("torch", 4), ("local", 1), ("horovod", 3), ("shm", 2)]


@pytest.mark.parametrize("name", ["digits", "text"])
def test_an_interrupted_run_resumes_on_another_backend_and_world_size(name, pool, texts, tmp_path, expected):
    """The last rank gets the signal. In the world of four ranks, it has none of the three shards of "text"."""
    require_horovod()
    flags = arguments(name, texts, tmp_path)
    for number, (world, size) in enumerate(CHAIN, 1):
        last = number == len(CHAIN)
        spmd = Spmd(world, size, None if world == "local" else pool)
        for returned in spmd(train, flags, None if last else number):
            assert last or f"SIGTERM ended the run after step {number} of" in returned
        flags = [*arguments(name, texts, tmp_path), "--resume"]
    assert result(tmp_path) == expected[name]


def test_a_resume_with_another_number_of_virtual_ranks_is_refused(texts, tmp_path):
    flags = arguments("text", texts, tmp_path)
    assert "after step 1 of" in train_alone(flags, 1)
    other = [*flags, "--resume", "--virtual-ranks", "4"]
    with pytest.raises(UserError, match=r"made with .*--virtual-ranks 3.*, and this run has .*--virtual-ranks 4"):
        train_alone(other)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--compress", "fp16"],
            "so bits depend on the number of ranks: leave out --compress or --virtual-ranks 4",
        ),
        (["--compile"], "--compile may give different bits at each number of ranks"),
        (["--data-parallel"], "--data-parallel splits batches over GPUs by itself"),
        (["--sync-batchnorm"], "with --virtual-ranks 4 needs one rank for each virtual rank, and this job has 1: start 4"),
    ],
)
def test_settings_that_depend_on_the_world_size_are_refused_with_virtual_ranks(flags, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train_alone(["--virtual-ranks", "4", "--batch-size", "100", "--run-dir", str(tmp_path / "run"), *flags])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["0", "4097", "2.5"])
def test_the_number_of_virtual_ranks_must_be_a_whole_number_within_bounds(value):
    with pytest.raises(UserError, match=f"--virtual-ranks must be a whole number from 1 to 4096, not '{value}'"):
        parse(["--virtual-ranks", value])


def few_samples(folder):
    """Build training data, and validation data of two samples."""
    return [TensorDataset(torch.linspace(-1, 1, n * 4).view(n, 4), torch.arange(n) % 3) for n in (8, 2)]


def linear(shape, classes):
    return nn.Linear(*shape, classes)


def test_a_validation_set_may_be_smaller_than_the_number_of_shards(tmp_path):
    task = ["--dataset", f"{__name__}:few_samples", "--model", f"{__name__}:linear", "--classes", "3", "--max-steps", "2"]
    train_alone([*task, *COMMON, "--batch-size", "2", "--virtual-ranks", "4", "--run-dir", str(tmp_path)])
    assert 0 <= json.loads((tmp_path / "summary.json").read_text())["val_accuracy"] <= 1
