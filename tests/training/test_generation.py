"""Generations of a run's folder: only the process of the newest generation owns it, and older processes change nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dualtrain.errors import UserError
from dualtrain.files import read_json
from dualtrain.run_folder import checkpoint, folder_lock, generation
from dualtrain.run_folder.checkpoint_writer import Writer
from dualtrain.run_folder.folder_lock import FolderLock, SupersededError
from dualtrain.training.cursor import Cursor
from dualtrain.training.resume import set_aside
from tests.forked import ROOT, Forked, rank_variables, run, wait_until
from tests.training.runs import content, train_alone
from tests.training.starts import LIMIT, ROUNDS, STARTS, renew

FLAGS = ("--epochs", "1", "--global-batch-size", "720", "--threads", "1", "--workers", "0", "--log-every", "1")


def train(folder: Path, *flags: str) -> dict[str, Any]:
    return train_alone(*FLAGS, "--run-dir", str(folder), *flags)


def locked(folder: Path) -> FolderLock:
    lock = FolderLock()
    lock.take(folder, LIMIT)
    return lock


def supersede(folder: Path) -> None:
    """Create the file of the next generation and remove the older files, like a process on another host that takes over."""
    number = generation.newest(folder) + 1
    descriptor = generation.create(folder, number, generation.Owner(7, "elsewhere", 7, "now"))
    assert descriptor is not None
    os.close(descriptor)
    generation.remove_older(folder, number)


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """Release the locks of a test at its end: otherwise, their threads would check generations during later tests."""
    yield
    for lock in list(folder_lock._held):
        lock.release()


@contextmanager
def renewed(folder: Path) -> Iterator[FolderLock]:
    """Lock the folder, and renew the lock's file more often than the lock itself does."""
    lock, end = locked(folder), threading.Event()
    thread = threading.Thread(target=renew, args=(lock, end))
    thread.start()
    try:
        yield lock
    finally:
        end.set()
        thread.join()
        lock.release()


# -- between hosts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [False, True])
def test_a_start_on_another_host_is_refused_while_the_generation_file_is_renewed(tmp_path, monkeypatch, caplog, waits):
    with renewed(tmp_path) as first:
        monkeypatch.setattr(folder_lock, "identity", lambda: 7)
        with pytest.raises(UserError, match=f"is used by process {os.getpid()} on .*: wait for its end"):
            FolderLock().take(tmp_path, LIMIT, waits=waits)
        assert first.is_mine()
    assert ["waiting 6 s for a renewal" in record.getMessage() for record in caplog.records] == [True]
    assert locked(tmp_path).generation == 2
    assert len(caplog.records) == 1  # this start did not wait, because the first process has left the folder


def test_a_start_on_another_host_replaces_a_process_that_does_not_renew_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "RENEW_SECONDS", 0.3)
    first = FolderLock()
    monkeypatch.setattr(first, "_renew", lambda: None)  # renew no file, like a stopped process
    first.job = "one"
    first.take(tmp_path, LIMIT)
    first.record_job()
    monkeypatch.setattr(folder_lock, "identity", lambda: 7)
    with pytest.raises(UserError, match=r"may be used by process .* give a --timeout above 1\.8 s, since at most"):
        FolderLock().take(tmp_path, 0.2)
    second = FolderLock()
    second.job = "one"
    second.take(tmp_path, LIMIT)
    assert (second.generation, second.restarted) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["generation-2"]
    assert not first.is_mine()
    with pytest.raises(SupersededError, match=r"process .* took over .* generation 1 for 0\.9 s: this process ends"):
        first.check()
    first.release()
    second.check()
    with pytest.raises(UserError, match="is used by"):
        FolderLock().take(tmp_path, LIMIT)


