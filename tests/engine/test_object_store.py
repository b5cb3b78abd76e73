"""Saves, chains and loads on object stores: fsspec's memory, and a server of S3."""

from __future__ import annotations

import re
import time

import pytest
import torch
from typer.testing import CliRunner

import dsq_ckpt
from dsq_ckpt.cli import app
from dsq_ckpt.errors import CheckpointExists, CheckpointNotFound, ConfigError, CorruptCheckpoint, DSQError, SaveFailed
from dsq_ckpt.storage import references
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.manifest import MANIFEST, Manifest, iter_checkpoints
from dsq_ckpt.storage.paths import resolve_checkpoint_path
from tests.helpers import independent_reader
from tests.helpers.processes import ROOT, run


def state_of(step: int) -> dict:
    torch.manual_seed(step)
    moved = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    return {"w": moved + 0.01 * step * torch.randn(256, 256), "bias": torch.randn(10), "step": step}


def chain(run: str, length: int, **options) -> list[str]:
    paths = [f"{run}/step-{step}" for step in range(1, length + 1)]
    for step, path in enumerate(paths, 1):
        dsq_ckpt.save(state_of(step), path, **options)
    return paths


def loaded(path: str) -> dict:
    target: dict = {}
    dsq_ckpt.load(target, path)
    return target


def files_in(path: str) -> set[str]:
    directory = resolve_checkpoint_path(path)
    return {entry.name for entry in get_storage(directory).list_entries(directory)}


def is_alike(one: dict, other: dict) -> bool:
    return all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in ("w", "bias", "step"))


def test_a_chain_is_that_of_a_local_run(store, tmp_path):
    """Values and depths are those of the same saves to a local directory; no file is stored twice."""
    remote, local = chain(f"{store}/run", 4), chain(str(tmp_path / "run"), 4)
    for there, here in zip(remote, local, strict=True):
        assert is_alike(loaded(there), loaded(here))
        assert Manifest.read(resolve_checkpoint_path(there)).depth == Manifest.read(resolve_checkpoint_path(here)).depth
    names = [name for path in remote for name in files_in(path) if name != MANIFEST]
    assert len(set(names)) == len(names)
    assert dsq_ckpt.latest(f"{store}/run") == remote[-1]


def test_a_run_goes_on_after_a_restart(store):
    paths = chain(f"{store}/run", 2)
    state, history = state_of(0), dsq_ckpt.SaveHistory()
    dsq_ckpt.load(state, dsq_ckpt.latest(f"{store}/run"), history=history)
    assert state["step"] == 2
    result = dsq_ckpt.save(state_of(3), f"{store}/run/step-3", history=history)
    assert (result.depth, str(result.path)) == (2, f"{store}/run/step-3")
    assert is_alike(loaded(result.path), loaded(f"{store}/run/step-3"))
    manifest = Manifest.read(resolve_checkpoint_path(paths[-1]))
    assert {file.held_by for file in manifest.files} == {None, "step-1"}


def test_async_saves_and_compressor(store):
    model = torch.nn.Linear(128, 128)
    compressor = dsq_ckpt.Compressor(model)
    assert dsq_ckpt.async_save(state_of(1), f"{store}/run/step-1").result().depth == 0
    assert dsq_ckpt.async_save(state_of(2), f"{store}/run/step-2").result().depth == 1
    compressor.save(f"{store}/other/step-1", extra={"step": 7})
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    assert compressor.load(dsq_ckpt.latest(f"{store}/other"), extra={"step": 0}) == {"step": 7}
    torch.testing.assert_close(model.weight, before, rtol=0.05, atol=0.01)


def test_refinement_of_older_checkpoints_is_dropped(store):
    paths = chain(f"{store}/run", 3, config={"refinement": {"keep_last": 1}})
    refinements = [any(name.endswith(".refinement") for name in files_in(path)) for path in paths]
    assert refinements == [False, False, True]


def test_latest_passes_over_what_is_incomplete(store):
    paths = chain(f"{store}/run", 2)
    get_storage(resolve_checkpoint_path(paths[1])).remove(resolve_checkpoint_path(paths[1]) / MANIFEST)
    assert dsq_ckpt.latest(f"{store}/run") == paths[0]
    assert dsq_ckpt.latest(f"{store}/nothing") is None
    with pytest.raises(CheckpointNotFound, match="did not complete"):
        loaded(paths[1])
    with pytest.raises(CheckpointNotFound, match="is a checkpoint, not a run"):
        dsq_ckpt.latest(paths[0])
    with pytest.raises(CheckpointNotFound, match="is a run, not a checkpoint"):
        loaded(f"{store}/run")
    with pytest.raises(CheckpointNotFound, match="nothing is at"):
        loaded(f"{store}/run/step-9")


