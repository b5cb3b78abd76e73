"""Manifests that are kept while a step is done: changes are seen where they are looked for, and one's own at once."""

from __future__ import annotations

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