@pytest.mark.parametrize("number", [1, 2])
def test_a_process_keeps_its_lock_if_its_folder_is_removed_until_another_process_uses_it(tmp_path, number):
    folder = tmp_path / "run"
    folder.mkdir()
    for _ in range(1, number):
        locked(folder).release()
    lock = locked(folder)
    assert lock.generation == number
    generation.path_of(folder, number).unlink()
    assert lock.is_mine()
    folder.rmdir()
    assert lock.is_mine()
    folder.mkdir()
    assert locked(folder).generation == 1
    assert not lock.is_mine()


def test_a_process_may_not_write_once_the_next_generation_exists(tmp_path):
    lock = locked(tmp_path)
    assert lock.is_mine()
    os.close(generation.create(tmp_path, 2, generation.Owner(7, "elsewhere", 7, "now")))
    assert generation.path_of(tmp_path, 1).exists()  # the process of generation 2 has not removed it yet
    assert not lock.is_mine()


def test_generations_work_on_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    first = locked(tmp_path)
    assert generation.create(tmp_path, 1, generation.Owner(7, "elsewhere", 7, "now")) is None
    with pytest.raises(UserError, match=f"is used by process {os.getpid()}"):
        FolderLock().take(tmp_path, LIMIT)
    first.release()
    assert locked(tmp_path).generation == 2


def test_a_delayed_start_gets_a_generation_above_those_created_meanwhile(tmp_path, monkeypatch):
    locked(tmp_path).release()
    create = generation.create

    def slow(folder: Path, number: int, owner: generation.Owner) -> int | None:
        monkeypatch.setattr(generation, "create", create)
        supersede(folder)
        supersede(folder)
        monkeypatch.setattr(folder_lock, "identity", lambda: 7)  # the same host as in ``supersede``: no wait for a renewal
        return create(folder, number, owner)

    monkeypatch.setattr(generation, "create", slow)
    assert locked(tmp_path).generation == 4
    assert [path.name for path in tmp_path.iterdir()] == ["generation-4"]


def test_all_waits_for_other_processes_together_do_not_exceed_the_limit(tmp_path, monkeypatch):
    clock, create = [0.0], generation.create

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    def slow(folder: Path, number: int, owner: generation.Owner) -> int | None:
        monkeypatch.setattr(generation, "create", create)
        supersede(folder)  # a third process is faster, and then does not renew its file
        return create(folder, number, owner)

    supersede(tmp_path)
    monkeypatch.setattr(generation, "create", slow)
    monkeypatch.setattr(
        folder_lock, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep, strftime=time.strftime)
    )
    with pytest.raises(UserError, match=r"may be used by process 7 on elsewhere.* give a --timeout above 20 s"):
        FolderLock().take(tmp_path, 10.0)
    assert clock[0] == pytest.approx(10.0, abs=0.1)


def test_only_one_of_many_processes_that_start_at_once_gets_the_folder(tmp_path):
    command = [sys.executable, "-m", "tests.training.starts", tmp_path]
    end = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert end.returncode == 0, end.stderr
    rounds = [json.loads(line) for line in end.stdout.splitlines()]
    lines = ["has it", *["refused"] * (STARTS - 1)]
    assert rounds == [[lines, number] for number in range(1, ROUNDS + 1)]


# -- a process that was replaced ----------------------------------------------------------------------------------


def test_checkpoints_with_and_without_a_generation_are_read(tmp_path):
    train(tmp_path)
    first = checkpoint.path_of(tmp_path / "checkpoints", 2)
    number, digest = checkpoint.generation_in(first)
    assert (number, len(digest)) == (1, 64)
    train(tmp_path, "--resume", "--epochs", "2")
    assert checkpoint.generation_in(checkpoint.path_of(tmp_path / "checkpoints", 4))[0] == 2
    tree = checkpoint.load(first)
    checkpoint.write(first, tree)  # without a generation, like earlier versions
    assert checkpoint.generation_in(first) == (0, digest)
    assert checkpoint.generation_in(tmp_path / "config.json") == (0, "")
    for path in (tmp_path / "generation-2", checkpoint.path_of(tmp_path / "checkpoints", 4)):
        path.unlink()
    (tmp_path / "summary.json").unlink()
    assert train(tmp_path, "--resume", "auto", "--epochs", "2")["steps"] == 4


