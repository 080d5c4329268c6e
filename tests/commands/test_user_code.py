"""Failures of the user's code: the traceback of the user's lines, the one-line error message, and torchrun's summary."""

from __future__ import annotations

import errno
import json
import re
import traceback

import pytest
import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from dualtrain import Trainer, connect
from dualtrain import main as command
from dualtrain.errors import UserError
from dualtrain.on_ranks import on_all_ranks
from dualtrain.user_code import call_user_code, user_code
from tests.threads import run_threads


class UnfitLayers(nn.Module):
    """Model whose second linear layer does not fit the first."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(9, 10))

    def forward(self, inputs):
        return self.body(inputs)  # the user's line


class LateFailure(UnfitLayers):
    """Model that fails in training, but not in the evaluation of one sample before the run begins."""

    def __init__(self):
        super().__init__()
        self.body[2] = nn.Linear(8, 10)

    def forward(self, inputs):
        if self.training:
            lookup = {}
            lookup["missing"]  # the user's line
        return super().forward(inputs)


class LateOverflow(LateFailure):
    """Model with an arithmetic error in training."""

    def forward(self, inputs):
        if self.training:
            int(float("inf"))  # the user's line
        return self.body(inputs)


class LateMemoryShortage(LateFailure):
    """Model that needs too much memory in training."""

    def forward(self, inputs):
        if self.training:
            torch.empty(2**62, dtype=torch.int8)  # the user's line
        return self.body(inputs)


class Data:
    num_classes = 10

    def __init__(self, bad_number):
        self.bad_number = bad_number

    def __len__(self):
        return 20

    def __getitem__(self, number):
        if number == self.bad_number:
            self.fail()
        return torch.zeros(1, 8, 8), number % 10

    def fail(self):
        int("no number")  # the user's line


class LargeData(Data):
    def fail(self):
        raise MemoryError("16 TB")  # the user's line


def failing_build():
    raise FileNotFoundError("no weights.bin")  # the user's line


def bad_data():
    return Data(0), Data(-1)


def bad_later():
    return Data(19), Data(-1)


def too_large_later():
    return LargeData(19), Data(-1)


def overflowing_build():
    return int(1e400)  # the user's line


@pytest.mark.parametrize(
    ("flags", "status", "line"),
    [
        (
            ["--model", "UnfitLayers"],
            2,
            r"--model \S+ and --dataset digits do not fit: a sample of shape \(1, 8, 8\) raises RuntimeError: .*mat1 "
            r"and mat2 shapes cannot be multiplied .*, in layer body\.2 \(Linear\), in test_user_code\.py:\d+; change .*",
        ),
        (["--model", "failing_build"], 2, r"--model '\S+' failed: FileNotFoundError: no weights\.bin, in test_user\S+:\d+"),
        (["--dataset", "bad_data"], 2, r"sample 0 of --dataset '\S+' failed: ValueError: invalid literal .*, in test_u\S+"),
        (
            ["--dataset", "bad_later", "--workers", "1"],
            2,
            r"sample 19 of the dataset failed: ValueError: .*, in test_user\S+",
        ),
        (["--model", "LateFailure"], 1, r"KeyError: 'missing', in test_user_code\.py:\d+"),
        (["--model", "overflowing_build"], 2, r"--model '\S+' failed: OverflowError: .* infinity .*, in test_user\S+"),
        (["--model", "LateOverflow"], 1, r"OverflowError: cannot convert float infinity to integer, in test_user\S+"),
        (["--model", "LateMemoryShortage"], 2, r"too large for this machine \(.*allocat.*\): choose smaller .*"),
        (
            ["--dataset", "too_large_later", "--workers", "1"],
            2,
            r"sample 19 of the dataset is too large for this machine \(16 TB\): make it smaller",
        ),
    ],
    ids=["model", "build", "first", "worker", "step", "build overflow", "overflow", "memory", "memory in a worker"],
)
def test_the_traceback_has_only_frames_of_user_code(tmp_path, monkeypatch, capsys, flags, status, line):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    kind, name, *options = flags
    argv = [kind, f"{__name__}:{name}", *options, "--run-dir", str(tmp_path / "run"), "--max-steps", "1", "--threads", "1"]
    assert command.main(argv) == status
    *trace, last = capsys.readouterr().err.splitlines()
    # A UserError that is raised after the run has begun forbids a restart.
    final = "do not restart: " if status == 2 and ("later" in name or "Late" in name) else ""
    assert re.fullmatch(f"dualtrain: error: {final}{line}", last)
    assert trace[0] == "Traceback (most recent call last):"
    files = [found[1] for found in re.finditer(r'File "(.*?)"', "\n".join(trace))]
    assert set(files) == {__file__}, trace
    assert any("# the user's line" in shown for shown in trace)
    summary = ProcessFailure(local_rank=0, pid=1, exitcode=status, error_file=str(file))  # as torchrun's agent does
    shown = summary.message["extraInfo"]["py_callstack"]
    assert shown.splitlines()[: len(trace)] == trace
    assert summary.timestamp > 0


def failing_loss(outputs, targets):
    return {}["no weight"]  # the user's line


@pytest.mark.parametrize(
    ("way", "virtual"), [("step", None), ("step", 2), ("fit", None), ("evaluate", None), ("evaluate", 2)]
)
def test_a_failing_loss_raises_the_users_error_at_the_users_line(way, virtual):
    model, batch = nn.Linear(3, 2), (torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
    with connect("local") as backend:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, optimizer, failing_loss, backend=backend, virtual_ranks=virtual)
        parts = [batch] if virtual is None else [batch] * virtual
        calls = {"step": lambda: trainer.step(parts, 4.0), "fit": lambda: trainer.fit([batch])}
        calls["evaluate"] = lambda: trainer.evaluate([batch] if virtual is None else [[batch]] * virtual)
        with pytest.raises(KeyError, match="no weight") as error:
            calls[way]()
    last = traceback.extract_tb(error.value.__traceback__)[-1]
    assert (last.filename, last.line) == (__file__, 'return {}["no weight"]  # the user\'s line')


@pytest.mark.parametrize(
    ("returned", "got"),
    [(torch.zeros(3), r"a tensor of shape \(3,\)"), (0.5, "a float"), (None, "a NoneType")],
)
def test_a_loss_that_is_not_a_scalar_tensor_is_refused(returned, got):
    pair = returned, [1.0, 4.0, -1.0, -1.0]
    for loss, role in ((returned, ""), (pair, " as the mean loss")):
        model = nn.Linear(3, 2)
        with connect("local") as backend:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            trainer = Trainer(model, optimizer, lambda outputs, targets, loss=loss: loss, backend=backend)
            with pytest.raises(TypeError, match=f"the loss returned {got}{role}: return the mean over the samples"):
                trainer.fit([(torch.zeros(4, 3), torch.zeros(4))])


def test_torchruns_summary_includes_errors_from_outside_of_user_code(tmp_path, monkeypatch, capsys):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert command.main(["--lr", "x"]) == 2
    assert json.loads(file.read_text())["message"]["message"].startswith("--lr must be a number")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    assert command.main(["--lr", "y"]) == 2  # torchrun's file cannot be written; the error is still reported
    assert "'y'" in capsys.readouterr().err


def test_a_module_with_a_syntax_error_shows_the_line(tmp_path, monkeypatch):
    (tmp_path / "broken_model.py").write_text("def build(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="--model 'broken_model:build' failed: SyntaxError") as error:
        call_user_code("broken_model:build", "--model", "nothing")
    assert "def build(:" in error.value.trace


@pytest.mark.parametrize(
    ("path", "cure"),
    [
        ("no_such_module:build", "'no_such_module', which is not found: run from its folder or set PYTHONPATH"),
        ("no_such_package.module:build", "'no_such_package', which is not found: run from its folder or set PYTHONPATH"),
        ("needy_model:build", "'no_such_library', which is not found: install it, or set PYTHONPATH"),
    ],
)
def test_a_missing_module_is_named_with_the_cure(path, cure, tmp_path, monkeypatch):
    (tmp_path / "needy_model.py").write_text("import no_such_library.layers\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError) as refusal:
        call_user_code(path, "--model", "(shape, classes)")
    assert str(refusal.value) == f"--model {path!r} needs the module {cure}"


def test_an_exception_without_text_is_named_by_its_class():
    class SilentError(RuntimeError):
        def __str__(self):
            raise KeyError("text")

    with pytest.raises(UserError, match=r"^--model failed: SilentError: its __str__ raised KeyError"), user_code("--model"):
        raise SilentError
    with pytest.raises(UserError, match=r"^--model failed: StopIteration, in test_user_code\.py"), user_code("--model"):
        raise StopIteration


def test_a_long_error_text_is_cut_in_the_line_and_complete_in_the_traceback():
    said = r"^--model failed: ValueError: x{400}…, in test_user_code"
    with pytest.raises(UserError, match=said) as error, user_code("--model"):
        raise ValueError("x" * 5000)
    assert "x" * 5000 in error.value.trace


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (TimeoutError("timed out"), True),
        (OSError(errno.ESTALE, "stale file handle", "x.npy"), True),
        (FileNotFoundError(errno.ENOENT, "no such file", "x.npy"), False),
        (OSError("image file is truncated"), False),
        (ValueError("bad sample"), False),
    ],
)
def test_only_errors_of_a_disk_or_a_network_are_transient(error, transient):
    for cause in (None, error):
        with pytest.raises(UserError) as caught, user_code("sample 5 of the dataset"):
            raise error if cause is None else RuntimeError("the bucket cannot be read") from cause
        assert caught.value.transient is transient


def fail_on(backend, ranks: tuple[int, ...]) -> tuple[str, str]:
    """Let user code fail on ``ranks``; return the message and the traceback of the error that this rank raises."""

    def task() -> None:
        if backend.rank in ranks:
            call_user_code(f"{__name__}:failing_build", "--model", "nothing")

    with pytest.raises(UserError) as error:
        on_all_ranks(backend, "model", task)
    return str(error.value), error.value.trace


def test_only_the_rank_whose_code_failed_has_the_traceback():
    (one, its_trace), (other, no_trace) = run_threads(2, fail_on, (0,))
    assert one == other
    assert "rank 0: --model" in one
    assert "# the user's line" in its_trace
    assert no_trace == ""
