"""Bad files for every reader of files: a FIFO, a device, a symbolic link loop, a folder, an empty file, and half of a file.

The reader must accept such a file, or refuse it in one line that names the file or its folder. It must not block or
read without end.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import struct
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import nn

from dualtrain import compare, predict
from dualtrain.data import load_data
from dualtrain.data.cifar import read_cifar10
from dualtrain.data.decode import read_image as decode
from dualtrain.data.downloads import missing
from dualtrain.data.image_folder import load_image_folder
from dualtrain.data.images import Geometry, ImageFiles
from dualtrain.data.mnist import read_mnist
from dualtrain.data.options import Options
from dualtrain.errors import UserError
from dualtrain.horovodize.check import check
from dualtrain.horovodize.run_script import load_script
from dualtrain.models import build, classifiers
from dualtrain.models.weights import load_weights, read_state
from dualtrain.report import __main__ as report
from dualtrain.report.runs import read_runs
from dualtrain.run_folder import checkpoint
from dualtrain.run_folder.folder_lock import FolderLock
from dualtrain.run_folder.run_dir import MetricsFile, step_of, write_weights
from tests.data.test_data_sources import write_cifar, write_mnist
from tests.forked import server

LIMIT = 5  # seconds of processor time, or of sleep in one system call; a good read takes milliseconds
KINDS = ("FIFO", "device", "loop of links", "folder", "empty", "half")


def replace(path: Path, kind: str) -> None:
    """Replace a good file by a bad one of the given kind."""
    content = path.read_bytes()
    path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop of links":
        path.symlink_to(path.name)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(content[: len(content) // 2] if kind == "half" else b"")


@dataclass(frozen=True)
class Reader:
    """A function that reads ``file`` in a folder that ``make`` fills. It may accept bad files of the kinds ``accepted``."""

    make: Callable[[Path], Any]
    file: str
    read: Callable[[Path], Any]
    accepted: tuple[str, ...] = ()


def run_command(command: Callable[[list[str]], int], *arguments: str) -> None:
    """Run a command, whose exit status must be 0 or 2. If it is 2, raise a UserError with the line printed to stderr."""
    errors = StringIO()
    with redirect_stderr(errors), redirect_stdout(StringIO()):
        end = command(list(arguments))
    if end == 2:
        raise UserError(errors.getvalue().removesuffix("\n"))
    assert end == 0, errors.getvalue()


def make_weights(folder: Path) -> None:
    weights = {"weight": torch.ones(20, 20)}
    safetensors.torch.save_file(weights, folder / "w.safetensors")
    torch.save(weights, folder / "w.pt")


def load_published(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classifiers, "fetch", lambda name: folder / "w.pt")
        patch.setattr(classifiers, "find_head", lambda model: "head")
        classifiers._load_published(nn.Linear(20, 20, bias=False), "resnet18")


def make_run(folder: Path) -> None:
    """Make a finished run on the digits, and an image for ``predict``."""
    (folder / "checkpoints").mkdir()
    torch.manual_seed(0)
    model = build("convnet", (1, 8, 8), 10)
    write_weights(folder / "model.safetensors", model.state_dict(), 1, FolderLock())
    summary = {"backend": "torch", "transport": "none", "launcher": "none", "world_size": 1, "val_accuracy": 0.5}
    summary |= {"samples_per_second": 1.0, "seconds": 1.0, "weights_sha256": "0"}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.json").write_text(json.dumps({"dataset": "digits", "model": "convnet"}))
    (folder / "task.json").write_text(json.dumps({"kind": "classes", "shape": [1, 8, 8], "classes": 10}))
    (folder / "metrics.jsonl").write_text('{"step": 1, "kind": "step", "loss": 1.0, "accuracy": 0.5, "lr": 0.125}\n')
    checkpoint.write(checkpoint.path_of(folder / "checkpoints", 1), {"cursor": {"step": 1}, "x": torch.ones(50)})
    Image.new("L", (8, 8)).save(folder / "image.png")


def make_images(folder: Path) -> None:
    for part in ("train", "val"):
        (folder / part / "cat").mkdir(parents=True)
        Image.effect_noise((16, 16), 50).save(folder / part / "cat" / "1.png")


def read_image(folder: Path) -> None:
    read = ImageFiles([(str(folder / "train/cat/1.png"), 0)], Geometry(8, 8)).__getitems__(([0], 0))
    if isinstance(read, UserError):
        raise read


def make_text(folder: Path) -> None:
    (folder / "words.txt").write_text("a word " * 12)


def make_script(folder: Path) -> None:
    (folder / "script.py").write_text("values = [\n    1,\n]\n")


def load_script_of(folder: Path) -> None:
    with suppress(SyntaxError):  # half of the script is not valid Python
        load_script(str(folder / "script.py"), [])


def refuse_none(step: int | None) -> None:
    """Raise a UserError if ``step`` is ``None``, the result of ``step_in`` and ``step_of`` for a bad file.

    The test searches the message for the file's name: ``step-00000001`` for ``step_in``, ``model`` for ``step_of``.
    """
    if step is None:
        raise UserError("step-00000001 or model cannot be read")


def continue_metrics(folder: Path) -> None:
    try:
        MetricsFile(folder, 1, lambda line: None, FolderLock()).close()
    except OSError as error:
        raise UserError(str(error)) from error  # as on_all_ranks does


def predicted(folder: Path) -> None:
    run_command(predict.main, str(folder), str(folder / "image.png"))


def read_mnist_of(folder: Path) -> None:
    read_mnist("mnist", str(folder))


RAW = "MNIST/raw/"
BIN = "cifar-10-batches-bin/"
STEP = "checkpoints/step-00000001.safetensors"
READERS = {
    "safetensors": Reader(make_weights, "w.safetensors", lambda folder: read_state(str(folder / "w.safetensors"))),
    "pickled weights": Reader(make_weights, "w.pt", lambda folder: read_state(str(folder / "w.pt"))),
    "published weights": Reader(make_weights, "w.pt", load_published),
    "checkpoint": Reader(make_run, STEP, lambda folder: checkpoint.load(folder / STEP)),
    "newest checkpoint": Reader(make_run, STEP, lambda folder: checkpoint.newest_good(folder / "checkpoints")),
    "best checkpoint": Reader(make_run, STEP, lambda folder: refuse_none(checkpoint.step_in(folder / STEP))),
    "best weights": Reader(
        make_run, "model.safetensors", lambda folder: refuse_none(step_of(folder / "model.safetensors"))
    ),
    "metrics of a resumed run": Reader(make_run, "metrics.jsonl", continue_metrics, accepted=("empty", "half")),
    "image": Reader(make_images, "train/cat/1.png", read_image),
    "tree of images": Reader(
        make_images, "train/cat/1.png", lambda folder: load_image_folder(str(folder), Options()), accepted=("empty", "half")
    ),
    "text": Reader(
        make_text, "words.txt", lambda folder: load_data("text", text_file=str(folder / "words.txt"), sequence_length=3)
    ),
    "cifar": Reader(write_cifar, BIN + "data_batch_2.bin", lambda folder: read_cifar10(str(folder)), accepted=("half",)),
    "mnist images": Reader(write_mnist, RAW + "train-images-idx3-ubyte", read_mnist_of),
    "mnist labels": Reader(write_mnist, RAW + "t10k-labels-idx1-ubyte", read_mnist_of),
    "predict's image": Reader(make_run, "image.png", predicted),
    "predict's settings": Reader(make_run, "config.json", predicted),
    "predict's task": Reader(make_run, "task.json", predicted),
    "predict's weights": Reader(make_run, "model.safetensors", predicted),
    "compare": Reader(make_run, "summary.json", lambda folder: run_command(compare.main, str(folder))),
    "report": Reader(make_run, "metrics.jsonl", lambda folder: read_runs([str(folder)])),
    "report's settings": Reader(make_run, "config.json", lambda folder: read_runs([str(folder)]), accepted=KINDS),
    "report's summary": Reader(make_run, "summary.json", lambda folder: read_runs([str(folder)]), accepted=KINDS),
    "script to run": Reader(make_script, "script.py", load_script_of, accepted=("empty", "half")),
    "check of a script": Reader(
        make_script, "script.py", lambda folder: run_command(check, str(folder / "script.py")), accepted=("empty",)
    ),
}


def wait_for_writer(folder: Path) -> None:
    (folder / "data").read_bytes()


def read_in_parts(folder: Path) -> None:
    with (folder / "data").open("rb") as file:
        while file.read(2**16):
            pass


def make_data(folder: Path) -> None:
    (folder / "data").write_text("data")


#: Readers that hang, to test the check itself.
CARELESS = {
    "wait for a writer": Reader(make_data, "data", wait_for_writer),
    "read in parts": Reader(make_data, "data", read_in_parts),
}


class HangsError(Exception):
    """A read used more processor time than its limit, or blocked."""


def read_each(requests: Connection) -> None:
    """Receive requests from another process, each (reader's name, folder, limit), and run the reader on the folder.

    Answer each request with two values: the text of the UserError (``None`` if there is none), and the traceback of any
    other error ("" if there is none).
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            name, folder, limit = requests.recv()
        except EOFError:
            return
        used = time.process_time()
        # At the limit, the process gets SIGXCPU, which ends it.
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used) + limit, resource.RLIM_INFINITY))
        refusal, problem = None, ""
        try:
            (READERS | CARELESS)[name].read(folder)
        except UserError as error:
            refusal = str(error)
        except BaseException:
            problem = traceback.format_exc()
        requests.send((refusal, problem))


