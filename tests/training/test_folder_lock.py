"""One process at a time uses a run's folder: a second one is refused, or waits for the end of the first."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import dualtrain.training.loop as loop
from dualtrain.errors import UserError
from dualtrain.run_folder import folder_lock, generation
from dualtrain.run_folder.checkpoint_writer import Writer
from dualtrain.run_folder.folder_lock import FolderLock, SupersededError
from tests.forked import Forked, wait_until
from tests.training.runs import content, train_alone

FLAGS = ("--epochs", "1", "--global-batch-size", "720", "--threads", "1", "--workers", "0")
LIMIT = 60.0
COMMAND = ("-m", "dualtrain.main", "--backend", "local", *FLAGS)


def train(folder: Path, *flags: str) -> dict[str, Any]:
    return train_alone(*FLAGS, "--run-dir", str(folder), *flags)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder through a separate open file, so that ``train`` finds it locked as if by another process."""
    lock = FolderLock()
    lock.take(folder, LIMIT)
    try:
        yield
    finally:
        lock.release()


@pytest.mark.parametrize("resume", [[], ["--resume"], ["--resume", "auto"]])
def test_a_second_job_is_refused_and_changes_nothing(tmp_path, monkeypatch, caplog, resume):
    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 0.2)
    train(tmp_path)
    with locked(tmp_path):
        before = content(tmp_path)
        with pytest.raises(UserError, match=f"is used by process {os.getpid()} on .* since .*: wait for its end") as caught:
            train(tmp_path, *resume, "--epochs", "2")
        assert caught.value.shared  # every rank raises the error, and rank 0 prints it
        assert content(tmp_path) == before
    # With --resume, the second job waits: it may be a restart, and the old process may be about to end.
    assert ["waiting up to 0.2 s" in record.getMessage() for record in caplog.records] == ([True] if resume else [])


def test_a_restart_waits_for_the_end_of_the_old_process(tmp_path, monkeypatch):
    train(tmp_path)
    lock, said = FolderLock(), []
    lock.take(tmp_path, LIMIT)

    def end(text: str, *arguments: object) -> None:
        said.append(text % arguments)
        lock.release()

    monkeypatch.setattr(folder_lock.log, "warning", end)  # the old process ends after the restart has begun to wait
    assert train(tmp_path, "--resume", "auto", "--epochs", "2")["epochs"] == 2
    assert ["waiting up to" in text for text in said] == [True]


def test_the_lock_is_released_after_the_run_and_after_an_error(tmp_path, monkeypatch):
    train(tmp_path)
    train(tmp_path, "--resume")
    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "_step", lambda run: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, "--resume", "--epochs", "2")
    train(tmp_path, "--resume", "--epochs", "2")


def test_a_folder_can_be_locked_after_an_error_of_take_and_a_release(tmp_path, monkeypatch):
    newest, lock = generation.newest, FolderLock()

    def fail_after_the_first(folder: Path) -> int:
        number = newest(folder)
        if number:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return number

    with monkeypatch.context() as patch:
        patch.setattr(generation, "newest", fail_after_the_first)
        with pytest.raises(OSError, match="Stale file handle"):
            lock.take(tmp_path, LIMIT)
    lock.release()
    with locked(tmp_path):
        assert newest(tmp_path) == 2


def test_the_lock_is_kept_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    may_write = threading.Event()
    write = Writer._write

    def slow(writer: Writer, *arguments: Any) -> None:
        may_write.wait(60)
        write(writer, *arguments)

    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_write", slow)
        patch.setattr(Writer, "wait", lambda writer: (_ for _ in ()).throw(KeyboardInterrupt) if writer.thread else None)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path)
    with pytest.raises(UserError, match="is used by"):
        train(tmp_path, "--resume", "auto")
    may_write.set()
    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 60.0)
    train(tmp_path, "--resume", "auto")


def test_a_forked_process_does_not_keep_the_lock(tmp_path):
    lock = FolderLock()
    lock.take(tmp_path, LIMIT)
    reader, writer = os.pipe()
    ready_reader, ready_writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.write(ready_writer, b"1")
        os.read(reader, 1)  # wait until the parent closes its end of the pipe
        os._exit(0)
    os.close(reader)
    os.read(ready_reader, 1)
    try:
        with pytest.raises(UserError):  # the child has closed its copy of the lock's file, and the parent keeps the lock
            FolderLock().take(tmp_path, LIMIT)
        lock.release()
        with locked(tmp_path):
            pass
    finally:
        for descriptor in (writer, ready_reader, ready_writer):
            os.close(descriptor)
        os.waitpid(child, 0)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_flock_a_start_waits_for_a_renewal_if_the_first_process_has_not_left(tmp_path, monkeypatch, caplog, number):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    train(tmp_path)
    train(tmp_path, "--resume")  # does not wait, because the earlier process has left the folder
    assert not caplog.records
    with locked(tmp_path), pytest.raises(UserError, match=f"may be used by process {os.getpid()} on"):
        train(tmp_path, "--resume", "auto", "--timeout", "0.4")
    [record] = caplog.records
    assert "waiting 6 s for a renewal of that process's file" in record.getMessage()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "other").touch()
    (tmp_path / "generation-1").symlink_to("other")
    with pytest.raises(UserError, match="cannot be written"):
        train(tmp_path)
    assert (tmp_path / "other").read_bytes() == b""


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_lock_that_is_not_a_regular_file_is_refused(tmp_path, make):
    make(tmp_path / "generation-3")
    with pytest.raises(UserError, match="cannot be written"):
        train(tmp_path, "--resume", "auto")


