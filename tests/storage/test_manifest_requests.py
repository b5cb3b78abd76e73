"""Manifests that are kept while a step is done: changes are seen where they are looked for, and one's own at once."""

from __future__ import annotations

import os
import threading

import pytest

import dsq_ckpt
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.concurrent_changes import detect_change, read_current_checksum
from dsq_ckpt.storage.manifest import MANIFEST, Manifest
from dsq_ckpt.storage.manifest_requests import one_request_each
from tests.helpers.remote_runs import chain, state_of


def test_a_removal_is_seen() -> None:
    for seen in (
        lambda path, manifest: read_current_checksum(path, manifest) == "",
        lambda path, manifest: detect_change(path, manifest.save_id) == "removed",
    ):
        [path] = chain("memory://removed-meanwhile/run", 1)
        with one_request_each():
            manifest = Manifest.read(path)
            get_storage(path).remove(path / MANIFEST)
            assert Manifest.read(path) is manifest
            assert seen(path, manifest)


def test_a_save_of_its_own_is_seen() -> None:
    [path] = chain("memory://replaced-meanwhile/run", 1)
    with one_request_each():
        manifest = Manifest.read(path)
        result = dsq_ckpt.save(state_of(2), path, overwrite=True)
        assert result.save_id == Manifest.read(path).save_id != manifest.save_id


def test_nothing_is_kept_afterwards() -> None:
    [path] = chain("memory://changed-afterwards/run", 1)
    with one_request_each():
        Manifest.read(path)
    get_storage(path).remove(path / MANIFEST)
    assert not get_storage(path).exists(path / MANIFEST)
    [path] = chain("memory://changed-afterwards/run", 1)
    assert Manifest.read(path).save_id


def test_a_save_of_another_thread_is_seen() -> None:
    """Such as one in the background, which a step waits for."""
    [path] = chain("memory://replaced-by-a-thread/run", 1)
    with one_request_each():
        manifest = Manifest.read(path)
        thread = threading.Thread(target=lambda: dsq_ckpt.save(state_of(2), path, overwrite=True))
        thread.start()
        thread.join()
        assert Manifest.read(path).save_id != manifest.save_id


def test_another_thread_reads_for_itself() -> None:
    [path] = chain("memory://read-by-a-thread/run", 1)
    found = []

    def read_after_removal() -> None:
        try:
            found.append(Manifest.read(path))
        except FileNotFoundError as error:
            found.append(error)

    with one_request_each():
        Manifest.read(path)
        get_storage(path).remove(path / MANIFEST)
        thread = threading.Thread(target=read_after_removal)
        thread.start()
        thread.join()
    assert isinstance(found[0], FileNotFoundError)


def test_a_block_in_a_block_does_not_end_it_nor_does_an_error_leave_it_open() -> None:
    [path] = chain("memory://nested/run", 1)
    with pytest.raises(ZeroDivisionError), one_request_each():
        manifest = Manifest.read(path)
        with one_request_each():
            get_storage(path).remove(path / MANIFEST)
        assert Manifest.read(path) is manifest
        raise ZeroDivisionError
    with pytest.raises(FileNotFoundError):
        Manifest.read(path)


def test_local_manifests_are_read_each_time(tmp_path) -> None:
    [path] = chain(str(tmp_path), 1)
    with one_request_each():
        Manifest.read(path)
        (path / MANIFEST).unlink()
        with pytest.raises(FileNotFoundError):
            Manifest.read(path)


def test_a_forked_process_reads_for_itself() -> None:
    """A child does not return from the block, and would keep for good what was read there."""
    [path] = chain("memory://forked/run", 1)
    with one_request_each():
        Manifest.read(path)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                get_storage(path).remove(path / MANIFEST)
                Manifest.read(path)
            except FileNotFoundError:
                status = 0
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