class ReaderProcess:
    """Process in which readers run. A reader may hang."""

    def __init__(self) -> None:
        self.requests, theirs = Pipe()
        self.process = server().Process(target=read_each, args=(theirs,))
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.requests.close()


#: The process that runs readers, if it is idle. A process in which a reader has hung or failed is not used again.
PROCESSES: list[ReaderProcess] = []


@pytest.fixture(scope="module", autouse=True)
def _no_process_left() -> Iterator[None]:
    yield
    while PROCESSES:
        PROCESSES.pop().end()


def refusals(name: str, folders: list[Path], limit: int = LIMIT) -> Iterator[str | None]:
    """Yield the reader's refusal of each folder, or None. The reader runs in another process, since it may hang.

    A busy machine causes no error: time in which the reader waits for a core does not count.

    Raises:
        HangsError: a read reaches its limit.
        AssertionError: the reader raises an error other than UserError.
    """
    running = PROCESSES.pop() if PROCESSES else ReaderProcess()
    try:
        for folder in folders:
            running.requests.send((name, folder, limit))
            asleep, since = "", time.monotonic()
            while not running.requests.poll(0.05):
                if (now := asleep_in(running.process.pid)) != asleep or not now:
                    asleep, since = now, time.monotonic()
                if time.monotonic() > since + limit:
                    raise HangsError(f"{name} waits: {folder.name}")
            try:
                refusal, problem = running.requests.recv()
            except (EOFError, ConnectionResetError):
                running.process.join()
                raise HangsError(f"{name} ends by signal {-running.process.exitcode}: {folder.name}") from None
            assert not problem, f"{folder.name}: {problem}"
            yield refusal
    except BaseException:
        running.end()
        raise
    PROCESSES.append(running)