def test_a_checkpoint_is_not_overwritten_unasked(store):
    path = chain(f"{store}/run", 1)[0]
    with pytest.raises(CheckpointExists):
        dsq_ckpt.save(state_of(2), path)
    assert loaded(path)["step"] == 1
    dsq_ckpt.save(state_of(3), path, overwrite=True)
    assert loaded(path)["step"] == 3
    with pytest.raises(SaveFailed, match="is a checkpoint itself"):
        dsq_ckpt.save(state_of(4), f"{path}/below")


def test_overwriting_keeps_what_newer_checkpoints_need(store):
    paths = chain(f"{store}/run", 3)
    before = [loaded(path) for path in paths]
    dsq_ckpt.save(state_of(9), paths[0], overwrite=True, parent=None)
    assert loaded(paths[0])["step"] == 9
    assert is_alike(loaded(paths[1]), before[1])
    assert is_alike(loaded(paths[2]), before[2])
    dsq_ckpt.save(state_of(10), paths[2], overwrite=True, parent=None)
    replaced = dsq_ckpt.save(state_of(11), paths[2], overwrite=True, parent=None)
    assert all(name == MANIFEST or name.startswith(replaced.save_id) for name in files_in(paths[2]))


def test_a_save_onto_its_own_parent(store):
    path = f"{store}/run/newest"
    for step in (1, 2, 3):
        result = dsq_ckpt.save(state_of(step), path, overwrite=True)
    assert result.depth == 2
    assert loaded(path)["step"] == 3


@pytest.mark.parametrize("there", ["removed", "replaced"])
def test_a_parent_that_goes_meanwhile_fails_the_save(store, there, monkeypatch):
    """Whoever removes a checkpoint deletes what no manifest names, as of a save that is not committed."""
    paths = chain(f"{store}/run", 2)
    parent = resolve_checkpoint_path(paths[1])
    written = Manifest.write

    def write(self, directory, **options):
        written(self, directory, **options)
        monkeypatch.setattr(Manifest, "write", written)
        if there == "removed":
            get_storage(parent).remove(parent / MANIFEST)
        else:
            manifest = Manifest.read(parent)
            manifest.model_copy(update={"save_id": "0" * 16}).write(parent, exclusive=False, fsync=False)

    monkeypatch.setattr(Manifest, "write", write)
    with pytest.raises(SaveFailed, match="was not committed; save again"):
        dsq_ckpt.save(state_of(3), f"{store}/run/step-3")
    assert files_in(f"{store}/run/step-3") == set()
    assert dsq_ckpt.latest(f"{store}/run") == paths[0 if there == "removed" else 1]


