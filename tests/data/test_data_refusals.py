"""Error messages for datasets: each is one line that says what is wrong, why, and what to change."""

from __future__ import annotations

import errno
import os
from http.client import BadStatusLine
from urllib.error import URLError

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from dualtrain.data import load_data, wrapped
from dualtrain.data.downloads import missing
from dualtrain.data.sources import Batch, Task
from dualtrain.data.wrapped import wrap
from dualtrain.errors import UserError
from dualtrain.torchvision_shim import torchvision as load_torchvision
from tests.data.test_data_sources import write_cifar


def build_nonsense():
    return "data"


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("moons", {}, "choose one of cifar10, digits"),
        ("cifar10", {}, "--data-dir"),
        ("cifar10", {"folder": "."}, "cifar-10-binary.tar.gz"),
        ("cifar10", {"folder": "."}, "(data_batch_1.bin: No such file or directory)"),
        (
            "mnist",
            {"folder": "."},
            "(train-images-idx3-ubyte: No such file or directory): put its four idx files, unpacked",
        ),
        ("mnist", {"folder": "packed"}, "unpack the .gz files in"),
        ("imagefolder", {}, "--data-dir"),
        ("imagefolder", {"folder": "."}, "train/CLASS"),
        ("imagefolder", {"folder": "missing"}, "No such file"),
        ("digits", {"augment": "imagenet"}, "is held in memory"),
        ("digits", {"augment": "blur"}, "--augment must be one of"),
        ("digits", {"augment": "weights"}, "--model"),
        ("digits", {"augment": "weights", "model": "convnet"}, "publishes no weights"),
        ("digits", {"normalize": "imagenet"}, "3 channels"),
        ("digits", {"normalize": "0.5/0"}, "--normalize must be"),
        ("digits", {"normalize": "a/b"}, "--normalize must be"),
        ("synthetic", {"shape": "3,x"}, "--shape"),
        ("text", {"text_file": "missing"}, "--text-file"),
        ("text", {"text_file": "short.txt"}, "tokens"),
        ("text", {"text_file": "latin.txt"}, "UTF-8"),
        ("text", {"vocabulary": 4}, "--vocabulary"),
        ("text", {"sequence_length": 1}, "--sequence-length"),
        ("no.such.module:build", {}, "not found"),
        ("tests.data.test_data_refusals:nothing", {}, "no callable"),
        ("..tests:build", {}, "does not name a callable"),
        ("synthetic", {"shape": "3,65536,65536"}, "--shape"),
        ("tests.data.test_data_refusals:build_nonsense", {}, "must return"),
    ],
)
def test_bad_data_options_are_refused_in_one_line(tmp_path, monkeypatch, name, options, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "packed" / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / "packed" / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").touch()
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    options = dict(options)
    with pytest.raises(UserError) as refusal:
        load_data(name, options.pop("folder", None), **options)
    assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_classes_of_train_and_val_must_agree(tmp_path):
    for part, kind in (("train", "cat"), ("val", "dog")):
        (tmp_path / part / kind).mkdir(parents=True)
        (tmp_path / part / kind / "1.jpg").touch()
    with pytest.raises(UserError, match="only one of train/ and val/ has the class 'cat'"):
        load_data("imagefolder", str(tmp_path))


def test_means_for_another_number_of_channels_are_refused(tmp_path):
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
        (tmp_path / part / "cat" / "1.jpg").touch()
    with pytest.raises(UserError, match="--normalize has 2 channels and imagefolder has 3: give one mean for each"):
        load_data("imagefolder", str(tmp_path), normalize="0.5,0.5/1,1")


def test_truncated_files_of_cifar_are_refused(tmp_path):
    write_cifar(tmp_path)
    first, second = (tmp_path / "cifar-10-batches-bin" / f"data_batch_{number}.bin" for number in (1, 2))
    whole = first.read_bytes()
    # Numbers of bytes to cut off from the first and the second file. Their sum is the size of one or more whole images.
    for first_cut, second_cut in ((1000, 2073), (len(whole), 0)):
        first.write_bytes(whole[: len(whole) - first_cut])
        second.write_bytes(whole[: len(whole) - second_cut])
        with pytest.raises(UserError, match=r"data_batch_1\.bin' is damaged: delete .*cifar-10-batches-bin' and unpack"):
            load_data("cifar10", str(tmp_path))


@pytest.mark.parametrize(
    ("error", "reason"),
    [(URLError("no network"), "no network"), (BadStatusLine("no network\r\n"), "no network"), (EOFError(), "EOFError")],
)
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_without_a_network_the_message_says_where_the_files_go(name, error, reason, tmp_path, monkeypatch):
    load_torchvision()  # with a CPU build of torch, importing torchvision needs the shim
    import torchvision.datasets.mnist
    import torchvision.datasets.utils

    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(torchvision.datasets.utils, "download_and_extract_archive", refuse)
    monkeypatch.setattr(torchvision.datasets.mnist, "download_and_extract_archive", refuse)
    # torchvision 0.20 names the file and not the reason.
    with pytest.raises(UserError, match=rf"could not be downloaded \((Error downloading|.*{reason}).*into") as refusal:
        load_data(name, str(tmp_path / "new"), download=True)
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_a_folder_that_cannot_be_searched_is_refused(name, tmp_path, monkeypatch):
    def stat(path, *args, **kwargs):
        if "ubyte" in str(path) or ".bin" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return original(path, *args, **kwargs)

    original = os.stat
    load_torchvision()
    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(UserError, match=r"does not hold .*Permission denied\)"):
        load_data(name, str(tmp_path))
    assert missing([tmp_path / "ubyte"], [tmp_path / "ubyte.gz"])


def build_from_three_arguments(one, two, three):
    raise AssertionError("the function must not be called")


def build_from_a_keyword_argument(*, folder):
    raise AssertionError("the function must not be called")


def test_a_data_folder_that_cannot_be_made_or_read_is_refused(tmp_path):
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "mnist")
    with pytest.raises(UserError, match=r"file/mnist' cannot be made \(Not a directory\): give a folder that can be made"):
        load_data("mnist", folder, download=True)
    with pytest.raises(UserError, match=r"file/mnist' cannot be read \(Not a directory\): give a folder that exists"):
        load_data("mnist", folder)


