"""A name stands for a complete file or directory: the new one, or the one that was there before."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from unittest.mock import Mock

import pytest

from dsq_ckpt.storage.atomic_io import (
    AtomicFile,
    create_directory,
    create_file,
    exchange_names,
    hidden_name,
    is_hidden,
    make_directory,
    replace_directory,
    shorten_name,
)
from dsq_ckpt.storage.container import ContainerWriter


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_file_appears_complete_or_not_at_all(tmp_path, old):
    goal = tmp_path / "file"
    if old is not None:
        goal.write_bytes(old)
    before = os.listdir(tmp_path)
    with pytest.raises(KeyboardInterrupt), AtomicFile(goal, fsync=True) as file:
        file.stream.write(b"half of it")
        file.complete()
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == before and (old is None or goal.read_bytes() == old)
    with AtomicFile(goal, fsync=True) as file:
        file.stream.write(b"new")
        assert is_hidden(file.hidden.name) and sorted(os.listdir(tmp_path)) == sorted([*before, file.hidden.name])
        file.publish()
    assert os.listdir(tmp_path) == ["file"] and goal.read_bytes() == b"new"


@pytest.mark.parametrize("links", [True, False])
def test_an_exclusive_file_replaces_nothing(tmp_path, monkeypatch, links):
    goal = tmp_path / "file"
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EPERM, "no links")))
    for content in (b"first", b"second"):
        try:
            with AtomicFile(goal, fsync=False) as file:
                file.stream.write(content)
                file.publish(exclusive=True)
        except FileExistsError:
            assert content == b"second"
    assert os.listdir(tmp_path) == ["file"] and goal.read_bytes() == b"first"


def test_files_are_flushed_before_they_have_their_name_and_directories_after(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda one, two: (calls.append("replace"), replace(one, two)))
    with create_file(tmp_path / "made" / "file") as stream:
        stream.write(b"content")
    hidden, *others = calls
    assert is_hidden(os.path.basename(hidden)) and others == ["replace", str(tmp_path / "made")]


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_directory_is_replaced_whole_and_only_if_asked_to(tmp_path, overwrite):
    goal = tmp_path / "directory"
    goal.mkdir()
    (goal / "old").touch()

    def replace(fails):
        with create_directory(goal, overwrite) as hidden:
            hidden.mkdir()
            (hidden / "new").touch()
            if fails:
                raise OSError(errno.ENOSPC, "No space left")

    with pytest.raises(OSError, match=f"not all of which was written: '{goal}'"):
        replace(fails=True)
    assert os.listdir(tmp_path) == ["directory"] and os.listdir(goal) == ["old"]
    if overwrite:
        replace(fails=False)
    else:
        with pytest.raises(OSError, match="not empty"):
            replace(fails=False)
    assert os.listdir(tmp_path) == ["directory"] and os.listdir(goal) == (["new"] if overwrite else ["old"])


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_a_directory_replaces_anything_else(tmp_path, kind):
    """A link is replaced, and what it leads to stays."""
    goal, other = tmp_path / "goal", tmp_path / "other"
    if kind == "file":
        goal.touch()
    else:
        goal.symlink_to(other)
    if kind == "link":
        other.mkdir()
    with create_directory(goal, overwrite=True) as hidden:
        hidden.mkdir()
        (hidden / "new").touch()
    assert os.listdir(goal) == ["new"] and not goal.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["goal", *(["other"] if kind == "link" else [])]


@pytest.mark.parametrize("moved", [False, True])
def test_an_interrupt_between_two_names(tmp_path, monkeypatch, moved):
    """The old directory is back, unless the new one has its name already."""
    goal, new, backup, rename = tmp_path / "goal", tmp_path / "new", tmp_path / "backup", os.rename
    goal.mkdir()
    new.mkdir()

    def interrupted(source, target):
        if source != new or moved:
            rename(source, target)
        if source == new:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_directory(new, goal, backup=backup)
    assert sorted(os.listdir(tmp_path)) == (["backup", "goal"] if moved else ["goal", "new"])


def test_a_full_disk_is_said_with_the_name_of_the_file(tmp_path):
    says = f"No space left, not all of which was written: '{tmp_path / 'file'}'"
    with pytest.raises(OSError, match=says), AtomicFile(tmp_path / "file", fsync=False):
        raise OSError(errno.ENOSPC, "No space left")
    assert not os.listdir(tmp_path)


def test_names(tmp_path):
    assert hidden_name(tmp_path / "a", "0123abcd") == tmp_path / ".a.dsq-0123abcd.tmp"
    assert hidden_name(tmp_path / "a") != hidden_name(tmp_path / "a")
    make_directory(tmp_path / "one" / "two", fsync=True)
    assert (tmp_path / "one" / "two").is_dir()


def test_a_file_system_that_cannot_flush_directories_is_used_as_it_is(tmp_path, monkeypatch):
    """A flush of a file that fails there is an error as anywhere, and so is one of a directory that should work."""
    fsync, error = os.fsync, errno.EINVAL

    def refuse_directories(file):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(error, os.strerror(error))
        fsync(file)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    with AtomicFile(tmp_path / "file", fsync=True) as file:
        file.stream.write(b"whole")
        file.publish()
    assert (tmp_path / "file").read_bytes() == b"whole"
    make_directory(tmp_path / "one" / "two", fsync=True)
    error = errno.EIO
    with pytest.raises(OSError, match="while names in it were flushed"):
        make_directory(tmp_path / "other" / "two", fsync=True)


@pytest.mark.parametrize("system", ["renameat2", "neither", "not on this file system"])
def test_files_exchange_their_names_or_nothing_changes(tmp_path, monkeypatch, system):
    """A file that is gone does not come back."""
    if system == "neither":
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    elif system != "renameat2":
        monkeypatch.setattr("dsq_ckpt.storage.atomic_io._RENAME_EXCHANGE", 1 << 20)  # flags it does not know: EINVAL
    new, old = tmp_path / "new", tmp_path / "old"
    new.write_bytes(b"new")
    assert not exchange_names(new, old)
    assert os.listdir(tmp_path) == ["new"] and new.read_bytes() == b"new"
    old.write_bytes(b"old")
    assert exchange_names(new, old)
    assert old.read_bytes() == b"new"
    if system == "renameat2":
        assert new.read_bytes() == b"old"


@pytest.mark.parametrize("name", ["x" * 255, "\u00e4" * 127, "x" + "\u00e4" * 127, "\udcff" * 255, "x" * 238], ids=len)
def test_a_name_as_long_as_a_file_system_takes(tmp_path, name):
    """The hidden name beside it is shortened."""
    goal = tmp_path / name
    with create_file(goal) as stream:
        stream.write(b"new")
        (hidden,) = os.listdir(tmp_path)
    assert is_hidden(hidden) and len(os.fsencode(hidden)) <= 255 and hidden.isprintable()
    assert os.listdir(tmp_path) == [name]
    for content in ("first", "second"):
        with create_directory(tmp_path / "below" / name, overwrite=True) as directory:
            directory.mkdir()
            (directory / content).touch()
    assert os.listdir(tmp_path / "below") == [name] and os.listdir(tmp_path / "below" / name) == ["second"]


def test_shortened_names_stay_apart(tmp_path):
    names = [hidden_name(tmp_path / ("x" * 250 + str(number)), "89abcdef").name for number in range(9)]
    assert len(set(names)) == 9
    assert hidden_name(tmp_path / ("x" * 237), "89abcdef").name == f".{'x' * 237}.dsq-89abcdef.tmp"
    assert shorten_name("step-1") == "step-1"


def test_an_error_of_a_flush_counts_the_bytes_of_the_file(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    told = pytest.raises(OSError, match=r"device, before all \d+ bytes of it were written: '.*x\.dsq'")
    with told, ContainerWriter(tmp_path, "x.dsq", False) as writer:
        monkeypatch.setattr(writer, "_file", Mock(wraps=writer._file, complete=Mock(side_effect=full)))
        writer.finish({})
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_renamed_stays(tmp_path, monkeypatch):
    """On an overlay file system one of the image cannot; the error says what to do."""
    new, goal = tmp_path / "new", tmp_path / "goal"
    for directory in (new, goal):
        directory.mkdir()
        (directory / "file").write_text(directory.name)
    rename = os.rename

    def refuse(source, target):
        if source == goal:
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="container's image; remove it first") as raised:
        replace_directory(new, goal)
    assert raised.value.errno == errno.EXDEV and (goal / "file").read_text() == "goal"
