"""Requests that fail, answers that are lost, clients that are killed: what is visible on a server of S3 is complete."""

from __future__ import annotations

import re
import signal
from types import SimpleNamespace

import fsspec
import pytest
import torch

import dsq_ckpt
from dsq_ckpt.errors import DSQError, LoadFailed
from dsq_ckpt.storage import object_store, remote_gc
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.manifest import MANIFEST
from dsq_ckpt.storage.object_store import ObjectStore
from dsq_ckpt.storage.paths import resolve_checkpoint_path
from tests.helpers.faulty_s3 import faulty_s3
from tests.helpers.processes import run

_PART = 5 << 20  # the smallest part that S3 takes


@pytest.fixture
def server(s3_address, bucket, monkeypatch):
    """The server that this process uses."""
    # The time before a further try, in seconds: of theirs drawn from 0 to 1, and a save here makes dozens.
    monkeypatch.setattr("botocore.retryhandler.random", SimpleNamespace(random=lambda: 0.01))
    monkeypatch.setattr(object_store, "_FIRST_WAIT", 0.01)
    with faulty_s3(s3_address) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.address)
        monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": _PART})
        yield server


def state_of(step: int, rows: int = 256) -> dict:
    values = torch.randn(rows, 256, generator=torch.Generator().manual_seed(0))
    return {"w": values * (1 + 0.001 * step), "bias": torch.randn(10), "step": step}


def loaded(path) -> dict:
    target: dict = {}
    dsq_ckpt.load(target, path)
    return target


def large(step: int) -> dict:
    """A state whose exact tensor takes several parts."""
    ids = torch.randint(0, 2**62, (1_400_000,), generator=torch.Generator().manual_seed(step))
    return {**state_of(step), "ids": ids}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["reset", "lost", "503 SlowDown", "500 InternalError", "dribble"])
def test_faults_that_pass_are_not_seen(server, bucket, fault, monkeypatch):
    """The first request of every kind fails; each file is uploaded in parts."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")  # with more, the first further try waits as long
    server.fault = lambda method, path, before: fault if before == 0 else None
    for step in (1, 2):
        result = dsq_ckpt.save(large(step), f"{bucket}/run/step-{step}")
    assert result.depth == 1
    assert dsq_ckpt.latest(f"{bucket}/run") == str(result.path)
    assert torch.equal(loaded(result.path)["ids"], large(2)["ids"])
    uploads = [path for method, path, _ in server.asked if method == "PUT" and "partNumber=2" in path]
    assert len({re.sub("uploadId=[^&]*", "", path) for path in uploads}) >= 2


@pytest.mark.parametrize("keys", [r"\.dsq", r"\.refinement", r"\.index", r"manifest\.json"])
def test_a_save_that_cannot_upload_leaves_nothing(server, bucket, keys, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    dsq_ckpt.save(state_of(1), f"{bucket}/run/step-1")
    server.fault = lambda method, path, _: (
        "503 ServiceUnavailable" if method in ("PUT", "POST") and re.search(keys, path) else None
    )
    with pytest.raises((DSQError, OSError), match=rf"request to the object store failed.*step-2/.*{keys}") as caught:
        dsq_ckpt.save(large(2), f"{bucket}/run/step-2")
    assert str(caught.value).count("object store failed") == 1
    server.fault = lambda *_: None
    assert dsq_ckpt.latest(f"{bucket}/run") == f"{bucket}/run/step-1"
    directory = resolve_checkpoint_path(f"{bucket}/run/step-2")
    assert get_storage(directory).list_entries(directory) == []
    assert dsq_ckpt.save(state_of(3), f"{bucket}/run/step-2").depth == 1
    assert loaded(f"{bucket}/run/step-2")["step"] == 3


@pytest.mark.parametrize(("error", "says"), [
    ("403 InvalidAccessKeyId", "access is denied.*AWS_ACCESS_KEY_ID"), ("403 AccessDenied", "access is denied"),
    ("403 SignatureDoesNotMatch", "access is denied"), ("400 ExpiredToken", "access is denied"),
    ("400 AuthorizationHeaderMalformed", "another region.*AWS_DEFAULT_REGION"),
    ("404 NoSuchBucket", "request|does not exist"),
])
@pytest.mark.parametrize("call", ["save", "load", "latest"])
def test_wrong_settings_are_one_error(server, bucket, error, says, call, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    server.fault = lambda *_: error
    calls = {
        "save": lambda: dsq_ckpt.save(state_of(1), f"{bucket}/run/step-1"),
        "load": lambda: loaded(f"{bucket}/run/step-1"), "latest": lambda: dsq_ckpt.latest(f"{bucket}/run"),
    }
    if error == "404 NoSuchBucket":
        server.fault = lambda *_: None
        bucket += "-none"
    with pytest.raises((DSQError, OSError), match=says) as caught:
        calls[call]()
    assert bucket in str(caught.value)


def test_a_store_that_fails_meanwhile_fails_latest(server, bucket, monkeypatch):
    """Whichever of its requests fails, the error is one of the package's."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    dsq_ckpt.save(state_of(1), f"{bucket}/run/step-1")
    server.asked.clear()
    dsq_ckpt.latest(f"{bucket}/run")
    assert len(server.asked) == 3
    for answered in range(3):
        requests = iter(range(answered))
        server.fault = lambda *_, requests=requests: None if next(requests, None) is not None else "403 AccessDenied"
        with pytest.raises(LoadFailed, match=f"{bucket}/run.* is unknown: access is denied"):
            dsq_ckpt.latest(f"{bucket}/run")