@pytest.mark.parametrize("name", ["build_from_three_arguments", "build_from_a_keyword_argument"])
def test_a_data_or_model_function_with_wrong_parameters_is_refused_with_its_signature(name):
    from dualtrain.models import build

    path = f"tests.data.test_data_refusals:{name}"
    with pytest.raises(UserError, match=r"takes \(.*\): it must take the folder of --data-dir, or nothing"):
        load_data(path)
    with pytest.raises(UserError, match=r"takes \(.*\): it must take \(shape, classes\), or nothing"):
        build(path, (1, 8, 8), 10)


def build_sparse():
    return [(torch.ones(2, 2).to_sparse(), 0)], []


def build_meta():
    return [(torch.ones(2, 2, device="meta"), 0)], []


def build_uneven():
    samples = [(torch.ones(1, 2 + number), 0) for number in range(2)]
    return samples, samples


def build_mixed():
    samples = [(torch.ones(2), 0), (None, 0)]
    return samples, samples


def build_dtypes():
    return [(torch.ones(2, dtype=torch.uint8), 0), (torch.full((2,), 300), 0)], []


def build_scalars():
    return [(numpy.float64(1.5), 0), (2.5, 0)], []


def test_numbers_of_python_and_numpy_fit_into_one_batch():
    task = load_data("tests.data.test_data_refusals:build_scalars", classes=2, workers=0)
    for order in ([0, 1], [1, 0]):
        [(inputs, _)] = task.train.stream([Batch(torch.tensor(order))], torch.device("cpu"))
        assert sorted(inputs.tolist()) == [1.5, 2.5]


