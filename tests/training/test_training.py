"""The training loop: the files of a run, exact metrics over all ranks, and exact resume."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import dualtrain.training.loop as loop
from dualtrain.backends import connect
from dualtrain.compare import main as compare
from dualtrain.compare import table
from dualtrain.config import parse
from dualtrain.data.memory import TensorSource
from dualtrain.data.sources import Task
from dualtrain.errors import BackendError, DivergedError, UserError
from dualtrain.on_ranks import on_all_ranks, on_rank_zero
from dualtrain.run_folder import checkpoint
from dualtrain.run_folder.folder_lock import FolderLock
from dualtrain.run_folder.run_dir import BEST_WEIGHTS
from dualtrain.state import weights_sha256
from dualtrain.trainer.rank_state import local_state, restore_local_state
from dualtrain.training import records
from dualtrain.training.assemble import load_task, make_model
from dualtrain.training.optimizers import make_schedule, restore_rates
from tests.hvd.worlds import worlds
from tests.training.runs import train_alone

SUMMARY_KEYS = {
    *("backend", "transport", "launcher", "world_size", "device", "epochs", "steps", "train_loss", "val_loss"),
    *("val_accuracy", "samples_per_second", "seconds", "weights_sha256"),
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one thread: on a busy machine, two threads mostly wait for each other."""
    monkeypatch.setattr(loop, "threads", lambda backend: 1)


def train(backend, *arguments: str) -> dict[str, Any]:
    return loop.train(parse(arguments), backend)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def test_a_run_leaves_the_documented_files(tmp_path):
    summary = train_alone("--epochs", "1", "--run-dir", str(tmp_path), "--checkpoint-every", "10")
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary.keys() >= SUMMARY_KEYS
    assert json.loads((tmp_path / "config.json").read_text())["epochs"] == 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [10, 20]
    assert [line["kind"] for line in lines].count("epoch") == 1
    assert all(math.isfinite(line["loss"]) for line in lines if line["kind"] == "step")
    assert not any("top5" in line for line in lines)  # training does not compute it
    steps = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert steps == ["best.safetensors", *(f"step-{step:08d}.safetensors" for step in (10, 20, summary["steps"]))]
    assert weights(tmp_path)


