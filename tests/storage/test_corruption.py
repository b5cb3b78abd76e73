"""Damaged, foreign and incomplete checkpoints are refused, never loaded wrong, and harm no other checkpoint."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.storage import files
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.container import FORMAT_VERSION
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.states import DecodedCheckpoints, find_differences, load_copy, mixed_state, perturb, relative_error

SEED = 20240229


def failure(path, like, **options):
    """The error that loading raises, None if it loads; anything but a clear error of ours is raised again."""
    try:
        load_copy(path, like, **options)
    except (dsq_ckpt.CorruptCheckpoint, dsq_ckpt.CheckpointNotFound, dsq_ckpt.UnsupportedFormat) as error:
        return error
    return None


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three checkpoints with small blocks, one of them pinned: all kinds of files and records."""
    root = tmp_path_factory.mktemp("run")
    state = mixed_state()
    config = {"storage": {"block_elements": 1 << 11, "fsync": False}}
    for number in range(3):
        dsq_ckpt.save(state, root / str(number), config=config, pinned=number == 0)
        state = perturb(state, number)
    return root, state


@pytest.fixture
def damaged(run, tmp_path):
    """A copy of the newest checkpoint, and the original values."""
    root, state = run
    shutil.copytree(root / "2", tmp_path / "x")
    assert failure(tmp_path / "x", state) is None
    return tmp_path / "x", state, load_copy(root / "2", state)


def each_file(path):
    return sorted(file for file in path.iterdir())


def test_every_file_is_needed(damaged, monkeypatch):
    monkeypatch.setattr(files, "REMOVAL_TIMEOUT", 0.01)  # nobody is removing it
    path, state, _ = damaged
    assert len(each_file(path)) == 6  # manifest, index, refinement, own file, two ancestors
    for file in each_file(path):
        held = file.read_bytes()
        file.unlink()
        error = failure(path, state)
        assert error is not None and file.name in str(error), (file, error)
        file.write_bytes(held)
    assert failure(path, state) is None


def test_truncated_files(damaged):
    path, state, _ = damaged
    rng = random.Random(SEED)
    for file in each_file(path):
        held = file.read_bytes()
        for size in {0, 1, 7, 8, 16, 39, 40, len(held) - 1, *(rng.randrange(len(held)) for _ in range(6))}:
            file.write_bytes(held[:size])
            error = failure(path, state)
            assert error, (SEED, file.name, size)
            if file.name != "manifest.json":
                assert f"{size} bytes, expected {len(held)}" in str(error), (file.name, size)
        file.write_bytes(held + b"\0")
        if file.name != "manifest.json":
            assert failure(path, state), file.name
        file.write_bytes(held)
    assert failure(path, state) is None


def test_a_damaged_index_is_reported_once(damaged, caplog):
    """By the error that is raised; DCP prints the traceback of one with which it goes on."""
    path, state, _ = damaged
    index = next(path.glob("*.index"))
    os.truncate(index, index.stat().st_size // 2)
    caplog.clear()
    assert index.name in str(failure(path, state))
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.campaign)])
def test_flipped_bits(damaged, count):
    """Whatever bit of whatever file flips, loading raises; nothing is silently different."""
    path, state, values = damaged
    rng = random.Random(SEED)
    missed = []
    for file in each_file(path):
        held = file.read_bytes()
        places = {*range(0, 16, 2), *range(len(held) - 32, len(held), 3)}  # header and trailer
        places |= {rng.randrange(len(held)) for _ in range(count)}
        for place in sorted(place for place in places if place < len(held)):
            bit = 1 << rng.randrange(8)
            file.write_bytes(held[:place] + bytes([held[place] ^ bit]) + held[place + 1 :])
            if failure(path, state) is None:
                assert find_differences(load_copy(path, state), values) == [], (SEED, file.name, place, bit)
                missed.append((file.name, place, bit, held[max(0, place - 10) : place + 10]))
            assert verify_finds(path), (SEED, file.name, place, bit)
        file.write_bytes(held)
    # loading does not look at what ancestors hold besides codes; `verify` does
    ancestors = {file.name for file in Manifest.read(path).files if file.role == "ancestor"}
    assert {name for name, *_ in missed} <= ancestors, (SEED, missed)
    assert failure(path, state) is None and not verify_finds(path)


def verify_finds(path):
    try:
        with Checkpoint(path) as checkpoint:
            return [problem for _, _, problem in checkpoint.verify() if problem]
    except dsq_ckpt.DSQError as error:
        return [error]


def test_swapped_files(damaged):
    """Files of the same format and right checksums inside, in the wrong place."""
    path, state, values = damaged
    files = [file for file in each_file(path) if file.suffix == ".dsq"]
    for a in files:
        for b in files:
            if a != b:
                held = a.read_bytes()
                shutil.copyfile(b, a)
                assert failure(path, state), (a, b)
                a.write_bytes(held)
    assert find_differences(load_copy(path, state), values) == []


