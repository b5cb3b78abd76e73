"""Errors of Google Cloud Storage and Azure, as gcsfs and adlfs raise them: each is one that says what to do."""

from __future__ import annotations

import errno
import os
import uuid
import weakref

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.errors import CheckpointNotFound, ConfigError, DSQError
from dsq_ckpt.storage import object_store
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.object_store import ObjectStore
from dsq_ckpt.storage.paths import resolve_checkpoint_path
from dsq_ckpt.storage.remote_errors import translate_setup_error
from tests.helpers.fake_clouds import HttpError, HttpResponseError, fake_cloud

_STATE = {"w": torch.randn(64, 64), "step": 3}


@pytest.fixture(params=["gs", "az"])
def protocol(request):
    return request.param


@pytest.fixture
def cloud(protocol, monkeypatch):
    """The file system of a protocol, whose only bucket is that of the fixture `url`."""
    monkeypatch.setattr(object_store, "_filesystems", {})
    monkeypatch.setattr(object_store, "_buckets_found", set())
    with fake_cloud(protocol, uuid.uuid4().hex) as kind:
        yield kind


@pytest.fixture
def url(cloud, protocol):
    return f"{protocol}://{next(iter(cloud.buckets))}"


def calls(url: str) -> dict:
    return {
        "latest": lambda: dsq_ckpt.latest(f"{url}/run"), "load": lambda: dsq_ckpt.load({}, f"{url}/run/step-1"),
        "save": lambda: dsq_ckpt.save(_STATE, f"{url}/run/step-1"),
    }


def test_a_run_is_saved_and_loaded(url):
    for step in (1, 2):
        dsq_ckpt.save({**_STATE, "step": step}, f"{url}/run/step-{step}")
    loaded: dict = {}
    dsq_ckpt.load(loaded, dsq_ckpt.latest(f"{url}/run"))
    assert loaded["step"] == 2


@pytest.mark.parametrize("call", ["latest", "load", "save"])
def test_a_bucket_that_does_not_exist_is_no_new_run(url, call):
    """A wrong name must not look like a run without checkpoints."""
    with pytest.raises((DSQError, OSError), match=r"-mistyped' does not exist.*check the bucket's name") as caught:
        calls(f"{url}-mistyped")[call]()
    assert "\n" not in str(caught.value)


def test_a_bucket_without_the_run_is_a_new_run(url, cloud):
    """Only the first request that finds nothing asks for the bucket."""
    assert dsq_ckpt.latest(f"{url}/run") is None
    with pytest.raises(CheckpointNotFound):
        dsq_ckpt.load({}, f"{url}/run/step-1")
    cloud.asked.clear()
    directory = resolve_checkpoint_path(f"{url}/run")
    assert get_storage(directory).list_entries(directory) == []
    assert cloud.asked == ["ls"]


def test_who_may_not_ask_for_the_bucket_has_a_new_run(url, cloud, protocol):
    directory = resolve_checkpoint_path(f"{url}/run")

    def fault(request: str) -> None:
        if len(cloud.asked) == 2:
            raise HttpError(403, "Denied") if protocol == "gs" else HttpResponseError(403, "Denied", "Denied")

    cloud.fault = staticmethod(fault)
    assert get_storage(directory).list_entries(directory) == []
    assert len(cloud.asked) == 2
    assert get_storage(directory).list_entries(directory) == []
    assert len(cloud.asked) == 3, "it is not asked again"


def test_an_error_whose_text_has_a_region_names_no_settings_of_aws(url, cloud):
    def fault(_: str) -> None:
        raise OSError(errno.EINVAL, "no such kind of storage in b/o/region-1")

    cloud.fault = staticmethod(fault)
    directory = resolve_checkpoint_path(f"{url}/run")
    with pytest.raises(OSError, match=r"no such kind of storage.*check credentials and endpoint") as caught:
        get_storage(directory).list_entries(directory)
    assert "AWS" not in str(caught.value)


def _denied(protocol: str, status: int) -> Exception:
    if protocol == "az":
        return HttpResponseError(status, "AuthorizationFailure", "This request is not authorized.")
    return OSError("Forbidden: b/bucket/o\nno permission") if status == 403 else HttpError(401, "Invalid Credentials")


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("call", ["latest", "load", "save"])
def test_credentials_to_check_are_those_of_the_store(url, cloud, protocol, call, status):
    def fault(_: str) -> None:
        raise _denied(protocol, status)

    cloud.fault = staticmethod(fault)
    expected = "GOOGLE_APPLICATION_CREDENTIALS" if protocol == "gs" else "AZURE_STORAGE_CONNECTION_STRING"
    with pytest.raises((DSQError, OSError), match=rf"(?s)access is denied.*{expected}") as caught:
        calls(url)[call]()
    assert url in str(caught.value)
    assert "AWS" not in str(caught.value)
    assert "<?xml" not in str(caught.value)


def test_settings_that_are_missing_are_those_of_the_store():
    path = resolve_checkpoint_path("az://container/run")
    said = str(translate_setup_error(ValueError("Must provide either a connection_string or account_name"), path))
    assert "AZURE_STORAGE_CONNECTION_STRING" in said
    assert "pip install" not in said
    assert "adlfs" in str(translate_setup_error(ImportError("install adlfs"), path))


@pytest.mark.parametrize("name", ["a?", "a?b", "a#", "a:b", "a[1]", "a\\b", " a", "a ", "a.", "a\tb", "a?versionid=1"])
def test_names_that_azure_changes_are_refused(name, monkeypatch):
    """adlfs writes and lists them under another name: `latest` found nothing there."""
    monkeypatch.setattr(object_store, "_filesystems", {})
    with fake_cloud("az", "container"):
        for path in (f"az://container/{name}/step-1", f"az://container/run/{name}"):
            with pytest.raises(ConfigError, match=r"do not keep the name|ask for a version"):
                ObjectStore().list_entries(resolve_checkpoint_path(path))


def test_other_names_are_kept(url):
    for name in ("a#1", "a%20b", "a b", "ä ü", "a@b", "a&b;c", "a..b"):
        dsq_ckpt.save(_STATE, f"{url}/{name}/step-1")
        assert dsq_ckpt.latest(f"{url}/{name}") == f"{url}/{name}/step-1"


def test_a_forked_child_leaves_file_systems_to_its_parent(url):
    """adlfs closes its client when a process exits, on a thread that a child lacks: it waited for it for ever."""
    assert dsq_ckpt.latest(f"{url}/run") is None
    (_pid, system), = object_store._filesystems.values()
    finalizer = weakref.finalize(system, lambda: None)
    child = os.fork()
    if child == 0:
        os._exit(int(finalizer.alive))
    assert os.waitpid(child, 0)[1] == 0
    assert finalizer.alive