def test_a_failed_save_leaves_nothing(store, monkeypatch):
    paths = chain(f"{store}/run", 1)

    def fail(*_, **__):
        raise OSError(28, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(references, "commit_manifest", fail)
        with pytest.raises(DSQError, match="no space left"):
            dsq_ckpt.save(state_of(2), f"{store}/run/step-2")
    assert files_in(f"{store}/run/step-2") == set()
    assert dsq_ckpt.save(state_of(2), f"{store}/run/step-2").depth == 1
    assert is_alike(loaded(paths[0]), loaded(paths[0]))


def test_a_commit_whose_answer_was_lost_counts(store, monkeypatch):
    """The manifest is there, though the store did not say so: nothing of the checkpoint may be cleaned away."""
    written = Manifest.write

    def write(self, directory, **options):
        written(self, directory, **options)
        raise OSError(110, "timed out")

    with monkeypatch.context() as patched:
        patched.setattr(Manifest, "write", write)
        dsq_ckpt.save(state_of(1), f"{store}/run/step-1")
    assert loaded(f"{store}/run/step-1")["step"] == 1


@pytest.mark.parametrize("other", ["another run", "a local run"])
def test_a_parent_elsewhere_is_copied(store, tmp_path, other):
    run = str(tmp_path / "run") if other == "a local run" else f"{store}/before"
    parent = chain(run, 2)[-1]
    result = dsq_ckpt.save(state_of(3), f"{store}/run/step-3", parent=parent)
    manifest = Manifest.read(result.path)
    assert result.depth == 2
    assert {file.held_by for file in manifest.files} == {None}
    assert {file.name for file in manifest.files} == files_in(result.path) - {MANIFEST}


def test_a_local_save_against_a_remote_parent(store, tmp_path):
    parent = chain(f"{store}/run", 1)[-1]
    with pytest.raises(DSQError, match=r"the parent .* is on an object store.*dsq cp"):
        dsq_ckpt.save(state_of(2), tmp_path / "run" / "step-2", parent=parent)
    assert not (tmp_path / "run").exists()


def test_a_run_synchronized_to_a_disk_loads_and_goes_on(store, tmp_path):
    """As `aws s3 sync` copies it: manifests name the checkpoints of the run that have the files."""
    import fsspec

    paths = chain(f"{store}/run", 3)
    system, root = fsspec.core.url_to_fs(f"{store}/run", skip_instance_cache=True)
    system.get(root, str(tmp_path / "run"), recursive=True)
    local = tmp_path / "run" / "step-3"
    assert is_alike(loaded(local), loaded(paths[2]))
    reader = independent_reader.Reader(local)
    assert reader.index["tensors"].keys() == {"w", "bias"}
    held = [name for name, entry in reader.files.items() if "held_by" in entry]
    assert len(held) == 2
    assert all(reader.container(name).contents["save"] == name[:16] for name in held)
    history = dsq_ckpt.SaveHistory()
    dsq_ckpt.load({}, local, history=history)
    result = dsq_ckpt.save(state_of(4), tmp_path / "run" / "step-4", history=history)
    assert result.depth == 3
    manifest = Manifest.read(result.path)
    assert all((result.path / file.name).exists() and file.held_by is None for file in manifest.files)


def test_a_missing_ancestor_is_named(store):
    paths = chain(f"{store}/run", 2)
    ancestor = next(file for file in Manifest.read(resolve_checkpoint_path(paths[1])).files if file.role == "ancestor")
    get_storage(resolve_checkpoint_path(paths[0])).remove(ancestor.path_in(resolve_checkpoint_path(paths[1])))
    with pytest.raises(CorruptCheckpoint, match=f"step-1/{ancestor.name}.*manifest names it"):
        loaded(paths[1])
    with pytest.warns(UserWarning, match=f"lacks {ancestor.name}; writing a keyframe"):
        dsq_ckpt.save(state_of(3), f"{store}/run/step-3", parent=paths[1], history=dsq_ckpt.SaveHistory())


def test_an_altered_object_is_refused(store):
    path = resolve_checkpoint_path(chain(f"{store}/run", 1)[0])
    name = next(name for name in files_in(str(path)) if name.endswith(".dsq"))
    data = bytearray(get_storage(path).read(path / name, 1 << 30))
    data[len(data) // 3] ^= 1
    with get_storage(path).create(path / name, fsync=False) as file:
        file.stream.write(bytes(data))
        file.publish()
    with pytest.raises(CorruptCheckpoint, match=name):
        loaded(str(path))


def test_manifests_lead_nowhere_else(store):
    path = resolve_checkpoint_path(chain(f"{store}/run", 2)[1])
    manifest = Manifest.read(path)
    text = get_storage(path).read(path / MANIFEST, 1 << 20)
    from dsq_ckpt.storage.manifest_text import NO_CHECKSUM, insert_checksum

    for name in ("..", "a/b", ""):
        forged = text.replace(b'"held_by": "step-1"', f'"held_by": "{name}"'.encode())
        forged = insert_checksum(forged.replace(manifest.checksum.encode(), NO_CHECKSUM.encode(), 1))
        assert forged != text
        with get_storage(path).create(path / MANIFEST, fsync=False) as file:
            file.stream.write(forged)
            file.publish()
        with pytest.raises(CorruptCheckpoint, match="may not point there"):
            Manifest.read(path)
    name = next(file.name for file in manifest.files if file.held_by is not None)
    for other in ("manifest.json", "notes.txt", name.replace(".dsq", ".refinement")):
        forged = text.replace(f'"{name}"'.encode(), f'"{other}"'.encode())
        forged = insert_checksum(forged.replace(manifest.checksum.encode(), NO_CHECKSUM.encode(), 1))
        with get_storage(path).create(path / MANIFEST, fsync=False) as file:
            file.stream.write(forged)
            file.publish()
        with pytest.raises(CorruptCheckpoint, match="base files alone may"):
            Manifest.read(path)


def test_checkpoints_are_in_the_order_of_their_saves(store):
    paths = chain(f"{store}/run", 3)
    assert [str(path) for path, _ in iter_checkpoints(resolve_checkpoint_path(f"{store}/run"))] == paths


def test_a_process_whose_clock_is_behind(store, monkeypatch):
    chain(f"{store}/run", 2)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 60)  # less than what a server takes for a wrong signature
    dsq_ckpt.save(state_of(3), f"{store}/run/anew", history=dsq_ckpt.SaveHistory())
    assert dsq_ckpt.latest(f"{store}/run") == f"{store}/run/anew"


@pytest.mark.parametrize("url", ["s3://", "s3:///", "s3://bucket/../run", "zip::s3://bucket/run"])
def test_urls_that_name_no_place(url):
    with pytest.raises(DSQError):
        dsq_ckpt.save(state_of(1), url)


def test_an_unknown_protocol_is_one_error():
    with pytest.raises(ConfigError, match=r"nowhere://bucket.*dsq_ckpt\[remote\]"):
        dsq_ckpt.load({}, "nowhere://bucket/run")


def test_the_page_of_the_documentation_runs(bucket):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "remote.md").read_text(), re.S)
    exec(compile(example.replace("s3://bucket", bucket), "remote.md", "exec"), {"state_dict": state_of(1)})
    assert dsq_ckpt.latest(f"{bucket}/run") == f"{bucket}/run/step-000500"


