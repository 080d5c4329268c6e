"""Data sources: their samples, augmentation that depends only on seed and sample index, and failures of data workers."""

from __future__ import annotations

import errno
import gc
import math
import os
import signal
import subprocess
import time
import traceback
from functools import partial
from itertools import count
from multiprocessing import forkserver, synchronize
from types import SimpleNamespace
from unittest.mock import Mock

import numpy
import pytest
import torch
from PIL import Image
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dualtrain import processes
from dualtrain.data import Batch, Source, Task, decode, load_data, worker_waits
from dualtrain.data import draws as hashed
from dualtrain.data.loader import LoaderSource
from dualtrain.data.text import CLS, IGNORED, MASK, PAD
from dualtrain.data.transforms import crop_and_flip
from dualtrain.data.worker_waits import Waits
from dualtrain.data.wrapped import wrap
from dualtrain.errors import UserError
from tests.data.test_data import write_idx
from tests.forked import in_child, wait_until

CPU = torch.device("cpu")


def epoch(source: Source, seed: int, batch: int, order=None):
    """Read the source in batches; return all inputs and targets in the order of the samples' indices."""
    order = torch.arange(len(source)) if order is None else order
    parts = list(source.stream([Batch(numbers, seed) for numbers in order.split(batch)], CPU))
    back = order.argsort()
    return torch.cat([inputs for inputs, _ in parts])[back], torch.cat([targets for _, targets in parts])[back]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def write_mnist(folder, samples=40):
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for part in ("train", "t10k"):
        images = torch.randint(0, 256, (samples, 28, 28), dtype=torch.uint8, generator=generator)
        write_idx(raw / f"{part}-images-idx3-ubyte", images)
        write_idx(raw / f"{part}-labels-idx1-ubyte", torch.arange(samples, dtype=torch.uint8) % 10)


def write_cifar(folder, samples=6):
    where = folder / "cifar-10-batches-bin"
    where.mkdir()
    rows = numpy.random.default_rng(0).integers(0, 256, (6 * samples, 3073), dtype=numpy.uint8)
    rows[:, 0] %= 10
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        rows[number * samples : (number + 1) * samples].tofile(where / f"{name}.bin")
    return rows


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    random = numpy.random.default_rng(0)
    for part, samples in (("train", 7), ("val", 3)):
        for kind in ("cat", "dog"):
            where = folder / part / kind
            where.mkdir(parents=True)
            for number in range(samples):
                pixels = random.integers(0, 256, (30 + number, 40, 3), dtype=numpy.uint8)
                Image.fromarray(pixels).save(where / f"{number}.jpg")
    return folder


class RandomSamples:
    """A user's dataset whose augmentation draws random numbers from torch and from NumPy."""

    num_classes = 3

    def __len__(self):
        return 11

    def __getitem__(self, number):
        if not 0 <= number < 11:
            raise IndexError(number)
        return torch.rand(2) + torch.from_numpy(numpy.random.rand(2)).float() + number, number % 3


def build_pair(folder):
    return RandomSamples(), RandomSamples()


# ------------------------------------------------------------------------------------------------ the hash


def test_the_hash_is_splitmix_of_seed_sample_and_draw():
    def mix(x):
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) % 2**64
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    got = hashed.bits(7, torch.tensor([0, 5]), 3)
    for row, number in enumerate([0, 5]):
        key = mix((number * golden + mix(7)) % 2**64)
        for draw in range(3):
            assert int(got[row, draw]) % 2**64 == mix((key + (draw + 1) * golden) % 2**64)


def test_hashed_numbers_are_uniform_and_independent_for_neighbouring_seeds():
    numbers = torch.arange(20_000)
    one, other = (hashed.uniform(hashed.bits(seed, numbers, 2)) for seed in (0, 1))
    table = torch.corrcoef(torch.cat([one, other], 1).T)
    assert (table - torch.eye(4)).abs().max() < 0.03
    assert one.min() >= 0
    assert one.max() < 1
    assert abs(float(one.var()) - 1 / 12) < 0.002
    counts = hashed.below(hashed.bits(-(2**80), numbers, 1)[:, 0], 9).bincount(minlength=9)
    assert counts.min() > 2000
    assert len(counts) == 9


