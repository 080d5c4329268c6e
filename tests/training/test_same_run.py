"""Ranks with different settings or data: all raise an error before the first step, and the error names the difference."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import numpy
import pytest
import torch

import dualtrain.trainer.same_run as same_run
import dualtrain.training.loop as loop
from dualtrain import connect
from dualtrain.config import SETTINGS, parse
from dualtrain.data import Batch, Source, Task
from dualtrain.data.images import Geometry, ImageFiles
from dualtrain.data.loader import LoaderSource
from dualtrain.data.memory import TensorSource
from dualtrain.data.text import MaskedText
from dualtrain.data.wrapped import wrap
from dualtrain.errors import RanksDifferError, UserError
from tests.threads import run_threads

#: Settings that are compared. Add a new setting here, or to ``MAY_DIFFER`` below and, with the reason, to
#: ``same_run.MAY_DIFFER``.
COMPARED = {
    *("backend", "transport", "nproc", "threads", "data_parallel", "output_device", "parallel_loss", "recipe", "timeout"),
    *("deterministic", "dataset", "download", "augment", "image_size", "resize", "pad", "normalize", "classes", "shape"),
    *("samples", "sequence_length", "vocabulary", "model", "pretrained", "freeze_backbone", "channels_last", "compile"),
    *(
        "sync_batchnorm",
        "batch_size",
        "global_batch_size",
        "accumulate",
        "virtual_ranks",
        "drop_last",
        "optimizer",
        "optimizer_options",
    ),
    *("momentum", "weight_decay", "label_smoothing", "clip_norm", "amp", "compress", "ema", "seed", "lr", "lr_scale"),
    *("lr_batch", "schedule", "warmup_steps", "lr_step", "lr_milestones", "lr_gamma", "lr_power", "lr_min", "epochs"),
    *(
        "max_restarts",
        "max_steps",
        "early_stop",
        "checkpoint_every",
        "checkpoint_seconds",
        "checkpoint_epochs",
        "keep",
        "best",
    ),
}
MAY_DIFFER = {
    *("device", "data_dir", "text_file", "weights", "run_dir", "resume", "workers", "log_every", "log_seconds"),
    *("tensorboard", "verbose"),
}


@pytest.fixture(autouse=True)
def allow_repeated_warnings():
    same_run.warn_once.cache_clear()


def message(call, *args: Any) -> str:
    """Return the text of the RanksDifferError that ``call`` raises; "" if it raises none."""
    try:
        call(*args)
    except RanksDifferError as error:
        return str(error)
    return ""


def alike(answers: list[Any]) -> Any:
    """Assert that the ranks have equal answers; return the answer."""
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


# ------------------------------------------------------------------------------------------------ settings


def other(name: str, value: Any) -> Any:
    """Return a value of the setting that differs from ``value`` and is not ``None``."""
    kind = SETTINGS[name].kind
    if kind is bool:
        return not value
    if kind in (int, float):
        return 7 if value is None else value + 1
    return f"{value}-other"


def changed_settings(backend, names: list[str]) -> list[str]:
    settings, last = parse([]).plain(), backend.rank == backend.size - 1
    found = []
    for name in names:
        mine = {**settings, name: other(name, settings[name])} if last else settings
        found.append(message(same_run.compare_settings, mine, backend))
    return found


def test_every_setting_is_either_compared_between_ranks_or_allowed_to_differ():
    assert set(SETTINGS) == COMPARED | MAY_DIFFER
    assert set(same_run.MAY_DIFFER) == MAY_DIFFER
    assert not COMPARED & MAY_DIFFER
    names, settings = sorted(SETTINGS), parse([]).plain()
    for name, text in zip(names, alike(run_threads(2, changed_settings, names)), strict=True):
        if name in COMPARED:
            values = settings[name], other(name, settings[name])
            mine, theirs = ("not set" if value is None else repr(value) for value in values)
            line = f"{SETTINGS[name].flag} is {mine} on rank 0 and {theirs} on rank 1; "
            assert text == "the ranks do not have the same settings: " + line + "give every rank the same command line"
        elif name in ("weights", "resume"):  # the paths may differ, but all ranks or none must give the flag
            assert f"{SETTINGS[name].flag} is not set on rank 0 and 'given' on rank 1" in text
        else:
            assert text == "", name


def other_paths(backend) -> None:
    folder = f"/host-{backend.rank}"
    flags = ["--resume", f"{folder}/step-1", "--run-dir", folder, "--weights", folder, "--data-dir", folder]
    same_run.compare_settings(parse(flags).plain(), backend)


def auto_on_rank_1(backend) -> str:
    resume = ["--resume", "auto" if backend.rank else "/run/step-1"]
    return message(same_run.compare_settings, parse([*resume, "--run-dir", "/run"]).plain(), backend)


def test_resume_auto_on_one_rank_and_a_file_on_another_are_refused():
    assert "--resume is 'given' on rank 0 and 'auto' on rank 1" in alike(run_threads(2, auto_on_rank_1))


def test_ranks_may_have_different_paths():
    run_threads(2, other_paths)


def train_with(backend, arguments: list[list[str]]) -> str:
    return message(loop.train, parse(arguments[backend.rank]), backend)


@pytest.mark.parametrize("flags", [["--download"], ["--pretrained", "--model", "resnet18"], ["--max-steps", "3"]])
def test_settings_are_compared_before_data_are_loaded_or_files_are_written(flags, tmp_path, monkeypatch):
    def begun(*args: object) -> None:
        raise AssertionError("a rank continued")

    monkeypatch.setattr(loop, "load_task", begun)
    text = alike(run_threads(2, train_with, [["--run-dir", str(tmp_path)], ["--run-dir", str(tmp_path), *flags]]))
    assert f"{flags[0]} is " in text
    assert not list(tmp_path.iterdir())


def other_versions(backend) -> str:
    backend.versions = {"Horovod": f"0.28.{backend.rank}"}
    return message(same_run.compare_settings, parse(["--seed", str(backend.rank)]).plain(), backend)


def test_the_error_for_different_versions_names_them_and_the_remedy():
    text = alike(run_threads(2, other_versions))
    assert "Horovod is '0.28.0' on rank 0 and '0.28.1' on rank 1" in text
    assert text.endswith("give every rank the same command line, and install the same versions on all hosts")
    with connect("local") as backend:
        assert {"Python", "torch", "dualtrain", "kind of device"} <= set(same_run._platform(backend))


def compare_settings_twice(backend) -> None:
    for _ in range(2):
        same_run.compare_settings(parse([]).plain(), backend)


def processor_of_rank(backend) -> dict[str, str]:
    return {"CPU capability": ["AVX2", "AVX512"][backend.rank], "GPU": "none"}


def test_different_processors_cause_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(same_run, "processor", processor_of_rank)
    run_threads(2, compare_settings_twice)
    (line,) = caplog.messages
    assert line.startswith("the ranks have different processors")
    assert "CPU capability is 'AVX2' on rank 0 and 'AVX512' on rank 1; ATEN_CPU_CAPABILITY, " in line


# ------------------------------------------------------------------------------------------------ data


def task_of(train: Any, val: Any = None, **options: Any) -> Task:
    return Task(train, val or numbered(4), **{"shape": (1,), "classes": 3, **options})


def numbered(samples: int, **values: float) -> TensorSource:
    """Return samples with the inputs 0, 1, 2 and so on; ``n99=5`` gives sample 99 the input 5."""
    inputs = torch.arange(float(samples))[:, None]
    for number, value in values.items():
        inputs[int(number[1:])] = value
    return TensorSource(inputs, torch.arange(samples) % 3)


class Pairs:
    """A user's dataset, augmented by random numbers from ``draw``; ``float``, the default, always returns 0.0."""

    num_classes = 3

    def __init__(self, draw: Any = float, broken_sample: int | None = None, offset: float = 0.0) -> None:
        self.draw, self.broken_sample, self.offset = draw, broken_sample, offset

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        if number == self.broken_sample:
            raise RuntimeError(f"sample {number} is broken")
        return torch.tensor([number + self.draw() + self.offset]), number % 3