def run_superseded_at(
    folder: Path, number: int, patch: pytest.MonkeyPatch
) -> tuple[dict[str, tuple[bytes, int]] | None, UserError | None]:
    """Train in ``folder``. When the run checks its generation for the ``number``-th time, another process takes over.

    Returns:
        The files at that moment, or ``None`` if the run makes fewer than ``number`` checks; and the run's error, if any.
    """
    checks, before = 0, None
    is_mine, write = FolderLock.is_mine, Writer.write

    def counted(lock: FolderLock) -> bool:
        nonlocal checks, before
        checks += lock._folder == folder
        if checks == number and before is None:
            supersede(folder)
            before = content(folder)
        return is_mine(lock)

    def write_and_wait(writer: Writer, *arguments: Any, **named: Any) -> None:
        write(writer, *arguments, **named)
        writer.wait()  # the main thread must write nothing between the writer thread's check and the write that follows

    patch.setattr(FolderLock, "is_mine", counted)
    patch.setattr(FolderLock, "_renew", lambda lock: None)
    patch.setattr(Writer, "write", write_and_wait)
    try:
        train(folder, "--resume", "auto", "--epochs", "2")
    except UserError as error:
        return before, error
    return before, None


def test_a_process_that_was_replaced_changes_nothing_whatever_it_was_about_to_write(tmp_path):
    """Repeat a run: replace its process at the first check of the generation, at the second, and so on, up to the last."""
    number, begun = 0, tmp_path / "begun"
    train(begun)
    while True:
        number += 1
        folder = shutil.copytree(begun, tmp_path / str(number))
        with pytest.MonkeyPatch.context() as patch:
            before, error = run_superseded_at(folder, number, patch)
        if before is None:
            break
        if error is None:  # the summary was written, and the run was about to record its end
            assert any(name.endswith("summary.json") for name in before)
        else:
            assert "process 7 on elsewhere since now took over" in str(error), number
            assert error.shared, number  # all ranks end with this error, and rank 0 prints it
        # Only the temporary file of the interrupted write is removed.
        assert content(folder) == {name: held for name, held in before.items() if not name.endswith(".tmp")}, number
    assert error is None
    assert number > 20
    assert read_json(folder / "summary.json")["steps"] == 4