def asleep_in(pid: int) -> str:
    """Return a value that differs for each interruptible sleep of a process; "" in any other state."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ""  # the process has ended
    values = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return values["voluntary_ctxt_switches"] if values["State"].startswith("S") else ""


def good_and_bad_folders(name: str, folder: Path) -> list[Path]:
    """Make a good folder for a reader, and one with each kind of bad file."""
    reader, good = (READERS | CARELESS)[name], folder / "good"
    good.mkdir()
    reader.make(good)
    for kind in KINDS:
        shutil.copytree(good, folder / kind)
        replace(folder / kind / reader.file, kind)
    return [good, *(folder / kind for kind in KINDS)]


@pytest.mark.parametrize("name", READERS)
def test_a_bad_file_is_refused_without_a_hang_and_in_one_line(name, tmp_path):
    reader = READERS[name]
    good, *folders = good_and_bad_folders(name, tmp_path)
    results = refusals(name, [good, *folders])
    assert next(results) is None
    for kind, folder, refusal in zip(KINDS, folders, results, strict=True):
        if refusal is None:
            assert kind in reader.accepted, kind
            continue
        assert "\n" not in refusal, kind
        part, whole = Path(reader.file).stem, str(folder)
        assert part in refusal or whole in refusal, (kind, refusal)


@pytest.mark.parametrize(
    ("name", "kind", "part"),
    [("wait for a writer", "FIFO", "waits"), ("read in parts", "device", f"ends by signal {int(signal.SIGXCPU)}")],
)
def test_a_reader_that_hangs_is_detected(name, kind, part, tmp_path):
    good, *folders = good_and_bad_folders(name, tmp_path)
    results = refusals(name, [good, folders[KINDS.index(kind)]], limit=1)
    assert next(results) is None
    with pytest.raises(HangsError, match=f"{name} {part}: {kind}"):
        next(results)


def test_a_download_that_would_replace_a_link_or_a_special_file_is_refused(tmp_path):
    files, archives = [tmp_path / "a", tmp_path / "b"], [tmp_path / "a.gz"]
    assert missing(files, archives)
    (tmp_path / "target").write_text("")
    files[0].symlink_to("target")
    files[1].write_text("")
    assert not missing(files, archives)  # a link to a regular file is a file too
    files[1].unlink()
    with pytest.raises(UserError, match="delete it first"):
        missing(files, archives)
    files[0].unlink()
    os.mkfifo(archives[0])
    with pytest.raises(UserError, match=r"a\.gz.*delete it first"):
        missing(files, archives)


def test_a_link_to_a_parent_folder_is_refused(tmp_path):
    make_images(tmp_path)
    (tmp_path / "val" / "cat" / "more").symlink_to(tmp_path / "train" / "cat")
    assert len(load_image_folder(str(tmp_path), Options()).val) == 2  # a link to another folder is followed
    for name in ("one", "two"):
        (tmp_path / "train" / "cat" / name).symlink_to("..")
    with pytest.raises(UserError, match="a link to a folder that contains it"):
        load_image_folder(str(tmp_path), Options())


def test_formats_are_detected_by_content_and_no_format_starts_a_program(tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(" + str(tmp_path) + "/made) (w) file\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("subprocess.Popen", refuse)
        patch.setattr("os.system", refuse)
        with pytest.raises(UserError, match="none of JPEG, PNG"):
            decode(path)
        with pytest.raises(UserError, match=r"\(No such file or directory\): check its path and permissions$"):
            decode(tmp_path / "missing.jpg")  # "fix or delete it" would be no cure
    for kind in ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP"):
        Image.new("RGB", (4, 3)).save(path, format=kind)
        assert decode(path).size == (4, 3)


def refuse(*args: Any, **options: Any) -> None:
    raise AssertionError("a program is started")


def test_an_image_that_would_fill_the_memory_is_refused(tmp_path):
    # A PNG whose header says 60000 × 60000 pixels, without pixel data.
    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    content = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    with pytest.raises(UserError, match=r"bomb\.png.*decompression bomb.*: delete it, or make it smaller$"):
        decode(tmp_path / "bomb.png")


def test_a_thin_image_that_would_fill_the_memory_when_scaled_is_refused(tmp_path):
    Image.new("L", (1, 20000)).save(tmp_path / "thin.png")
    sample = [(str(tmp_path / "thin.png"), 0)]
    refusal = ImageFiles(sample, Geometry(224, 256)).__getitems__(([0], 0))
    assert isinstance(refusal, UserError)
    reason = "1 × 20000 pixels, which become 1310720000 pixels if the shorter side is scaled to 256; the limit is 178956970"
    assert reason in str(refusal)
    assert not isinstance(ImageFiles(sample, Geometry(224, 256, "imagenet")).__getitems__(([0], 0)), UserError)
    assert not isinstance(ImageFiles(sample, Geometry(8, 8)).__getitems__(([0], 0)), UserError)
    refusal = ImageFiles(sample, Geometry(8, 20000)).__getitems__(([0], 0))  # no image could be scaled to this size
    assert "images cannot be scaled to 20000 pixels" in str(refusal)
    assert "give a smaller --resize or --image-size" in str(refusal)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "float32"])
def test_an_image_of_more_than_8_bits_per_channel_is_refused(tmp_path, dtype):
    Image.fromarray(numpy.full((4, 4), 300, dtype=dtype)).save(tmp_path / "deep.tiff")
    with pytest.raises(UserError, match=r"deep\.tiff' has pixels of more than 8 bits, mode .*: convert it to 8 bits"):
        decode(tmp_path / "deep.tiff")


def test_errors_stay_on_one_line_if_names_contain_newlines(tmp_path):
    torch.save({"a\nb": torch.ones(1)}, tmp_path / "w.pt")
    with pytest.raises(UserError, match=r"unexpected \('a\\nb'\)"):
        load_weights(nn.Linear(2, 2), str(tmp_path / "w.pt"))
    for name, load in (("cifar10", read_cifar10), ("MNIST", partial(read_mnist, "mnist"))):
        with pytest.raises(UserError, match=name.lower()) as refusal:
            load(str(tmp_path / "a\nb"))
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("state", "part"),
    [
        (lambda: {1: torch.ones(1)}, "the key 1, which is not text"),
        (lambda: {("a",): torch.ones(1)}, "which is not text"),
        (lambda: {"a": torch.ones(2, 2).to_sparse()}, "'a', a sparse tensor"),
        (lambda: {"a": torch.ones(2, 2).to_sparse_csr()}, "'a', a sparse tensor"),
        (lambda: {"a": torch.ones(2, device="meta")}, "'a', a meta tensor"),
        (lambda: {"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, "'a', a quantized tensor"),
        (lambda: {"a": torch.ones(2, dtype=torch.complex64)}, "'a', a complex tensor"),
        (lambda: {"a": 1}, "not a mapping from names to tensors"),
        (lambda: [torch.ones(1)], "not a mapping"),
        (lambda: {"model": {"state_dict": torch.ones(1), 2: torch.ones(1)}}, "which is not text"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch warns about these kinds of tensors
def test_weights_that_cannot_be_copied_into_a_model_are_refused(tmp_path, state, part):
    torch.save(state(), tmp_path / "w.pt")
    with pytest.raises(UserError) as refusal:
        load_weights(nn.Linear(2, 2), str(tmp_path / "w.pt"))
    assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("what", "change", "part"),
    [
        ("images", lambda data: data[:2] + b"\x0d" + data[3:], "not an idx file of uint8 values in 3 dimensions"),
        ("images", lambda data: data[:3] + b"\x01" + data[4:], "not an idx file of uint8 values in 3 dimensions"),
        (
            "images",
            lambda data: data[:8] + struct.pack(">II", 14, 56) + data[16:],
            r"items of shape \(14, 56\), and not \(28, 28\)",
        ),
        ("images", lambda data: data[:4] + b"\xff" * 12 + data[16:], r"items of shape \(4294967295, 4294967295\)"),
        ("images", lambda data: data + b"\0", "bytes, and not the"),
        ("images", lambda data: data[:4] + struct.pack(">I", 39) + data[8:-784], "39 images and .* 40 labels"),
        ("labels", lambda data: data[:-1] + b"\x0a", "labels that are not from 0 to 9"),
        ("labels", lambda data: data[:4] + b"\0\0\0\0", "40 images and .* 0 labels"),
    ],
)
def test_mnist_files_of_wrong_types_shapes_counts_or_labels_are_refused(tmp_path, what, change, part):
    write_mnist(tmp_path)
    path = next((tmp_path / "MNIST" / "raw").glob(f"train-{what}*"))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=part) as refusal:
        read_mnist("mnist", str(tmp_path))
    assert "\n" not in str(refusal.value)


def test_names_of_classes_do_not_control_the_terminal(tmp_path, capsys):
    make_run(tmp_path)
    task = json.loads((tmp_path / "task.json").read_text())
    (tmp_path / "task.json").write_text(json.dumps({**task, "class_names": [f"\x1b]0;{n}\x07\n" for n in range(10)]}))
    image = tmp_path / "\x1b[2Jimage\n.png"
    (tmp_path / "image.png").rename(image)
    assert predict.main([str(tmp_path), str(image)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert out.count("\n") == 1
    assert "\\x1b[2Jimage" in out


def test_settings_and_summaries_of_wrong_types_are_refused(tmp_path):
    make_run(tmp_path)
    for file, name, value in (
        ("config.json", "pad", "x"),
        ("config.json", "normalize", [1]),
        ("task.json", "shape", [1, "8", 8]),
        ("task.json", "shape", "188"),
        ("task.json", "classes", -1),
        ("summary.json", "backend", None),
        ("summary.json", "val_accuracy", "x"),
    ):
        before = (tmp_path / file).read_text()
        (tmp_path / file).write_text(json.dumps({**json.loads(before), name: value}))
        with pytest.raises(UserError) as refusal:
            run_command(compare.main, str(tmp_path)) if file == "summary.json" else predicted(tmp_path)
        assert "\n" not in str(refusal.value)
        (tmp_path / file).write_text("[" * 10**5)
        with pytest.raises(UserError):
            run_command(compare.main, str(tmp_path)) if file == "summary.json" else predicted(tmp_path)
        (tmp_path / file).write_text(before)


@pytest.mark.parametrize("name", ["loop", "y" * 300, ""])
@pytest.mark.parametrize(
    "command",
    [
        lambda path: compare.main([path]),
        lambda path: report.main([path]),
        lambda path: report.main([path, "--watch"]),
        lambda path: predict.main([path, path]),
    ],
)
def test_a_path_that_names_no_run_is_refused_in_one_line(tmp_path, monkeypatch, capsys, command, name):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert command(name) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_run_whose_folder_name_contains_a_newline_has_one_row(tmp_path, capsys):
    folder = tmp_path / "a\nb"
    folder.mkdir()
    summary = dict.fromkeys(("backend", "launcher", "transport", "weights_sha256"), "x")
    summary |= dict.fromkeys(("val_accuracy", "samples_per_second", "seconds", "world_size"), 1)
    (folder / "summary.json").write_text(json.dumps(summary))
    assert compare.main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith(r"a\nb ")