def test_the_error_names_no_process_if_the_lock_file_is_damaged(tmp_path):
    for text in ("", "{", "[]", '{"process": 1}', "\xff"):
        with locked(tmp_path):
            path = generation.path_of(tmp_path, generation.newest(tmp_path))
            path.write_text(text)
            with pytest.raises(UserError, match="may be used by another process: wait for its end, or give a --timeout"):
                FolderLock().take(tmp_path, 0.0)


@pytest.mark.parametrize("resume", [[], ["--resume", "auto"]])
def test_only_one_of_many_processes_trains_in_a_folder(tmp_path, resume):
    expected = train(tmp_path / "alone")["weights_sha256"]
    folder = tmp_path / "run"
    flags = ["--run-dir", str(folder), "--checkpoint-every", "1", *resume]
    started = [Forked((*COMMAND, *flags), tmp_path / f"{number}") for number in range(6)]
    ends = [process.wait_and_kill(120) for process in started]
    trained = [end for end in ends if "epoch 1/1" in end.stdout]
    assert len(trained) == 1
    for end in ends:
        if end is not trained[0] and end.returncode:
            assert end.returncode == 2
            errors = [line for line in end.stderr.splitlines() if "error" in line]
            assert len(errors) == 1
            assert "is used by" in errors[0] or "holds another run" in errors[0]
        elif end is not trained[0]:
            # This process locked the folder after the training process had released it, so nothing is left to train.
            assert resume
            assert "nothing is left to train" in end.stdout
    assert json.loads((folder / "summary.json").read_text())["weights_sha256"] == expected
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_a_stopped_process_keeps_its_folder_until_its_end(tmp_path):
    first = Forked((*COMMAND, "--epochs", "100000", "--run-dir", str(tmp_path / "run")), tmp_path / "first")
    try:
        assert wait_until(lambda: any((tmp_path / "run" / "checkpoints").glob("step-*")))
        first.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        before = content(tmp_path / "run")
        second = Forked((*COMMAND, "--run-dir", str(tmp_path / "run")), tmp_path / "second").wait_and_kill(60)
        assert second.returncode == 2
        assert f"is used by process {first.pid} on" in second.stderr
        assert content(tmp_path / "run") == before
    finally:
        first.kill()
    flags = ("--resume", "auto", "--log-seconds", "0", "--run-dir", str(tmp_path / "run"))
    third = Forked((*COMMAND, *flags), tmp_path / "third")
    end = third.wait_and_kill(60)
    assert end.returncode == 0, end.stderr
    assert "resuming from step" in end.stdout.splitlines()[0]


def test_a_start_on_an_ended_run_removes_the_temporary_files_of_a_killed_start(tmp_path):
    train(tmp_path)
    (tmp_path / f".generation-2.{'0' * 16}.tmp").touch()
    train(tmp_path, "--resume", "auto")
    assert not list(tmp_path.glob("*.tmp"))


def test_two_paths_of_one_folder_have_one_lock(tmp_path):
    with locked(tmp_path):
        (tmp_path / "link").symlink_to(tmp_path)
        with pytest.raises(UserError):
            FolderLock().take(tmp_path / "link", LIMIT)


@pytest.mark.parametrize("is_older", [False, True])
def test_a_folder_that_was_replaced_by_a_copy_is_named_as_the_cause(tmp_path, monkeypatch, is_older):
    lock, folder = FolderLock(), tmp_path / "run"
    folder.mkdir()
    if is_older:
        with monkeypatch.context() as patch:
            patch.setattr(time, "strftime", lambda form: "2026-01-02 03:04:05")
            with locked(folder):
                shutil.copytree(folder, tmp_path / "copy")
    lock.take(folder, 1.0)
    try:
        if not is_older:
            shutil.copytree(folder, tmp_path / "copy")
        folder.rename(tmp_path / "moved")
        (tmp_path / "copy").rename(folder)
        with pytest.raises(SupersededError, match="was replaced by a copy while this process used it"):
            lock.check()
    finally:
        lock.release()