def test_samples_that_cannot_be_batched_in_a_worker_are_refused():
    samples = [(torch.ones(1), torch.tensor(0)), (torch.ones(1), 0)]
    task = wrap(samples, samples, classes=2, workers=1)
    with pytest.raises(UserError, match="sample 0 of the dataset and others do not fit into one batch: 'int'"):
        next(task.train.stream([Batch(torch.tensor([0, 1]))], torch.device("cpu")))


def test_a_batch_that_shared_memory_cannot_hold_may_fit_after_a_restart(monkeypatch):
    def full(samples):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    samples = [(torch.ones(1), 0), (torch.ones(1), 1)]
    task = wrap(samples, samples, classes=2, workers=0)
    monkeypatch.setattr(wrapped, "default_collate", full)
    with pytest.raises(
        UserError, match=r"cannot send a batch .*No space left on device \(28\)\): enlarge /dev/shm"
    ) as error:
        next(task.train.stream([Batch(torch.tensor([0, 1]))], torch.device("cpu")))
    assert error.value.transient


def test_samples_that_cannot_be_batched_are_refused():
    mixed = load_data("tests.data.test_data_refusals:build_mixed", classes=2, workers=0)
    with pytest.raises(UserError, match="sample 0 of the dataset and others do not fit into one batch"):
        next(mixed.train.stream([Batch(torch.tensor([0, 1]))], torch.device("cpu")))
    for name, part in (("sparse", "not .tensor, class index.: Batches of sparse"), ("meta", "samples with a meta tensor")):
        with pytest.raises(UserError, match=part) as refusal:
            load_data(f"tests.data.test_data_refusals:build_{name}", classes=2)
        assert "\n" not in str(refusal.value)
    task = load_data("tests.data.test_data_refusals:build_uneven", classes=2, workers=0)
    with pytest.raises(
        UserError,
        match=r"sample 1 of the dataset and others do not fit .* in sample 1 and .* in sample 0",
    ):
        next(task.train.stream([Batch(torch.tensor([1, 0]))], torch.device("cpu")))
    task = load_data("tests.data.test_data_refusals:build_dtypes", classes=2, workers=0)
    with pytest.raises(UserError, match=r"sample 1 .* the inputs have dtype int64 in sample 1 and uint8 in sample 0"):
        next(task.train.stream([Batch(torch.tensor([1, 0]))], torch.device("cpu")))


def build_targets():
    """Build data: training sample 2 has the ignored target -100, training sample 7 has the target 2, which is too large.

    Validation targets are floats.
    """
    inputs, classes = torch.zeros(9, 2), torch.arange(9).clamp(max=1)
    classes[2], classes[7] = -100, 2
    return [*zip(inputs, classes, strict=True)], [*zip(inputs, classes.float(), strict=True)]


def build_loaders():
    loader = DataLoader([(torch.zeros(2), 0)])
    return loader, loader


def test_the_refusal_of_a_target_that_is_not_a_class_index_names_its_sample():
    task = load_data("tests.data.test_data_refusals:build_targets", classes=2, workers=0)
    cpu, several = torch.device("cpu"), Batch(torch.tensor([1, 2, 7]))
    reason = r" \(%s\): targets must be class indices \(int64\) from 0 to 1; .*another --classes"
    with pytest.raises(UserError, match="training sample 7 of the dataset has the target 2" + reason % "int64"):
        next(task.train.stream([several], cpu))
    with pytest.raises(UserError, match="validation sample 1 of the dataset has the target 1.0" + reason % "float32"):
        next(task.val.stream([several], cpu))
    assert next(task.train.stream([Batch(torch.tensor([1, 2]))], cpu))[1].tolist() == [1, -100]


def test_the_refusal_of_a_function_without_datasets_shows_the_returned_types():
    with pytest.raises(UserError, match="returned a tuple of DataLoader, DataLoader: it must"):
        load_data("tests.data.test_data_refusals:build_loaders", classes=2)


class Table:
    """A map-style dataset of 8 samples, with the attribute ``classes``."""

    def __init__(self, classes):
        self.classes = classes

    def __len__(self):
        return 8

    def __getitem__(self, number):
        return torch.zeros(2), number % 2