def drawn() -> float:
    """Draw from the global generators, which threads share."""
    return torch.rand(()).item() + random.random() + numpy.random.rand()


class Streamed(Source):
    """A user's source with only the required methods."""

    def __init__(self, offset: float) -> None:
        self.offset = offset

    def __len__(self) -> int:
        return 40

    def stream(self, batches, device):
        for batch in batches:
            yield batch.numbers[:, None] + self.offset, batch.numbers % 3


class Broken(Streamed):
    """A user's source that cannot be read."""

    def stream(self, batches, device):
        raise OSError("no disk")


class Duck:
    """A source that has only the methods that a run needs, and is not a subclass of Source."""

    __len__, stream, close = Streamed.__len__, Streamed.stream, Source.close
    offset = 0


def images(root, changed: bool = False) -> LoaderSource:
    samples = []
    for number in range(20):
        path = root / ("cat" if number < 10 else "dog") / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"other" if changed and number == 19 else b"not decoded")
        samples.append((str(path), int(number >= 10)))
    return LoaderSource(ImageFiles(samples, Geometry(4, 4)), 0)


DATA = {
    "equal": (lambda rank: task_of(numbered(100)), ""),
    "more samples": (
        lambda rank: task_of(numbered(100 + rank)),
        "number of training samples is 100 on rank 0 and 101 on rank 1; give every host the same data",
    ),
    "fewer to validate": (lambda rank: task_of(numbered(9), numbered(4 - rank)), "number of validation samples is 4 on"),
    "classes": (lambda rank: task_of(numbered(9), classes=3 + rank), "number of classes is 3 on rank 0 and 4 on rank 1"),
    "names": (
        lambda rank: task_of(numbered(9), names=("cat", ["dog", "cow"][rank])),
        "name of class 1 is 'dog' on rank 0 and 'cow' on rank 1; ",
    ),
    "the last value": (lambda rank: task_of(numbered(100, n99=rank)), "checksum of training sample 99 is '"),
    "one value to validate": (
        lambda rank: task_of(numbered(9), numbered(5, n3=rank)),
        "do not have the same validation data: checksum of validation sample 3 is '",
    ),
    "a target": (
        lambda rank: task_of(TensorSource(torch.zeros(2, 1), torch.tensor([0, rank]))),
        "checksum of training sample 1 is '",
    ),
    "tokens": (lambda rank: task_of(MaskedText(torch.full((8, 4), 7 + rank), 9)), "checksum of training sample 0 is '"),
    "wrapped, equal": (lambda rank: wrap(Pairs(), Pairs()), ""),
    "wrapped, other": (lambda rank: wrap(Pairs(offset=rank), Pairs()), "checksum of training sample 0 is '"),
    "wrapped, broken on a rank": (
        lambda rank: wrap(Pairs(broken_sample=19 if rank else None), Pairs()),
        "on rank 0 and 'unreadable (sample 19 of the dataset failed: RuntimeError: sample 19 is broken, in test_same_run",
    ),
    "wrapped, broken on all": (
        lambda rank: wrap(Pairs(broken_sample=19), Pairs()),
        "",  # the run raises the error if it reaches that sample
    ),
    "streamed, equal": (lambda rank: task_of(Streamed(0)), ""),
    "streamed, other": (lambda rank: task_of(Streamed(rank)), "checksum of training sample 0 is '"),
    "nearly a source": (lambda rank: task_of([Streamed(0), Duck()][rank]), ""),
    "empty": (lambda rank: task_of(numbered(0)), ""),
}