def test_partial_loads_read_a_part(server, bucket):
    torch.manual_seed(0)
    state = {f"ids{number}": torch.randint(0, 2**62, (1_000_000,)) for number in range(6)}
    dsq_ckpt.save(state, f"{bucket}/run/step-1")
    server.asked.clear()
    part = {"ids3": torch.zeros_like(state["ids3"])}
    dsq_ckpt.load(part, f"{bucket}/run/step-1")
    assert torch.equal(part["ids3"], state["ids3"])
    assert sum(count for _, _, count in server.asked) < 0.35 * sum(value.nbytes for value in state.values())


_KILLED = """
import os, signal, sys
import fsspec, torch, dsq_ckpt
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.object_store import Upload
from tests.storage.test_remote_faults import large, state_of

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

run, when = sys.argv[1:]
dsq_ckpt.save(state_of(1), f"{run}/step-1")
if when == "between files and manifest":
    Manifest.write = die
else:
    sent = Upload._wait_for_piece
    Upload._wait_for_piece = lambda self: (sent(self), die())
dsq_ckpt.save(large(2), f"{run}/step-2")
"""


@pytest.mark.parametrize("when", ["between files and manifest", "in an upload"])
def test_a_client_that_is_killed_leaves_nothing_visible(server, bucket, when):
    status, output = run(
        ["-c", _KILLED, f"{bucket}/run", when], forked=True, AWS_ENDPOINT_URL=server.address,
        FSSPEC_S3=f'{{"default_block_size": {_PART}}}',
    )
    assert status == -signal.SIGKILL, output
    assert dsq_ckpt.latest(f"{bucket}/run") == f"{bucket}/run/step-1"
    directory = resolve_checkpoint_path(f"{bucket}/run/step-2")
    left = {entry.name for entry in get_storage(directory).list_entries(directory)}
    assert MANIFEST not in left
    assert bool(left) == (when == "between files and manifest")
    assert {orphan.path.name for orphan in remote_gc.collect_garbage(directory.parent, 0)} == left
    assert loaded(f"{bucket}/run/step-1")["step"] == 1
    history = dsq_ckpt.SaveHistory()
    dsq_ckpt.load({}, f"{bucket}/run/step-1", history=history)
    assert dsq_ckpt.save(state_of(2), f"{bucket}/run/step-2", history=history).depth == 1


def test_a_listing_that_lags_hides_but_never_misleads(server, bucket, monkeypatch):
    """Chains are followed by key; `latest` gives an older checkpoint that is complete, and the run goes on."""
    listed = ObjectStore.list_entries
    hidden = {"step-3"}

    def entries(self, directory):
        return [] if hidden & set(directory.parts) else [
            entry for entry in listed(self, directory) if entry.name not in hidden
        ]

    monkeypatch.setattr(ObjectStore, "list_entries", entries)
    results = [dsq_ckpt.save(state_of(step), f"{bucket}/run/step-{step}") for step in (1, 2, 3, 4)]
    assert [result.depth for result in results] == [0, 1, 2, 3]
    assert loaded(f"{bucket}/run/step-3")["step"] == 3
    hidden.add("step-4")
    assert dsq_ckpt.latest(f"{bucket}/run") == f"{bucket}/run/step-2"
    with pytest.raises(dsq_ckpt.CheckpointExists):  # though the listing of what is there is empty
        dsq_ckpt.save(state_of(9), f"{bucket}/run/step-4")