def test_commands_take_urls(store):
    chain(f"{store}/run", 3)
    get_storage(resolve_checkpoint_path(store)).remove(resolve_checkpoint_path(f"{store}/run/step-1") / MANIFEST)
    for command in (["log"], ["verify"], ["verify", "--no-deep"], ["log", "--json"]):
        result = CliRunner().invoke(app, [*command, f"{store}/run"])
        assert result.exit_code == 0, (command, result.output)
        assert all(name in result.output for name in ("step-1", "step-2", "step-3")), command
        assert "incomplete" in result.output, command
    inspected = CliRunner().invoke(app, ["inspect", "--tensors", f"{store}/run/step-3"])
    assert inspected.exit_code == 0, inspected.output
    assert f"{store}/run/step-3" in inspected.output


def test_verify_finds_an_altered_object(store):
    path = resolve_checkpoint_path(chain(f"{store}/run", 2)[0])
    name = next(name for name in files_in(str(path)) if name.endswith(".dsq"))
    data = get_storage(path).read(path / name, 1 << 30)
    with get_storage(path).create(path / name, fsync=False) as file:
        file.stream.write(data[:-1])
        file.publish()
    result = CliRunner().invoke(app, ["verify", f"{store}/run"])
    assert result.exit_code == 1
    assert "2 of 2 checkpoint(s) damaged" in result.output


@pytest.mark.parametrize("command", ["merge URL out", "compress URL out"])
def test_commands_for_local_directories_say_so(store, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = chain(f"{store}/run", 1)[0]
    result = CliRunner().invoke(app, command.replace("URL", path).split())
    assert result.exit_code == 1
    assert len(result.output.strip().splitlines()) == 1
    assert "local" in result.output
    assert path in result.output


def test_export_reads_a_url(store, tmp_path):
    path = chain(f"{store}/run", 2)[-1]
    result = CliRunner().invoke(app, ["export", path, str(tmp_path / "out.pt")])
    assert result.exit_code == 0, result.output
    assert is_alike(torch.load(tmp_path / "out.pt"), loaded(path))


def test_calls_for_local_directories_say_so(store, tmp_path):
    with pytest.raises(ConfigError, match="expected a directory of the local file system"):
        dsq_ckpt.compress(state_of(1), f"{store}/run/step-1")


def test_a_bucket_that_does_not_exist_is_no_new_run(bucket):
    """A wrong name must not look like a run without checkpoints."""
    calls = [
        lambda: dsq_ckpt.latest(f"{bucket}-mistyped/run"), lambda: loaded(f"{bucket}-mistyped/run/step-1"),
        lambda: dsq_ckpt.save(state_of(1), f"{bucket}-mistyped/run/step-1"),
    ]
    for call in calls:
        with pytest.raises((DSQError, OSError), match=r"-mistyped' does not exist.*check the bucket's name"):
            call()


def test_a_server_that_does_not_answer_is_named(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # the port of "discard", where nothing listens
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises((DSQError, OSError), match=r"does not answer.*AWS_ENDPOINT_URL"):
        dsq_ckpt.save(state_of(1), f"{bucket}-elsewhere/run/step-1")


def test_credentials_that_are_missing_are_named(bucket, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises((DSQError, OSError), match=r"access is denied.*AWS_ACCESS_KEY_ID"):
        dsq_ckpt.latest(f"{bucket}-elsewhere/run")


def test_local_saves_import_nothing_of_object_stores(tmp_path):
    code = (
        "import sys, torch, dsq_ckpt; dsq_ckpt.save({'w': torch.ones(256, 256)}, sys.argv[1])\n"
        "assert not {'s3fs', 'dsq_ckpt.storage.object_store'} & set(sys.modules)"
    )
    status, output = run(["-c", code, str(tmp_path / "step-1")], forked=True)
    assert status == 0, output