def compared_data(backend, folder) -> list[str]:
    found = [message(same_run.compare_task, make(backend.rank), backend) for make, _ in DATA.values()]
    mine = folder / f"host-{backend.rank}"
    for changed in (False, True):
        task = task_of(images(mine, changed=changed and backend.rank == 1))
        found.append(message(same_run.compare_task, task, backend))
    return found


def test_data_are_compared_between_ranks(tmp_path):
    *answers, same_files, other_file = alike(run_threads(2, compared_data, tmp_path))
    for (name, (_, part)), text in zip(DATA.items(), answers, strict=True):
        assert part in text if part else text == "", f"{name}: {text}"
    assert same_files == ""
    assert "checksum of training sample 19 is '" in other_file


def test_reading_a_fifo_in_place_of_a_file_does_not_block(tmp_path):
    import os

    os.mkfifo(tmp_path / "0.jpg")
    source = LoaderSource(ImageFiles([(str(tmp_path / "0.jpg"), 0)], Geometry(4, 4)), 0)
    (found,) = same_run._checksums("training", source).values()
    assert "not a regular file" in found


def own_generators(backend, equal: bool) -> str:
    # The samples contain random numbers that differ at each reading and, unless ``equal``, between ranks.
    draw = random.Random(0 if equal else backend.rank).random
    return message(same_run.compare_task, wrap(Pairs(draw), Pairs()), backend)


@pytest.mark.parametrize(
    ("size", "equal", "words"),
    [
        (2, False, "cannot check that the ranks have the same training data"),
        (
            2,
            True,
            "results depend on the numbers of ranks and workers, and on restarts; draw random numbers from the global",
        ),
        (1, True, "results depend on the numbers of ranks and workers"),
    ],
)
def test_data_that_differ_at_each_reading_cause_a_warning(size, equal, words, caplog):
    assert alike(run_threads(size, own_generators, equal)) == ""
    (line,) = caplog.messages
    assert words in line
    assert "dataset gives a different value each time that a sample is read" in line


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_the_number_of_samples_that_are_read_again_does_not_depend_on_time(monkeypatch, caplog, seconds):
    draws = itertools.count(0.0)
    source = wrap(Pairs(lambda: next(draws)), Pairs()).train
    first = same_run._checksums("training", source)
    before = next(draws)
    now = itertools.count(0.0, seconds)
    monkeypatch.setattr(same_run, "time", mock.Mock(monotonic=lambda: next(now)))
    same_run._warn_if_random("training", source, first)
    assert next(draws) == before + 1 + 8  # eight samples were read again
    assert len(caplog.messages) == 1