def test_foreign_files(damaged):
    path, state, _ = damaged
    rng = random.Random(SEED)
    for file in each_file(path):
        held = file.read_bytes()
        for content in (b"", b"{}", b"[]", b"null", b'{"format": 1}', b"\x80\x04.", b"PK\3\4" + bytes(100),
                        rng.randbytes(len(held)), bytes(len(held))):
            file.write_bytes(content)
            assert failure(path, state), (SEED, file.name, content[:20])
        file.write_bytes(held)


def test_newer_format_version(damaged):
    path, state, _ = damaged
    manifest = path / "manifest.json"
    held = manifest.read_text()
    tree = json.loads(held)
    for version in (FORMAT_VERSION + 1, 10**9):
        manifest.write_text(json.dumps({**tree, "version": version, "unheard_of": {}}))
        error = failure(path, state)
        assert isinstance(error, dsq_ckpt.UnsupportedFormat) and "upgrade" in str(error)
    for version in (0, -1, None, "1", 1.5, True):
        manifest.write_text(json.dumps({**tree, "version": version}))
        assert failure(path, state), version
    manifest.write_text(held)
    for file in path.glob("*.dsq"):
        data = file.read_bytes()
        file.write_bytes(data[:8] + struct.pack("<I", FORMAT_VERSION + 1) + data[12:])
        error = failure(path, state)
        assert isinstance(error, dsq_ckpt.UnsupportedFormat)
        file.write_bytes(data)


def test_manifest_may_not_point_outside(damaged):
    path, state, _ = damaged
    tree = json.loads((path / "manifest.json").read_text())
    for name in ("../2/x.dsq", "/etc/passwd", "", ".", "..", ".hidden", "a\\b"):
        files = [{**tree["files"][0], "name": name}, *tree["files"][1:]]
        (path / "manifest.json").write_text(json.dumps({**tree, "files": files}))
        assert failure(path, state), name


def test_no_pickle_is_read(damaged, monkeypatch):
    """Opening, listing and checking a checkpoint, and reading its tensors, never unpickles."""
    import pickle

    path, state, _ = damaged

    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    target = {"lossy": {fqn: torch.zeros_like(value) for fqn, value in state["lossy"].items()}}
    dsq_ckpt.load(target, path)
    assert not verify_finds(path)
    dsq_ckpt.describe(path)


def test_damage_stays_in_its_checkpoint(run, damaged):
    """The other checkpoints of a run do not notice, though files are shared by hard links until one is replaced."""
    root, state = run
    checkpoints = DecodedCheckpoints(state, *(root / str(number) for number in range(3)))
    path, _, _ = damaged
    for file in each_file(path):
        file.write_bytes(b"damaged")
    checkpoints.check()


def test_damaged_parent_fails_the_save_or_gives_a_keyframe(run, tmp_path):
    root, state = run
    for number in range(3):
        shutil.copytree(root / str(number), tmp_path / "r" / str(number))
    checkpoints = DecodedCheckpoints(state, *(tmp_path / "r" / str(number) for number in range(2)))
    refused: list[str] = []
    keyframes: list[str] = []
    for file in each_file(tmp_path / "r" / "2"):
        held = file.read_bytes()
        place = len(held) // 2 if file.suffix != ".dsq" else len(held) - 60  # in the table of contents
        file.write_bytes(held[:place] + b"XX" + held[place + 2 :])
        try:
            dsq_ckpt.save(  # the codes of its parent must be read from the files
                state, tmp_path / "r" / "next", parent=tmp_path / "r" / "2", overwrite=True,
                history=dsq_ckpt.SaveHistory(),
            )
        except dsq_ckpt.DSQError:
            assert not (tmp_path / "r" / "next" / "manifest.json").exists()
            refused.append(file.name)
        else:  # the damage is where the child does not look, or was found before it did
            if Manifest.read(tmp_path / "r" / "next").depth == 0:
                keyframes.append(file.suffix)
            else:
                assert file.suffix == ".refinement" and Manifest.read(tmp_path / "r" / "next").depth == 3
            assert relative_error(
                state["lossy"]["conv.weight"], load_copy(tmp_path / "r" / "next", state)["lossy"]["conv.weight"]
            ) < 0.015
            shutil.rmtree(tmp_path / "r" / "next")
        file.write_bytes(held)
    assert len(refused) == 2 and keyframes == [".dsq"] * 3, (refused, keyframes)  # manifest and index tell the parent
    checkpoints.check()
    dsq_ckpt.save(state, tmp_path / "r" / "last", parent=tmp_path / "r" / "2", history=dsq_ckpt.SaveHistory())
    assert Manifest.read(tmp_path / "r" / "last").depth == 3
