"""The contract of a backend, which the local file system, fsspec's memory and a server of S3 keep alike."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest

from dsq_ckpt.core.urls import RemotePath, is_remote
from dsq_ckpt.errors import CorruptCheckpoint, NotLocal
from dsq_ckpt.storage.backend import get_storage, read_sizes
from dsq_ckpt.storage.paths import resolve_checkpoint_path

_LARGE = 20_000_001  # more than is uploaded by one request, and than a window of reads


@pytest.fixture(params=["local", "memory", "s3"])
def directory(request, tmp_path):
    """A directory that does not exist yet, on each backend."""
    if request.param == "local":
        return tmp_path / "run" / "step-1"
    if request.param == "memory":
        return resolve_checkpoint_path(f"memory://{tmp_path.name}/run/step-1")
    return resolve_checkpoint_path(f"{request.getfixturevalue('bucket')}/run/step-1")


@pytest.fixture
def storage(directory):
    storage = get_storage(directory)
    storage.make_directory(directory, True)
    return storage


def _write(directory, name: str, data: bytes, exclusive: bool = False) -> None:
    with get_storage(directory).create(directory / name, fsync=True) as file:
        file.stream.write(data)
        file.publish(exclusive)
    get_storage(directory).flush(directory)


@pytest.mark.parametrize("size", [0, 1, 5000, _LARGE])
def test_a_published_file_is_read_as_it_was_written(storage, directory, size):
    data = np.random.default_rng(0).bytes(size)
    with storage.create(directory / "a", fsync=True) as file:
        for start in range(0, size, 1_000_000):
            file.stream.write(data[start : start + 1_000_000])
        file.publish()
    assert storage.size(directory / "a") == size
    assert storage.read(directory / "a", size) == data
    opened = storage.open(directory / "a")
    try:
        assert opened.size == size
        for start, length in ((0, 16), (size // 2, 3_000_000), (max(size - 5, 0), 5), (size, 7), (1, size)):
            assert opened.read(start, length) == data[start : start + length]
    finally:
        opened.close()


def test_ranges_are_read_by_several_threads_at_once(storage, directory):
    data = np.random.default_rng(0).bytes(9_000_000)
    _write(directory, "a", data)
    opened, wrong = storage.open(directory / "a"), []

    def read(seed: int) -> None:
        for start in np.random.default_rng(seed).integers(0, len(data), 40):
            if opened.read(int(start), 100_000) != data[start : start + 100_000]:
                wrong.append(start)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    opened.close()
    assert not wrong


@pytest.mark.parametrize("size", [10, _LARGE])
def test_a_file_that_is_given_up_leaves_nothing(storage, directory, size):
    with pytest.raises(RuntimeError), storage.create(directory / "a", fsync=True) as file:
        file.stream.write(bytes(size))
        raise RuntimeError
    assert storage.list_entries(directory) == []


def test_a_large_file_that_is_given_up_leaves_the_one_it_was_to_replace(storage, directory):
    if str(directory).startswith("memory"):
        pytest.skip("objects appear there when they are opened")
    _write(directory, "a", b"first")
    with pytest.raises(FileExistsError):
        _write(directory, "a", bytes(_LARGE), exclusive=True)
    with pytest.raises(RuntimeError), storage.create(directory / "a", fsync=True) as file:
        file.stream.write(bytes(_LARGE))
        raise RuntimeError
    assert storage.read(directory / "a", 100) == b"first"


def test_a_file_is_replaced_whole(storage, directory):
    _write(directory, "a", b"old")
    _write(directory, "a", b"new and longer")
    assert storage.read(directory / "a", 100) == b"new and longer"


def test_an_exclusive_file_replaces_none(storage, directory):
    _write(directory, "a", b"first", exclusive=True)
    with pytest.raises(FileExistsError):
        _write(directory, "a", b"second", exclusive=True)
    assert storage.read(directory / "a", 100) == b"first"


def test_missing_files_raise_file_not_found(storage, directory):
    for missing in (directory / "a", directory / "b" / "c"):
        for request in (storage.size, storage.open, lambda path: storage.read(path, 1)):
            with pytest.raises(FileNotFoundError) as caught:
                request(missing)
            assert str(missing) in str(caught.value)
        storage.remove(directory / "a")
    assert storage.list_entries(directory / "b") == []
    assert isinstance(read_sizes([directory / "a"])[directory / "a"], FileNotFoundError)


def test_a_directory_is_no_file(storage, directory):
    storage.make_directory(directory / "below", True)
    _write(directory / "below", "a", b"1")
    with pytest.raises(OSError):
        storage.size(directory / "below")


def test_entries_are_what_lies_directly_in_a_directory(storage, directory):
    _write(directory, "a", b"12345")
    storage.make_directory(directory / "below", True)
    _write(directory / "below", "b", b"1")
    _write(directory, "c", b"123")
    entries = {entry.name: entry for entry in storage.list_entries(directory)}
    assert set(entries) == {"a", "below", "c"}
    assert (entries["a"].size, entries["a"].is_directory, entries["below"].is_directory) == (5, False, True)
    assert entries["a"].modified is not None
    assert abs(entries["a"].modified - entries["c"].modified) < 600
    assert [entry.name for entry in storage.list_entries(directory / "below")] == ["b"]


def test_sizes_are_those_of_each_file(storage, directory):
    _write(directory, "a", b"12345")
    _write(directory, "b", b"1")
    assert read_sizes([directory / "a", directory / "b"]) == {directory / "a": 5, directory / "b": 1}


@pytest.mark.parametrize("size", [0, 1, 5000, _LARGE])
@pytest.mark.parametrize("other", [-1, 1])
def test_a_file_of_another_size_than_expected_is_refused(storage, directory, size, other):
    if size + other < 0:
        other = 5000
    data = np.random.default_rng(0).bytes(size)
    _write(directory, "a", data)
    opened = storage.open(directory / "a", size)
    assert opened.size == size
    assert opened.read(0, size + 1) == data
    opened.close()
    with pytest.raises(CorruptCheckpoint, match=f"a' has {size} bytes, expected {size + other}: truncated or overwri"):
        storage.open(directory / "a", size + other).read(size + other - 1, 1)
    with pytest.raises(FileNotFoundError):
        storage.open(directory / "b", size + 1).read(0, 1)


def test_a_removed_file_is_gone(storage, directory):
    _write(directory, "a", b"1")
    storage.remove(directory / "a")
    with pytest.raises(FileNotFoundError):
        storage.size(directory / "a")


def test_no_more_than_the_limit_is_read(storage, directory):
    _write(directory, "a", b"12345")
    with pytest.raises(CorruptCheckpoint, match="more than the 4"):
        storage.read(directory / "a", 4)


def test_the_operating_system_takes_no_url():
    path = RemotePath("s3://bucket/run/step-1")
    uses = (
        path.exists, path.is_dir, path.stat, path.unlink, path.mkdir, path.read_bytes, path.iterdir, path.resolve,
        lambda: path.glob("*"), lambda: path.rglob("*"),
    )
    for use in uses:
        with pytest.raises(NotLocal, match="s3://bucket/run/step-1"):
            list(use() or ())


def test_urls_are_paths():
    path = RemotePath("s3://bucket/run/step-1")
    assert str(path / "a") == "s3://bucket/run/step-1/a"
    assert (str(path.parent), path.name, path.parent.parent.parent) == ("s3://bucket/run", "step-1", path.parent.parent)
    assert [str(above) for above in path.parents] == ["s3://bucket/run", "s3://bucket"]
    assert path.with_name("b") == RemotePath("s3://bucket/run/b") != RemotePath("gs://bucket/run/b")
    assert is_remote(path / "a")
    assert is_remote(path.absolute())
    assert path.root_url == "s3://bucket"
    assert str((path / "a").relative_to(path)) == "a"
    assert pickle.loads(pickle.dumps(path)) == path
    assert resolve_checkpoint_path("file:///tmp/run") == resolve_checkpoint_path("/tmp/run")