class Unreadable:
    @property
    def classes(self):
        return open("no such file")

    def __len__(self):
        return len(open("no such index").read())

    def __getitem__(self, number):
        return torch.zeros(2), 0


VALID_CLASSES = [["a", "a"], ("a", "b"), {"a": 0, "b": 1}, numpy.array(["a", "b"]), 2, 2.0, numpy.int64(2), torch.tensor(2)]


def test_classes_are_names_or_a_number():
    for known in VALID_CLASSES:
        assert wrap(Table(known), Table(known)).classes == 2
    for known in ("2", True, 2.5, float("nan"), float("inf"), -2, 0, (name for name in "ab"), lambda: 2):
        with pytest.raises(UserError, match=r"has unusable classes .*: set its attribute classes to .*, or give --classes"):
            wrap(Table(known), Table(known))


def test_errors_in_the_length_or_the_classes_of_a_dataset_keep_their_traceback():
    with pytest.raises(UserError, match="the classes of --dataset 'dataset' failed: FileNotFoundError") as refusal:
        wrap(Unreadable(), Unreadable())
    assert 'open("no such file")' in refusal.value.trace
    with pytest.raises(UserError, match="the length of the training dataset failed: FileNotFoundError") as refusal:
        wrap(Unreadable(), Unreadable(), classes=2)
    assert 'open("no such index")' in refusal.value.trace


class Rows:
    """A source of 8 samples. ``change`` is applied to each batch; if it returns None, the stream ends."""

    def __init__(self, change):
        self.change = change

    def __len__(self):
        return 8

    def stream(self, batches, device):
        for batch in batches:
            changed = self.change(torch.zeros(len(batch.numbers), 2), batch.numbers % 2)
            if changed is None:
                return
            yield changed


def raise_error(inputs, targets):
    raise FileNotFoundError("no such shard")


def build_task(change=lambda inputs, targets: (inputs, targets), **options):
    return Task(Rows(change), Rows(change), **{"shape": (2,), "classes": 2, **options})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda inputs, targets: (inputs[1:], targets[1:]), r"a tensor of shape \(2, 2\) for a batch of 3 samples"),
        (lambda inputs, targets: (inputs, targets + 5), r"the target 6 \(int64\)"),
        (lambda inputs, targets: (inputs, targets.float()), r"the target 1.0 \(float32\)"),
        (lambda inputs, targets: {"x": inputs}, "a dict"),
        (lambda inputs, targets: None, "ended after batch 0"),
        (raise_error, "FileNotFoundError: no such shard"),
    ],
)
def test_batches_of_the_users_own_source_are_checked(monkeypatch, change, problem):
    monkeypatch.setattr(f"{__name__}.build_for_this_test", lambda: build_task(change), raising=False)
    task = load_data("tests.data.test_data_refusals:build_for_this_test")
    with pytest.raises(UserError, match=f"the source of the training data .*{problem}") as refusal:
        list(task.train.stream([Batch(torch.tensor([1, 2, 3]))], torch.device("cpu")))
    assert ("no such shard" in str(refusal.value)) == ("raise_error" in refusal.value.trace)


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"shape": "2"}, "of shape '2'"), ({"classes": "2"}, "classes '2'"), ({"kind": "values"}, "kind 'values'")],
)
def test_a_task_with_unusable_values_is_refused(monkeypatch, options, problem):
    monkeypatch.setattr(f"{__name__}.build_for_this_test", lambda: build_task(**options), raising=False)
    with pytest.raises(UserError, match=problem):
        load_data("tests.data.test_data_refusals:build_for_this_test")
    monkeypatch.setattr(f"{__name__}.build_for_this_test", lambda: Task(Table(2), Table(2), (2,), 2))
    with pytest.raises(UserError, match=r"a Task with a Table, not a dualtrain\.data\.Source"):
        load_data("tests.data.test_data_refusals:build_for_this_test")