def test_temporary_files_of_another_process_are_not_removed(tmp_path):
    lock = locked(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    temporary = tmp_path / "checkpoints" / f".step-00000002.safetensors.{'0' * 16}.tmp"
    temporary.touch()
    supersede(tmp_path)
    with pytest.raises(SupersededError):
        set_aside(tmp_path, Cursor(step=1), lock)
    assert temporary.exists()


#: Program that prints each change of a file of the run, and whether the thread that makes it has checked the generation
#: since that thread's previous change.
WATCHED = """
import os, sys, threading
from dualtrain.main import main
from dualtrain.run_folder.folder_lock import FolderLock

last, is_mine = threading.local(), FolderLock.is_mine
# For each audit event, the index of the argument that is the file's path.
changes = {"open": 0, "os.mkdir": 0, "os.remove": 0, "os.truncate": 0, "os.rename": 1, "os.link": 1}

def check(lock):
    last.checked = is_mine(lock)
    return last.checked

def note(event, arguments):
    if event not in changes or event == "open" and not arguments[2] & (os.O_CREAT | os.O_TRUNC):
        return
    path = str(arguments[changes[event]])
    name = os.path.basename(path)
    # Ignore temporary files, which only one process uses, and the generation's file, which says who owns the folder.
    if path.startswith(sys.argv[-1] + "/") and not name.endswith(".tmp") and not name.startswith("generation-"):
        print("changed" if getattr(last, "checked", False) else "changed without a check:", name)
        last.checked = False

FolderLock.is_mine = check
sys.addaudithook(note)
sys.exit(main())
"""


@pytest.mark.parametrize("case", ["begins", "resumes", "resumes from a file", "diverges"])
def test_each_change_of_a_file_follows_a_check_of_the_generation(tmp_path, case):
    folder = tmp_path / "run"
    flags, status = ("--resume", "auto", "--keep", "1", "--checkpoint-every", "1", "--run-dir", str(folder)), 0
    expected = {"checkpoints", "config.json", "task.json", "metrics.jsonl", "attempts.jsonl", ".progress"}
    if case in ("resumes", "resumes from a file"):
        train(folder, "--checkpoint-every", "1", "--epochs", "2")
        (folder / "do-not-restart.json").write_text("{}")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("no metrics\n")
        expected |= {"metrics.jsonl.aside", "do-not-restart.json"}
    if case == "resumes from a file":
        first = checkpoint.path_of(folder / "checkpoints", 2)
        flags = ("--resume", str(first), "--epochs", "3", *flags[2:])
        expected |= {"summary.json.aside", "model-best.safetensors.aside", "step-00000003.safetensors.aside"}
    elif case == "resumes":
        (folder / "model-best.safetensors").unlink()
        flags = ("--epochs", "3", *flags)
    elif case == "diverges":
        flags, status = ("--lr", "1e30", *flags), 1
        expected.add("do-not-restart.json")
    end = run(("-c", WATCHED, *FLAGS, *flags), tmp_path / "output")
    assert end.returncode == status, end
    assert "without a check" not in end.stdout, end.stdout
    changed = {line.split()[1] for line in end.stdout.splitlines() if line.startswith("changed ")}
    if status == 0:
        expected |= {"summary.json", "model.safetensors", "model-best.safetensors", checkpoint.BEST}
    assert expected <= changed, expected - changed


#: Program that trains as if on the host that its first argument identifies, and renews the lock's file often.
PROGRAM = """
import sys
import dualtrain.run_folder.folder_lock as folder_lock
from dualtrain.main import main
folder_lock.RENEW_SECONDS = 0.3
machine = int(sys.argv.pop(1))
folder_lock.identity = lambda: machine
sys.exit(main())
"""


def test_a_job_that_continues_after_it_was_replaced_ends_and_changes_nothing(tmp_path):
    folder = tmp_path / "run"
    flags = (*FLAGS, "--run-dir", str(folder), "--checkpoint-every", "1")
    old = [
        Forked(("-c", PROGRAM, "1", *flags, "--epochs", "100000"), tmp_path / "old", env={**os.environ, **variables})
        for variables in rank_variables(2)
    ]
    try:
        assert wait_until(lambda: checkpoint.step_in(folder / "checkpoints" / checkpoint.BEST) is not None)
        for process in old:
            process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        new = (*flags, "--backend", "local", "--resume", "auto", "--epochs", "100000")
        second = Forked(("-c", PROGRAM, "2", *new), tmp_path / "new")
        try:
            newest = max(map(checkpoint.step_of_name, checkpoint.found(folder / "checkpoints")))
            assert wait_until(lambda: checkpoint.path_of(folder / "checkpoints", newest + 3).exists())
            second.send_signal(signal.SIGTERM)
            assert second.wait(60) == 143, second.errors
        finally:
            second.kill()
        assert "waiting 0.9 s for a renewal of that process's file" in second.errors
        before = content(folder)
        for process in old:
            process.send_signal(signal.SIGCONT)
        ends = [process.wait_and_kill(60) for process in old]
    finally:
        for process in old:
            process.kill()
    assert content(folder) == before
    assert [end.returncode for end in ends] == [2, 2]
    errors = [line for end in ends for line in end.stderr.splitlines() if "error" in line]
    assert len(errors) == 1
    assert f"process {second.pid} on" in errors[0]
    assert "this process ends, and changes nothing in the folder" in errors[0]
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