# ------------------------------------------------------------------------------------------------ all sources


def load_task(name, tmp_path, tree) -> Task:
    if name == "mnist":
        write_mnist(tmp_path)
        return load_data("mnist", str(tmp_path), augment="crop-flip", pad=4, image_size=32, normalize="dataset")
    if name == "cifar10":
        write_cifar(tmp_path)
        return load_data("cifar10", str(tmp_path), augment="crop-flip", pad=4, normalize="dataset")
    if name == "imagefolder":
        return load_data("imagefolder", str(tree), image_size=24, workers=0)
    if name == "text":
        path = tmp_path / "text.txt"
        path.write_text("one two, three four. five " * 60)
        return load_data("text", text_file=str(path), sequence_length=8, vocabulary=9)
    if name == "synthetic":
        return load_data("synthetic", shape="1,4,4", classes=5, samples=30)
    return load_data("tests.data.test_data_sources:build_pair", workers=0)


ALL = ["mnist", "cifar10", "imagefolder", "text", "synthetic", "own"]


@pytest.mark.parametrize("name", ALL)
def test_augmentation_depends_on_seed_and_sample_index_alone(name, tmp_path, tree):
    task = load_task(name, tmp_path, tree)
    before = torch.get_rng_state()
    one = epoch(task.train, 3, 4)
    other = epoch(task.train, 3, 5, torch.randperm(len(task.train), generator=torch.Generator().manual_seed(1)))
    assert_same(one, other)
    assert torch.equal(torch.get_rng_state(), before)
    different = epoch(task.train, 4, 4)
    assert torch.equal(one[0], different[0]) == (name == "synthetic")
    assert one[0].shape == (len(task.train), *task.shape)
    assert one[1].dtype == torch.int64
    assert int(one[1].max()) < task.classes
    if name != "own":
        assert_same(epoch(task.val, 3, 4), epoch(task.val, 4, 2))
        assert one[0].is_floating_point() == (task.kind == "classes")
        assert epoch(task.val, 0, 8)[0].shape == (len(task.val), *task.shape)


@pytest.mark.parametrize("name", ALL)
def test_sources_deliver_empty_batches(name, tmp_path, tree):
    task = load_task(name, tmp_path, tree)
    none = torch.empty(0, dtype=torch.int64)
    batches = [Batch(torch.tensor([0])), Batch(none), Batch(torch.tensor([1]))]
    sizes = [(len(inputs), len(targets)) for inputs, targets in task.train.stream(batches, CPU)]
    assert sizes == [(1, 1), (0, 0), (1, 1)]
    inputs, targets = next(iter(task.train.stream([Batch(none)], CPU)))
    assert inputs.shape == (0, *task.shape)
    assert targets.dtype == torch.int64


# ------------------------------------------------------------------------------------------------ in memory


def test_crops_and_flips_are_windows_of_the_image():
    images = torch.arange(2 * 36, dtype=torch.uint8).reshape(2, 1, 6, 6)
    random = hashed.bits(0, torch.arange(200), 3)
    windows = crop_and_flip(images[:1].expand(200, -1, -1, -1), 4, random)
    seen = set()
    for window in windows[:, 0]:
        flipped = bool(window[0, 0] > window[0, 1])
        window = window.flip(1) if flipped else window
        top, left = divmod(int(window[0, 0]), 6)
        assert torch.equal(window, images[0, 0, top : top + 4, left : left + 4])
        seen.add((top, left, flipped))
    assert len(seen) == 3 * 3 * 2


def test_cifar_is_read_from_its_binary_files(tmp_path):
    rows = torch.from_numpy(write_cifar(tmp_path))
    task = load_data("cifar10", str(tmp_path))
    inputs, targets = epoch(task.train, 0, 7)
    assert targets.tolist() == rows[:30, 0].tolist()
    assert torch.equal(inputs, rows[:30, 1:].reshape(30, 3, 32, 32).float() * (1 / 255))
    assert len(task.val) == 6