def computed_and_stored(backend) -> list[str]:
    tasks = task_of(Streamed(backend.rank)), task_of(numbered(9, n0=backend.rank + 1))
    return [message(same_run.compare_task, task, backend) for task in tasks]


def test_samples_computed_on_different_processors_may_differ(monkeypatch, caplog):
    monkeypatch.setattr(same_run, "processor", processor_of_rank)
    computed, stored = alike(run_threads(2, computed_and_stored))
    assert computed == ""
    assert "checksum of training sample 0 is" in stored
    assert "the ranks compute the samples on different processors" in caplog.text


def broken_on_a_rank(backend) -> str:
    return message(same_run.compare_task, task_of(Broken(0) if backend.rank else Streamed(0)), backend)


def test_a_sample_that_only_some_ranks_can_read_is_an_error_on_any_processor(monkeypatch):
    monkeypatch.setattr(same_run, "processor", processor_of_rank)
    assert "checksum of training sample 0 is '" in (text := alike(run_threads(2, broken_on_a_rank)))
    assert "unreadable (no disk)" in text


class Failing(Pairs):
    """A user's dataset whose last sample cannot be read because of ``error``."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __getitem__(self, number):
        if number == 19:
            raise self.error
        return super().__getitem__(number)


def may_succeed_later(backend, error) -> bool:
    with pytest.raises(RanksDifferError, match="unreadable") as caught:
        same_run.compare_task(wrap(Failing(error) if backend.rank else Pairs(), Pairs()), backend)
    return caught.value.transient


def test_a_restart_may_follow_if_a_rank_cannot_read_a_sample_because_of_the_network():
    """A launcher restarts the ranks only if the error is transient on the rank whose exit status it reads."""
    assert run_threads(2, may_succeed_later, ConnectionResetError(104, "Connection reset by peer")) == [True, True]
    assert run_threads(2, may_succeed_later, ValueError("broken")) == [False, False]


def compare_pairs(backend) -> str:
    return message(same_run.compare_task, wrap(Pairs(), Pairs()), backend)


def test_a_slow_rank_compares_fewer_samples(monkeypatch):
    monkeypatch.setattr(same_run, "_SECONDS", -1.0)
    assert list(same_run._checksums("training", numbered(100))) == ["checksum of training sample 0"]
    names = iter([["a", "b"], ["a"]])
    monkeypatch.setattr(
        same_run, "_checksums", lambda title, source, most=16, errors=None: dict.fromkeys(next(names, ["a"]), "1")
    )
    assert alike(run_threads(2, compare_pairs)) == ""


def test_compared_samples_are_spread_from_first_to_last_and_generator_states_are_kept():
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    for size, numbers in ((1, [0]), (3, [0, 1, 2]), (16, [*range(16)]), (31, [*range(0, 31, 2)])):
        names = same_run._checksums("training", numbered(size))
        assert list(names) == [f"checksum of training sample {number}" for number in numbers]
    assert len(same_run._checksums("training", numbered(10**6))) == 16
    own = wrap(Pairs(drawn), Pairs(drawn), workers=2)
    assert same_run._checksums("training", own.train) == same_run._checksums("training", own.train)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())
    (first,) = TensorSource(torch.ones(1, 1), torch.zeros(1)).contents([0])
    assert [tensor.tolist() for tensor in first] == [[1.0], 0.0]
    assert next(iter(Streamed(0).stream([Batch(torch.tensor([5]))], torch.device("cpu"))))[0].item() == 5


def test_a_package_that_one_rank_lacks_causes_an_error_on_all(tmp_path, monkeypatch):
    def lacking(output) -> None:
        if output.log_every == 3:
            raise UserError("no TensorBoard here")

    monkeypatch.setattr(loop, "threads", lambda backend: 1)
    monkeypatch.setattr(loop, "check_tensorboard", lacking)
    flags = ["--run-dir", str(tmp_path)]
    assert alike(run_threads(2, train_with, [flags, [*flags, "--log-every", "3"]])) == "rank 1: no TensorBoard here"
    assert not list(tmp_path.iterdir())


def missing_on_one_host(backend, files: list[str]) -> str:
    try:
        config = parse(["--dataset", "text", "--text-file", files[backend.rank]])
        loop.load_task(config.data, config.model.name, backend)
    except UserError as error:
        return str(error) if error.shared else "not shared"
    return "loaded"


def test_data_that_one_host_lacks_cause_an_error_on_all(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("one two three " * 500)
    text = alike(run_threads(2, missing_on_one_host, [str(file), str(tmp_path / "missing")]))
    assert text.startswith("rank 1: --text-file")
