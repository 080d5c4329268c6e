"""Writing of files: atomic replacement, durable content before the new name appears, and no writes through links."""

from __future__ import annotations

import errno
import os
import re
from contextlib import nullcontext

import pytest

from dualtrain import files


def test_a_link_that_has_the_name_of_a_temporary_file_is_never_followed(tmp_path, monkeypatch):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in (".config.json.tmp", f".config.json.{'0' * 16}.tmp"):
        (tmp_path / name).symlink_to(precious)
    files.write_json(tmp_path / "config.json", {"a": 1})
    assert files.read_json(tmp_path / "config.json") == {"a": 1}
    monkeypatch.setattr(files.secrets, "token_hex", lambda count: "0" * 16)  # make the temporary file's name predictable
    for write in (
        lambda path: files.write_whole(path, b"x"),
        lambda path: files.link_whole(tmp_path / "config.json", path),
    ):
        with pytest.raises(FileExistsError):
            write(tmp_path / "config.json")
    assert precious.read_text() == "mine"
    assert files.read_json(tmp_path / "config.json") == {"a": 1}


def test_writing_to_a_link_replaces_the_link_and_keeps_its_target(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "out").symlink_to(precious)
    files.write_whole(tmp_path / "out", b"ours")
    assert ((tmp_path / "out").read_text(), precious.read_text()) == ("ours", "mine")


def test_a_fifo_that_the_user_names_is_refused_and_kept(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    for name in ("fifo", "link"):
        with pytest.raises(OSError, match="a FIFO, not a regular file"):
            files.write_named(tmp_path / name, b"ours")
    assert (tmp_path / "fifo").is_fifo()
    assert (tmp_path / "link").is_symlink()
    for _ in range(2):  # a new file, and its replacement
        files.write_named(tmp_path / "new", b"ours")
    assert sorted(os.listdir(tmp_path)) == ["fifo", "link", "new"]


def test_a_named_link_to_an_open_file_is_refused_and_kept(tmp_path):
    link = tmp_path / "stdout"
    with (tmp_path / "redirected").open("w") as file:
        link.symlink_to(f"/proc/self/fd/{file.fileno()}")
        with pytest.raises(OSError, match="a link to an open file, not a regular file"):
            files.write_named(link, b"ours")
    assert link.is_symlink()


def test_content_is_synced_before_the_rename_and_the_folder_after_it(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, files.Path.replace

    def noted_fsync(descriptor: int) -> None:
        order.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "content")
        fsync(descriptor)

    def noted_replace(path, target):
        order.append("name")
        return replace(path, target)

    monkeypatch.setattr(files.os, "fsync", noted_fsync)
    monkeypatch.setattr(files.Path, "replace", noted_replace)
    files.write_whole(tmp_path / "a", b"1")
    assert order == ["content", "name", "folder"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_need_not_synchronize_folders_but_other_errors_are_raised(tmp_path, monkeypatch, number):
    fsync = os.fsync

    def fsync_of_files(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", fsync_of_files)
    with pytest.raises(OSError, match="Input/output error") if number == errno.EIO else nullcontext():
        files.write_whole(tmp_path / "a", b"1")
    assert (tmp_path / "a").read_bytes() == b"1"


def test_the_error_of_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{tmp_path / 'task.json'}'")):
        files.write_whole(tmp_path / "task.json", b"1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("write", "name", "text"),
    [
        (files.write_named, "missing/a", "No such file or directory"),
        (files.write_named, "a\0b", "embedded null byte"),
        (files.write_whole, "folder", "Is a directory"),
    ],
)
def test_the_error_of_a_bad_path_names_this_path_and_not_a_temporary_file(tmp_path, write, name, text):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=text) as caught:
        write(tmp_path / name, b"1")
    assert str(caught.value).endswith(f"{text}: {str(tmp_path / name)!r}")
    assert os.listdir(tmp_path) == ["folder"]


def test_an_error_of_a_read_names_the_file():
    with pytest.raises(OSError, match=re.escape("Input/output error: '/proc/self/mem'")):
        files.read_text("/proc/self/mem")  # can be opened, but no memory is mapped at its beginning


def test_a_hard_link_becomes_a_copy_if_links_are_not_supported(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"content")

    def refuse(path, target):
        raise OSError(95, "Operation not supported")

    for _ in range(2):
        files.link_whole(tmp_path / "a", tmp_path / "b")
        files.link_whole(tmp_path / "a", tmp_path / "b")  # again, when both names may be links to one file
        assert (tmp_path / "b").read_bytes() == b"content"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
        monkeypatch.setattr(files.Path, "hardlink_to", refuse)
        (tmp_path / "b").unlink()


def test_only_temporary_files_of_a_killed_process_are_removed(tmp_path):
    left = [".a.json.tmp", f".a.json.{'0f' * 8}.tmp"]
    kept = ["a.json", ".b.json.tmp", ".a.json.swp", ".tmp", f".a.json.{'0f' * 8}.tmp.txt"]
    for name in [*left, *kept]:
        (tmp_path / name).touch()
    (tmp_path / ".link.tmp").symlink_to("a.json")
    files.remove_temporary(tmp_path, re.compile(r"a\.json|link"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, ".link.tmp"])