def test_evaluation_crops_or_pads_around_the_centre(tmp_path):
    write_mnist(tmp_path)
    plain, cropped = (load_data("mnist", str(tmp_path), **options) for options in ({}, {"image_size": 20}))
    assert torch.equal(epoch(cropped.val, 0, 9)[0], epoch(plain.val, 0, 9)[0][:, :, 4:24, 4:24])
    wide = load_data("mnist", str(tmp_path), augment="crop-flip", pad=4, image_size=32)
    assert torch.equal(epoch(wide.val, 0, 9)[0][:, :, 2:30, 2:30], epoch(plain.val, 0, 9)[0])
    assert load_data("mnist", str(tmp_path), image_size=64).shape == (1, 64, 64)


def test_augment_weights_uses_the_transforms_published_with_the_weights(tmp_path):
    write_mnist(tmp_path, samples=2)
    task = load_data("mnist", str(tmp_path), augment="weights", model="resnet18")
    inputs, _ = epoch(task.train, 0, 2)
    assert task.shape == tuple(inputs.shape[1:]) == (3, 224, 224)
    assert inputs.min() < -1


def test_normalized_channels_have_mean_0_and_deviation_1():
    inputs, _ = epoch(load_data("digits", normalize="dataset").train, 0, 512)
    assert abs(float(inputs.mean())) < 1e-3
    assert abs(float(inputs.std()) - 1) < 1e-3
    plain, halved = (epoch(load_data("digits", normalize=how).train, 0, 512)[0] for how in ("none", "0.5/2"))
    assert torch.allclose(halved, (plain - 0.5) / 2)


# ------------------------------------------------------------------------------------------------ image files


def test_worker_processes_deliver_the_same_samples_as_the_main_process(tree):
    alone, with_workers = (load_data("imagefolder", str(tree), image_size=24, workers=workers) for workers in (0, 2))
    assert alone.shape == (3, 24, 24)
    assert alone.classes == 2
    try:
        for seed in (1, 2):  # the second epoch uses the same workers
            assert_same(epoch(alone.train, seed, 4), epoch(with_workers.train, seed, 3))
        next(with_workers.train.stream([Batch(torch.tensor([n])) for n in range(9)], CPU))  # abandon this stream early
        assert_same(epoch(alone.train, 1, 4), epoch(with_workers.train, 1, 3))
    finally:
        with_workers.close()


@pytest.mark.parametrize("augment", ["none", "crop-flip", "weights"])
def test_image_files_accept_the_augmentations_none_crop_flip_and_weights(tree, augment):
    task = load_data("imagefolder", str(tree), image_size=24, augment=augment, pad=2, workers=0, model="resnet18")
    inputs, targets = epoch(task.train, 0, 5)
    assert tuple(inputs.shape[1:]) == task.shape
    assert targets.tolist() == [0] * 7 + [1] * 7


@pytest.mark.parametrize("dataset", ["imagefolder", "digits"])
def test_a_crop_that_is_larger_than_the_resized_images_is_refused(dataset, tree):
    with pytest.raises(
        UserError, match=r"--image-size 24 is larger than images after --resize 20 and --pad: leave --resize"
    ):
        load_data(dataset, str(tree), image_size=24, resize=20, pad=2, workers=0)
    task = load_data(dataset, str(tree), image_size=24, resize=20, pad=2, augment="crop-flip", workers=0)
    assert task.shape[1:] == (24, 24)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_named_in_one_line(tmp_path, workers):
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
        (tmp_path / part / "cat" / "broken.jpg").write_bytes(b"not a picture")
    task = load_data("imagefolder", str(tmp_path), workers=workers)
    with pytest.raises(UserError, match=r"train/cat/broken\.jpg' cannot be read") as refusal:
        epoch(task.train, 0, 1)
    assert "\n" not in str(refusal.value)
    assert not refusal.value.transient
    task.close()