def test_the_speed_in_metrics_jsonl_leaves_out_the_time_of_evaluations(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(records, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    output, options = parse(["--log-every", "2", "--log-seconds", "0"]).output, {"shown": True, "launcher": "none"}
    found = records.Records(tmp_path, output, **options, total=9, done=0, evaluated=0, lock=FolderLock())
    for step in range(1, 5):
        now[0] += 1.0
        found.step(step, 1, 10, {"loss": 0.5, "accuracy": 1.0, "lr": 0.1})
        if step == 2:
            now[0] += 100.0  # an evaluation
            found.epoch(2, 1, 1, dict.fromkeys(("train_loss", "val_loss", "val_accuracy", "samples_per_second"), 0.5))
    found.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["samples_per_second"] for line in lines if line["kind"] == "step"] == [10.0, 10.0]


def test_checkpoint_every_does_not_skip_a_step_that_is_the_last_of_an_epoch(tmp_path):
    flags = ("--lr", "1e-30", "--batch-size", "500", "--checkpoint-every", "3", "--checkpoint-epochs", "3", "--keep", "9")
    summary = train_alone("--epochs", "3", *flags, "--run-dir", str(tmp_path))
    assert summary["steps"] == 9
    steps = [f"step-{step:08d}.safetensors" for step in (3, 6, 9)]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["best.safetensors", *steps]


def test_the_default_job_learns(tmp_path):
    assert train_alone("--run-dir", str(tmp_path))["val_accuracy"] >= 0.97


# Batches of 240 samples can be split evenly over 2 and over 3 ranks, batches of 250 samples only over 2. The sixth and
# last batch of an epoch is smaller.
@pytest.mark.parametrize("batch", ["240", "250"])
def test_the_world_size_does_not_change_the_training(processes, tmp_path, batch):
    flags = ("--max-steps", "10", "--global-batch-size", batch)
    alone = train_alone(*flags, "--run-dir", str(tmp_path / "alone"))
    summaries = processes(train, *flags, "--run-dir", str(tmp_path / "many"))
    assert len({summary["weights_sha256"] for summary in summaries}) == 1
    many = summaries[0]
    assert many["train_loss"] == pytest.approx(alone["train_loss"], abs=1e-4)
    for name, tensor in weights(tmp_path / "alone").items():
        torch.testing.assert_close(weights(tmp_path / "many")[name], tensor, atol=1e-4, rtol=0)


def evaluation(backend) -> tuple[float, float]:
    config = parse(["--global-batch-size", "7"])
    task = load_task(config.data, config.model.name, backend)
    assert task.train.timeout == task.val.timeout == backend.timeout
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    found = loop.Run("run", config, backend, task, model, FolderLock())
    values = found.trainer.evaluate(task.val.stream(*found.plan.validation(len(task.val)), backend.device))
    return values["val_loss"], values["val_accuracy"]


def test_label_smoothing_changes_the_loss_of_the_training_but_not_of_the_evaluation(tmp_path):
    flags = ("--max-steps", "1", "--lr", "1e-30", "--label-smoothing")
    plain, smoothed = (train_alone(*flags, value, "--run-dir", str(tmp_path / value)) for value in ("0", "0.5"))
    assert smoothed["val_loss"] == pytest.approx(plain["val_loss"], rel=1e-6)
    assert smoothed["train_loss"] != pytest.approx(plain["train_loss"], rel=1e-3)


def test_evaluation_counts_every_sample_once(real):
    with connect("local") as backend:
        loss, accuracy = evaluation(backend)
    for their_loss, their_accuracy in real(evaluation):
        assert their_accuracy == accuracy
        assert their_loss == pytest.approx(loss, abs=1e-9)


def draws(backend) -> tuple[str, float, float]:
    """Return a hash of a new model, a random number drawn next, and one drawn after a resume at another world size."""
    config = parse([])
    model = make_model(config.model, load_task(config.data, config.model.name, backend), 0, backend)
    first = torch.rand(()).item()
    state = backend.broadcast_object(local_state(model, backend.device))
    restore_local_state(model, [state] * (backend.size + 1), backend)
    return weights_sha256(model), first, torch.rand(()).item()


def test_ranks_begin_with_equal_weights_and_draw_different_random_numbers(processes):
    hashes, *numbers = zip(*processes(draws), strict=True)
    assert len(set(hashes)) == 1
    assert [len(set(drawn)) for drawn in numbers] == [processes.size] * 2


@worlds(("torch", 3))
def test_training_works_if_a_batch_has_fewer_samples_than_there_are_ranks(real, tmp_path):
    flags = ("--max-steps", "4", "--global-batch-size", "1")
    alone = train_alone(*flags, "--run-dir", str(tmp_path / "alone"))
    many = real(train, *flags, "--run-dir", str(tmp_path / "many"))[0]
    assert many["train_loss"] == pytest.approx(alone["train_loss"], abs=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(tmp_path, optimizer):
    flags = ("--optimizer", optimizer, "--lr", "0.003", "--max-steps", "30")
    whole = train_alone(*flags, "--run-dir", str(tmp_path / "whole"))
    part = ("--run-dir", str(tmp_path / "part"))
    train_alone(*flags[:-1], "9", *part)
    resumed = train_alone(*flags, *part, "--resume")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["train_loss"] == whole["train_loss"]
    steps = [json.loads(line)["step"] for line in (tmp_path / "part" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_a_resume_with_another_batch_size_is_refused(tmp_path):
    train_alone("--max-steps", "2", "--run-dir", str(tmp_path))
    with pytest.raises(UserError) as refusal:
        train_alone("--max-steps", "4", "--global-batch-size", "32", "--resume", "--run-dir", str(tmp_path))
    weights = f"(with the weights of that run: --weights {tmp_path / 'model.safetensors'})"
    assert str(refusal.value).endswith(f": give --global-batch-size 64, or start anew {weights}")


@pytest.mark.parametrize("resume", ["--resume", "--resume=auto"])
def test_the_error_of_a_refused_resume_recommends_the_weights_flag(tmp_path, resume):
    train_alone("--max-steps", "2", "--run-dir", str(tmp_path))
    weights = f": --weights {tmp_path / 'model.safetensors'})"
    for flags, condition in ((("--lr", "1"), ""), (("--image-size", "9"), ", if they fit")):
        with pytest.raises(UserError) as refusal:
            train_alone("--max-steps", "4", *flags, resume, "--run-dir", str(tmp_path))
        assert str(refusal.value).endswith(f" (with the weights of that run{condition}{weights}")
    with pytest.raises(UserError) as refusal:
        train_alone("--max-steps", "4", "--model", "mnist-net", resume, "--run-dir", str(tmp_path))
    assert "--weights" not in str(refusal.value)
    with pytest.raises(UserError, match=r"is not a checkpoint: .* use --weights"):
        train_alone("--max-steps", "4", "--resume", str(tmp_path / "model.safetensors"))
    file = str(tmp_path / "checkpoints" / "step-00000002.safetensors")
    with pytest.raises(UserError, match=f"is the checkpoint of a run: .* --resume {file}"):
        train_alone("--max-steps", "4", "--weights", file, "--run-dir", str(tmp_path / "other"))


def test_a_resume_with_other_settings_is_refused_and_changes_no_file(tmp_path):
    train_alone("--max-steps", "2", "--optimizer", "adam", "--run-dir", str(tmp_path))
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(UserError, match="--optimizer adam"):
        train_alone("--max-steps", "4", "--resume", "--run-dir", str(tmp_path))
    with pytest.raises(UserError, match="--seed 0"):
        train_alone("--max-steps", "4", "--optimizer", "adam", "--seed", "1", "--resume", "--run-dir", str(tmp_path))
    assert (tmp_path / "config.json").read_bytes() == before


def test_the_error_names_a_cure_if_there_is_nothing_to_resume(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(UserError, match="give --resume auto"):
        train_alone("--max-steps", "1", "--resume", "--run-dir", str(folder))
    assert not folder.exists()
    train_alone("--max-steps", "1", "--run-dir", str(folder))
    (folder / "summary.json").unlink()  # as if the run had been killed
    for path in (folder / "checkpoints").iterdir():
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"is damaged .* give --resume auto"):
        train_alone("--max-steps", "1", "--resume", "--run-dir", str(folder))
    assert train_alone("--max-steps", "1", "--resume", "auto", "--run-dir", str(folder))["steps"] == 1


def rates(folder: Path) -> dict[int, float]:
    """Return the learning rate of each step in metrics.jsonl."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["lr"] for line in lines if line["kind"] == "step"}


def test_the_first_step_after_a_resume_with_other_epochs_has_the_rate_of_the_new_schedule(tmp_path):
    flags = ("--schedule", "cosine", "--global-batch-size", "480", "--log-every", "1")  # an epoch has 3 steps
    train_alone(*flags, "--epochs", "4", "--run-dir", str(tmp_path / "whole"))
    train_alone(*flags, "--lr", "1e-30", "--epochs", "2", "--run-dir", str(tmp_path / "best"))
    (tmp_path / "best" / BEST_WEIGHTS).unlink()
    train_alone(*flags, "--epochs", "2", "--run-dir", str(tmp_path / "part"))
    train_alone(*flags, "--epochs", "4", "--resume", "--run-dir", str(tmp_path / "part"))
    assert list(rates(tmp_path / "part").items())[6:] == list(rates(tmp_path / "whole").items())[6:]
    # To restore the deleted file of the best weights, this resume loads the best checkpoint (step 3), then again the
    # checkpoint of step 6. It must not keep the learning rates that these checkpoints contain.
    train_alone(*flags, "--lr", "1e-30", "--epochs", "4", "--resume", "--run-dir", str(tmp_path / "best"))
    assert json.loads((tmp_path / "best" / "summary.json").read_text())["best"]["step"] == 3
    assert rates(tmp_path / "best")[7] * 1e30 == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", ["cosine", "one-cycle", "step", "multistep", "polynomial", "constant"])
def test_the_restored_rate_has_the_bits_of_an_uninterrupted_run(schedule):
    arguments = ("--schedule", schedule, "--warmup-steps", "3", "--lr-step", "7", "--lr-milestones", "5,11", "--lr", "0.3")
    section = parse([*arguments, "--lr-power", "1.7", "--lr-min", "0.01", "--global-batch-size", "8"]).schedule

    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.3)
        return optimizer, make_schedule(section, optimizer, 0.3, 20)

    optimizer, whole = make()
    for step in range(20):
        resumed, other = make()
        resumed.load_state_dict(optimizer.state_dict())
        other.load_state_dict(whole.state_dict())
        restore_rates(other)
        assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"], step
        assert other.get_last_lr() == whole.get_last_lr(), step
        optimizer.step()
        whole.step()


@worlds(("torch", 2))
@pytest.mark.parametrize("scale", ["linear", "sqrt"])
def test_a_resume_with_another_number_of_ranks_keeps_the_scaled_learning_rates(real, tmp_path, scale):
    schedule = ("--lr-scale", scale, "--schedule", "cosine", "--lr", "0.02", "--lr-min", "0.01", "--log-every", "1")
    flags = (*schedule, "--max-steps", "6", "--workers", "0")
    whole = real(train, *flags, "--batch-size", "16", "--checkpoint-every", "3", "--run-dir", str(tmp_path / "whole"))[0]
    first = tmp_path / "whole" / "checkpoints" / "step-00000003.safetensors"
    tree = checkpoint.load(first)
    assert tree["config"]["lr_batch"] == 16
    # Older versions did not write lr_batch, and a resumed run wrote its own batch_size (here 32, not the first run's 16).
    tree["config"] |= {"lr_batch": None, "batch_size": 32}
    old = tmp_path / "old" / "checkpoints" / first.name
    old.parent.mkdir(parents=True)
    checkpoint.write(old, tree)
    batches = (["--batch-size", "32"], ["--global-batch-size", "32"], ["--global-batch-size", "32", "--lr-batch", "16"])
    runs = [(first, batch) for batch in batches] + [(old, batches[0])]
    for number, (file, batch) in enumerate(runs):
        folder = tmp_path / str(number)
        resumed = train_alone(*flags, *batch, "--resume", str(file), "--run-dir", str(folder))
        assert rates(folder) == {step: lr for step, lr in rates(tmp_path / "whole").items() if step > 3}
        assert resumed["learning_rate"] == whole["learning_rate"]
        assert resumed["settings"]["lr_batch"] == 16
    with pytest.raises(UserError, match="--lr-batch 16, and this run has --lr-batch 32: give --lr-batch 16, or"):
        train_alone(*flags, "--batch-size", "32", "--lr-batch", "32", "--resume", "--run-dir", str(tmp_path / "whole"))
    with pytest.raises(UserError, match="give --lr-batch or --batch-size"):
        parse([*flags, "--global-batch-size", "32", "--resume", "auto", "--run-dir", str(tmp_path / "new")])


def test_an_earlier_checkpoint_can_be_resumed(tmp_path):
    first = train_alone("--max-steps", "6", "--checkpoint-every", "2", "--run-dir", str(tmp_path))
    earlier = tmp_path / "checkpoints" / "step-00000002.safetensors"
    again = train_alone("--max-steps", "6", "--resume", str(earlier), "--run-dir", str(tmp_path))
    assert again["weights_sha256"] == first["weights_sha256"]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    # Later checkpoints of the first run are kept under other names, so that no run resumes from them.
    assert [name for name in names if name.endswith(".aside")]
    assert names[-1].startswith("step-00000006")
    with pytest.raises(UserError, match="holds another run"):
        train_alone("--max-steps", "6", "--resume", str(earlier), "--run-dir", str(train_into(tmp_path / "other")))


def train_into(folder: Path) -> Path:
    train_alone("--max-steps", "1", "--run-dir", str(folder))
    return folder


def test_a_validation_loss_that_is_not_finite_ends_the_run(tmp_path):
    with pytest.raises(DivergedError, match="validation loss became infinite or not a number in step 1"):
        train_alone("--lr", "1e30", "--max-steps", "1", "--run-dir", str(tmp_path))
    assert not (tmp_path / "summary.json").exists()


def with_samples(training: dict[int, torch.Tensor], validation: dict[int, torch.Tensor]):
    """Build two datasets of 8 samples: the given inputs, and zeros for all other samples."""
    return tuple([(own.get(number, torch.zeros(3)), number % 2) for number in range(8)] for own in (training, validation))


def nan_in_training():
    return with_samples({5: torch.tensor([0.0, math.nan, 0.0])}, {})


def nan_in_a_tensor():
    inputs, targets = torch.zeros(8, 3), torch.arange(8) % 2
    bad = inputs.clone()
    bad[5, 1] = math.nan
    return Task(TensorSource(bad, targets), TensorSource(inputs, targets), (3,), 2)


class Unclosable(TensorSource):
    """A source whose ``close`` raises an error."""

    error: Exception = ValueError("the pool is gone")

    def close(self):
        raise self.error


class Disconnected(Unclosable):
    """A source whose ``close`` raises the error of a collective call."""

    error = BackendError("rank 1 failed")


def unclosable():
    return Task(*(Unclosable(torch.zeros(8, 3), torch.arange(8) % 2) for _ in range(2)), (3,), 2)


def nan_and_unclosable():
    task = nan_in_a_tensor()
    return Task(Unclosable(task.train._inputs, task.train._targets), task.val, (3,), 2)


def nan_and_disconnected():
    task = nan_in_a_tensor()
    return Task(Disconnected(task.train._inputs, task.train._targets), task.val, (3,), 2)


def infinite_in_validation():
    return with_samples({}, {6: torch.tensor([0.0, math.inf, 0.0])})


def longs_in_training():
    return with_samples(dict.fromkeys(range(8), torch.zeros(3, dtype=torch.int64)), {})


def wide_in_training():
    return with_samples(dict.fromkeys(range(8), torch.zeros(4)), {})


def half_without_target():
    return tuple([(torch.zeros(3), -100 if number % 2 else 0) for number in range(8)] for _ in range(2))


def linear():
    return torch.nn.Linear(3, 2)


def test_steps_without_a_counted_target_advance_the_schedule(tmp_path):
    own = ["--model", f"{__name__}:linear", "--dataset", f"{__name__}:half_without_target", "--classes", "2"]
    flags = ["--workers", "0", "--global-batch-size", "1", "--epochs", "1", "--schedule", "polynomial", "--lr", "0.8"]
    train_alone(*own, *flags, "--log-every", "1", "--run-dir", str(tmp_path))
    assert list(rates(tmp_path).values()) == pytest.approx([0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize(
    ("data", "error", "part"),
    [
        ("nan_in_training", DivergedError, "training sample 5 has inputs that are infinite or not a number: correct"),
        ("nan_in_a_tensor", DivergedError, "training sample 5 has inputs that are infinite or not a number: correct"),
        (
            "infinite_in_validation",
            DivergedError,
            "validation sample 6 has inputs that are infinite or not a number: correct",
        ),
        ("nan_and_unclosable", DivergedError, "training sample 5 has inputs that are infinite or not a number: correct"),
        ("nan_and_disconnected", DivergedError, "training sample 5 has inputs that are infinite or not a number: correct"),
        ("unclosable", UserError, r"the source of the validation data \(its close\) failed: ValueError: the pool is gone"),
        ("longs_in_training", UserError, r"a sample of shape \(3,\) raises RuntimeError: .* but got Long and Float"),
        ("wide_in_training", UserError, r"a sample of shape \(4,\) raises RuntimeError: .*cannot be multiplied"),
    ],
)
def test_the_error_describes_a_sample_or_a_source_that_cannot_be_used(tmp_path, data, error, part):
    own = ["--model", f"{__name__}:linear", "--dataset", f"{__name__}:{data}", "--classes", "2", "--workers", "0"]
    with pytest.raises(error, match=part):
        train_alone(*own, "--epochs", "1", "--run-dir", str(tmp_path / "run"))


def test_a_folder_with_another_run_is_refused(tmp_path):
    train_alone("--max-steps", "1", "--run-dir", str(tmp_path))
    before = (tmp_path / "summary.json").read_bytes()
    with pytest.raises(UserError, match="holds another run"):
        train_alone("--max-steps", "2", "--run-dir", str(tmp_path))
    assert (tmp_path / "summary.json").read_bytes() == before


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        train_alone("--run-dir", str(tmp_path / "file" / "run"))


def test_each_run_without_run_dir_gets_its_own_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        train_alone("--max-steps", "1")
        assert "in batches of 64, 1 step, learning rate" in capsys.readouterr().out
    assert len(list((tmp_path / "runs").iterdir())) == 2


def diverge(backend, folder: str) -> str:
    # Only one rank has bad samples, but all ranks must stop in the same step.
    original = loop.load_task

    def spoiled(*arguments):
        task = original(*arguments)
        if backend.rank == backend.size - 1:
            task.train._inputs.fill_(float("inf"))
        return task

    loop.load_task = spoiled
    try:
        train(backend, "--run-dir", folder)
    except DivergedError as error:
        return str(error)
    finally:
        loop.load_task = original
    return "trained"


def test_a_loss_that_is_not_finite_stops_all_ranks_in_the_same_step(processes, tmp_path):
    messages = processes(diverge, str(tmp_path))
    # After the last semicolon, messages differ: only the last rank finds a bad sample in its data.
    # Only rank 0 names the last checkpoint, or says that there is none.
    what = {message.rpartition("; ")[0].replace("; there is no checkpoint yet", "") for message in messages}
    assert len(what) == 1
    assert "; training sample " in messages[-1]
    assert f"in step 1 on rank {processes.size - 1};" in messages[0]
    assert "no checkpoint yet" in messages[0]


def test_the_error_of_a_diverged_run_names_the_last_good_checkpoint(tmp_path):
    with pytest.raises(DivergedError) as stop:
        train_alone("--lr", "20", "--momentum", "0.99", "--checkpoint-every", "1", "--run-dir", str(tmp_path))
    newest = max((tmp_path / "checkpoints").iterdir())
    assert str(newest) in str(stop.value)


def refuse_on(backend, rank: int) -> str:
    def task() -> str:
        if backend.rank == rank:
            raise UserError("no such file")
        return "done"

    try:
        return on_all_ranks(backend, "a task", task)
    except UserError as error:
        return str(error) if error.shared else "not shared"


def test_an_error_on_one_rank_is_raised_on_all(spmd):
    last = spmd.size - 1
    answers = spmd(refuse_on, last)
    assert set(answers) == {f"rank {last}: no such file" if spmd.size > 1 else "no such file"}
    assert set(spmd(refuse_on, spmd.size)) == {"done"}


def rank_zero_task(backend, error: Exception | None) -> Any:
    def task() -> dict[str, int]:
        if error is not None:
            raise error
        return {"rank": backend.rank}

    try:
        return on_rank_zero(backend, "a task", task)
    except (UserError, TypeError) as raised:
        assert backend.allreduce(torch.ones(1), "sum").item() == backend.size  # the backend is still usable
        return str(raised)


def test_the_result_or_the_error_of_rank_0_is_sent_to_all_ranks(spmd):
    assert spmd(rank_zero_task, None) == [{"rank": 0}] * spmd.size
    assert spmd(rank_zero_task, UserError("the disk is full")) == ["the disk is full"] * spmd.size
    said = "a task: [Errno 2] no such folder: '/gone/x'; choose a path in a folder that exists"
    assert all(text.startswith(said) for text in spmd(rank_zero_task, OSError(2, "no such folder", "/gone/x")))
    said = "a task: [Errno 28] full: '/gone/x'; free space on the disk of '/gone', then try again"
    assert spmd(rank_zero_task, OSError(28, "full", "/gone/x")) == [said] * spmd.size
    others = ["a task: rank 0 failed with TypeError: no set"] * (spmd.size - 1)
    assert spmd(rank_zero_task, TypeError("no set")) == ["no set", *others]


def test_the_compare_command_says_whether_runs_have_the_same_weights(tmp_path, capsys):
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        train_alone("--max-steps", "1", "--seed", seed, "--run-dir", str(tmp_path / name))
    assert compare([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "same weights: yes" in capsys.readouterr().out
    assert compare([str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "same weights: not known, since there is no second run to compare"
    assert compare([str(tmp_path / name) for name in ("c", "a", "b")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "same weights: no, the 3 runs ended with 2 models: a = b; c"
    assert compare([str(tmp_path / "nothing")]) == 2
    assert "summary.json" in capsys.readouterr().err
    assert compare([]) == 2
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    head, row, *_ = table([("a", summary)]).splitlines()
    assert len(re.split(" {2,}", row.strip())) == len(re.split(" {2,}", head.strip()))
