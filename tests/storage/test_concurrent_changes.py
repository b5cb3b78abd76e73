"""A load of a checkpoint that is being removed does not call it damaged; one that lacks a file for good does."""

from __future__ import annotations

import shutil

import pytest
import torch

import dsq_ckpt
from dsq_ckpt import CheckpointNotFound, CorruptCheckpoint, LoadFailed, SaveHistory
from dsq_ckpt.storage import concurrent_changes, files
from tests.helpers.commands import flip_bit

pytestmark = [
    pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture
def path(tmp_path):
    dsq_ckpt.save({"w": torch.randn(200, 200), "b": torch.randn(200)}, tmp_path / "a")
    return tmp_path / "a"


def load(path):
    dsq_ckpt.load({"w": torch.zeros(200, 200)}, path, history=SaveHistory())


@pytest.mark.parametrize("suffix, kind, says", [
    ("index", CheckpointNotFound, "does not exist"), ("dsq", LoadFailed, "was overwritten or removed while it was"),
])
def test_a_removal_in_progress_is_no_damage(path, monkeypatch, suffix, kind, says):
    """The manifest is removed after a file that the load needs, as soon as the load has seen that."""
    monkeypatch.setattr(files, "REMOVAL_TIMEOUT", 600)
    find, missing = concurrent_changes.find_missing_files, []

    def find_and_remove(*arguments, **options):
        missing.append(find(*arguments, **options))
        shutil.rmtree(path, ignore_errors=True)
        return missing[-1]

    monkeypatch.setattr(concurrent_changes, "find_missing_files", find_and_remove)
    next(path.glob(f"*.{suffix}")).unlink()
    with pytest.raises(kind, match=says):
        load(path)
    assert missing[0] and missing[0][0].endswith(suffix)


@pytest.mark.parametrize("suffix", ["index", "dsq"])
def test_a_missing_file_is_damage_after_one_wait(path, monkeypatch, suffix):
    monkeypatch.setattr(files, "REMOVAL_TIMEOUT", 0.01)
    read, deadlines = files.read_current_checksum, []

    def read_and_record(*arguments):
        deadlines.extend(arguments[2:])
        return read(*arguments)

    monkeypatch.setattr(files, "read_current_checksum", read_and_record)
    next(path.glob(f"*.{suffix}")).unlink()
    with pytest.raises(CorruptCheckpoint, match=r"although the manifest names it; restore the file"):
        load(path)
    assert len(set(deadlines)) == 1


def test_a_load_does_not_wait_at_other_damage(path, monkeypatch):
    monkeypatch.setattr(files, "REMOVAL_TIMEOUT", 600)
    next(path.glob("*.refinement")).unlink()  # not read
    flip_bit(next(path.glob("*.dsq")))
    with pytest.raises(CorruptCheckpoint):
        dsq_ckpt.load({"w": torch.zeros(200, 200)}, path, refinement=False)