def test_a_disk_error_while_reading_an_image_allows_a_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "open_regular", lambda path: _raise(OSError(errno.EIO, "Input/output error", str(path))))
    with pytest.raises(UserError, match=r"cannot be read \(Input/output error\): repair the disk") as refusal:
        decode.read_image(tmp_path / "cat.jpg")
    assert refusal.value.transient


# ------------------------------------------------------------------------------------------------ text, synthetic, wrapped


def test_a_byte_order_mark_is_not_a_token(tmp_path):
    texts = [tmp_path / "plain.txt", tmp_path / "marked.txt"]
    for path, encoding in zip(texts, ("utf-8", "utf-8-sig"), strict=True):
        path.write_text("one two, three four. five " * 60, encoding)
    plain, marked = (load_data("text", text_file=str(path), sequence_length=8) for path in texts)
    assert plain.classes == marked.classes
    assert_same(epoch(plain.train, 3, 4), epoch(marked.train, 3, 4))


def test_15_percent_of_the_words_are_chosen_of_which_80_percent_are_masked_and_10_percent_kept():
    task = load_data("text", sequence_length=32, vocabulary=500)
    assert task.kind == "tokens"
    assert task.classes == 500
    source = task.train
    inputs, targets = epoch(source, 5, 256)
    tokens = torch.where(targets == IGNORED, inputs, targets)
    words = (tokens != PAD) & (tokens != CLS)
    chosen = targets != IGNORED
    assert not (chosen & ~words).any()
    assert (tokens[:, 0] == CLS).all()
    share = float(chosen.sum() / words.sum())
    masked = float((inputs[chosen] == MASK).float().mean())
    kept = float((inputs[chosen] == targets[chosen]).float().mean())
    assert abs(share - 0.15) < 0.005
    assert abs(masked - 0.8) < 0.01
    assert abs(kept - 0.1) < 0.01
    assert len(task.val) == (len(source) + len(task.val)) // 10


def test_synthetic_samples_differ_and_have_unit_variance():
    task = load_data("synthetic", shape=(3, 8, 8), classes=4, samples=50)
    inputs, targets = epoch(task.train, 0, 50)
    assert len(inputs.flatten(1).unique(dim=0)) == 50
    assert abs(float(inputs.std()) - 1) < 0.05
    assert set(targets.tolist()) == set(range(4))
    assert not torch.equal(inputs[:10], epoch(task.val, 0, 10)[0])
    assert math.isclose(len(task.val), 10)


def test_a_pair_of_datasets_becomes_a_task():
    task = wrap(RandomSamples(), RandomSamples())
    assert isinstance(task.train, LoaderSource)
    assert (task.shape, task.classes, task.kind) == ((2,), 3, "classes")
    with_worker = wrap(RandomSamples(), RandomSamples(), workers=1)
    assert_same(epoch(task.train, 1, 4), epoch(with_worker.train, 1, 3))
    with_worker.close()


# ------------------------------------------------------------------------------------------------ data workers


def test_a_forked_child_does_not_stop_its_parents_workers():
    def stop():
        raise AssertionError("the workers were stopped")

    source = LoaderSource([], 2)
    source._loader = SimpleNamespace(_iterator=SimpleNamespace(_shutdown_workers=stop))
    assert in_child(source.close) == 0
    with pytest.raises(AssertionError, match="the workers were stopped"):
        source.close()


def test_more_workers_than_cores_cause_no_warning(recwarn, monkeypatch):
    source = LoaderSource(Numbers(), 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    try:
        for _ in range(2):
            assert torch.equal(next(source.stream([Batch(torch.arange(2))], CPU))[1], torch.arange(2))
    finally:
        source.close()
    assert [str(one.message) for one in recwarn if "worker" in str(one.message)] == []


class Numbers:
    def __len__(self):
        return 2

    def __getitems__(self, wanted):
        return torch.zeros(2, 1), torch.tensor(wanted[0])


class Threads(Numbers):
    def __getitems__(self, wanted):
        return torch.zeros(1, 1), torch.tensor([torch.get_num_threads()])


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_are_read_with_one_thread_with_and_without_workers(workers):
    source, threads = LoaderSource(Threads(), workers), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert next(source.stream([Batch(torch.arange(1))], CPU))[1].item() == 1
        assert next(source.contents([0]))[1].item() == 1  # also if the sample is read for a comparison
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
        source.close()


class ThreadsOfSamples:
    """A dataset that changes the number of threads."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        found = torch.get_num_threads()
        torch.set_num_threads(2)
        return torch.zeros(1), found


def test_each_sample_is_read_with_one_thread_even_if_the_dataset_changes_their_number():
    threads = torch.get_num_threads()
    try:
        source = wrap(ThreadsOfSamples(), ThreadsOfSamples(), classes=3).train
        torch.set_num_threads(2)
        assert next(source.stream([Batch(torch.arange(4))], CPU))[1].tolist() == [1, 1, 1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


class Slow(Numbers):
    def __getitems__(self, wanted):
        time.sleep(100)


@pytest.mark.parametrize(
    ("reader", "said"),
    [
        (Numbers, r"waited 0\.5 s for a batch from data worker 1 \(process \d+\), which is stopped: find out what"),
        (
            Slow,
            r"waited 0\.5 s for a batch from data worker 0 \(process \d+\), data worker 1 .*: the storage hangs or is slow",
        ),
    ],
    ids=["stopped", "slow"],
)
def test_the_wait_for_a_worker_has_a_limit(monkeypatch, reader, said):
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))  # torch's default: 5 s
    source = LoaderSource(reader(), 2)
    source.timeout = 0.5 if reader is Slow else 60.0
    stream = source.stream([Batch(torch.arange(2))] * 20, CPU)
    try:
        if reader is Numbers:
            next(stream)  # on a busy machine, the workers may need more than 0.5 s to start
            source._waits._limit = 0.5
            time.sleep(1.2)  # longer than the limit, which counts only waits inside next()
            next(stream)
            os.kill(source._running()[1].pid, signal.SIGSTOP)
        with pytest.raises(UserError, match=said) as error:
            list(stream)
        assert error.value.transient
    finally:
        source.close()


def test_the_error_names_all_stopped_workers(monkeypatch):
    monkeypatch.setattr(worker_waits, "is_stopped", lambda pid: pid > 1)
    waits = Waits(lambda: [Mock(pid=pid) for pid in (1, 2, 3)], 0)
    workers = "data worker 1 (process 2), data worker 2 (process 3)"
    assert f"from {workers}, which are stopped: find out what has stopped them (" in waits._describe(0.5)


@pytest.mark.parametrize(
    ("stopped", "said"), [(True, "which is stopped: find out"), (False, "its imports hang or are slow")]
)
def test_the_start_of_the_workers_has_a_limit(monkeypatch, stopped, said):
    status, written = os.pipe()
    server = subprocess.Popen(["sleep", "1000"], pass_fds=[written])  # simulates a fork server that starts no worker
    os.close(written)
    monkeypatch.setattr(forkserver._forkserver, "_forkserver_pid", server.pid)
    monkeypatch.setattr(processes, "_starters", {os.getpid()})
    if stopped:
        os.kill(server.pid, signal.SIGSTOP)
        assert wait_until(lambda: processes.is_stopped(server.pid))
    monkeypatch.setattr(worker_waits, "START_SECONDS", 0.3)
    waits = Waits(list, 0.2)
    try:
        with pytest.raises(UserError, match=rf"waited 0.3 s for the start .*fork server \(process {server.pid}\).*{said}"):
            waits.bound(lambda: forkserver.read_signed(status))
    finally:
        waits.end()
        server.kill()
        server.wait()
        os.close(status)


class TooLarge:
    """Object that cannot be sent to another process, like a tensor that does not fit into /dev/shm."""

    def __reduce__(self):
        raise RuntimeError("unable to allocate shared memory")


class Unsendable(Numbers):
    def __getitems__(self, wanted):
        return TooLarge(), torch.tensor(wanted[0])


def test_a_batch_that_does_not_fit_into_shared_memory_is_an_error_at_once(capfd):
    source = LoaderSource(Unsendable(), 1)
    source.timeout = 60.0
    try:
        with pytest.raises(UserError, match=r"cannot send a batch \(unable to allocate .*\): enlarge /dev/shm") as error:
            list(source.stream([Batch(torch.arange(2))], CPU))
    finally:
        source.close()
    assert error.value.transient
    assert capfd.readouterr().err == ""


def test_a_worker_that_was_killed_is_named(monkeypatch):
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))  # torch's default: 5 s
    source = LoaderSource(Numbers(), 2)
    stream = source.stream([Batch(torch.arange(2))] * 20, CPU)
    try:
        next(stream)
        pid = source._running()[1].pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            UserError, match=rf"data worker 1 \(process {pid}\) has ended with SIGKILL: too little mem"
        ) as error:
            list(stream)
        assert error.value.transient
        # torch 2.5 to 2.15 opens 10 temporary files, to test the limit of open files. Its handler of SIGCHLD may raise the
        # error meanwhile. Local variables then hold the files. In a reference cycle, the files may be collected before the
        # objects that close them. This would cause a ResourceWarning in a later test.
        failure = error.value
        while failure is not None:
            traceback.clear_frames(failure.__traceback__)
            failure = failure.__context__
    finally:
        source.close()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (5, "exit status 5: the dataset's code, or a library, ended it; .*--workers 0"),
        (0, "exit status 0: the dataset's code, or a library, ended it"),
        (-signal.SIGSEGV, "SIGSEGV: the dataset's code, or a library, ended it"),
        (-signal.SIGBUS, "SIGBUS: too little shared memory, in most cases; enlarge /dev/shm"),
    ],
)
def test_the_cause_of_a_workers_end_depends_on_its_exit_status(status, said):
    workers = [SimpleNamespace(exitcode=code, pid=pid) for code, pid in ((None, 7), (status, 8))]
    with pytest.raises(UserError, match=rf"data worker 1 \(process 8\) has ended with {said}"):
        Waits(lambda: workers, 0.0).bound(partial(_raise, RuntimeError("DataLoader worker exited unexpectedly")))


def test_the_errors_of_workers_that_cannot_start_or_send_say_what_to_change(monkeypatch):
    source, batch = LoaderSource([], 2), [Batch(torch.tensor([0]))]

    def fail(*_):
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr(source, "_make_loader", fail)
    with pytest.raises(
        UserError, match=r"workers cannot be started \(AF_UNIX path too long\): set TMPDIR to a shorter path"
    ):
        next(source.stream(batch, torch.device("cpu")))
    with pytest.raises(UserError, match=r"cannot send their batches \(too many open files\): raise the limits"):
        Waits(list, 0.0).bound(partial(_raise, RuntimeError("Too many open files. Communication with the workers …")))
    full = worker_waits.unstarted(OSError(errno.ENOSPC, "No space left on device"))
    assert "No space left on device): make sure that /dev/shm and TMPDIR exist" in str(full)
    assert "raise the limits of open files" in str(worker_waits.unsent(OSError(24, "Too many open files")))
    with pytest.raises(RuntimeError, match="else"):
        Waits(list, 0.0).bound(partial(_raise, RuntimeError("something else")))


@pytest.mark.parametrize("number", [1, 5, 9])  # a queue takes 3 semaphores, an event 5
def test_a_full_dev_shm_prevents_the_start_of_workers_without_a_traceback(monkeypatch, number):
    source, unraisable, made = LoaderSource([], 1), [], count(1)
    make = synchronize.SemLock.__init__

    def fail(*arguments, **options):
        if next(made) >= number:
            raise OSError(errno.ENOSPC, "No space left on device")
        make(*arguments, **options)

    monkeypatch.setattr(synchronize.SemLock, "__init__", fail)
    monkeypatch.setattr("sys.unraisablehook", lambda error: unraisable.append(error.exc_value))
    with pytest.raises(UserError, match="make sure that /dev/shm and TMPDIR exist") as error:
        next(source.stream([Batch(torch.tensor([0]))], CPU))
    del error
    gc.collect()
    assert not unraisable


def _raise(error):
    raise error
