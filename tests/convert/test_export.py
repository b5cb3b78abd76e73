"""Exports hold what `dsq_ckpt.load` gives, bit for bit, and are read by tools that know nothing of `dsq_ckpt`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import dsq_ckpt
from dsq_ckpt.convert.export import ExportError, export_dcp, export_safetensors, export_torch
from dsq_ckpt.errors import CheckpointExists, CheckpointNotFound, CorruptCheckpoint
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.processes import torchrun
from tests.helpers.small_run import NAMES, small_run
from tests.helpers.states import (
    find_differences,
    flat_tensors,
    flatten,
    is_equal,
    load_copy,
    make_blank,
    mixed_state,
    perturb,
)

EXPORTS = {"dcp": export_dcp, "torch": export_torch, "safetensors": export_safetensors}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Opaque:
    """An object that is not plain data."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.value == self.value


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    return run, small_run(run)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A delta of a state with every dtype; its path and what it loads to."""
    path = tmp_path_factory.mktemp("mixed")
    state = mixed_state()
    dsq_ckpt.save(state, path / "first")
    dsq_ckpt.save(perturb(state, 1), path / "second")
    return path / "second", load_copy(path / "second", state)


def hidden(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".")]


@pytest.mark.parametrize("name", NAMES)
def test_dcp_loads_plainly(trained, tmp_path, name):
    run, state = trained
    done = export_dcp(run / name, tmp_path / "plain")
    target = make_blank(state)
    dcp.load(target, checkpoint_id=tmp_path / "plain", no_dist=True)
    assert find_differences(target, load_copy(run / name, state)) == []
    assert done.tensors == len(flat_tensors(state))
    assert done.refined == (name == NAMES[-1])
    assert done.bytes == sum(tensor.nbytes for tensor in flat_tensors(state).values())
    assert hidden(tmp_path) == []


def test_dcp_of_every_dtype(mixed, tmp_path):
    path, expected = mixed
    export_dcp(path, tmp_path / "plain")
    target = make_blank(expected)
    dcp.load(target, checkpoint_id=tmp_path / "plain", no_dist=True)
    assert find_differences(target, expected) == []


def test_dcp_export_can_be_converted_by_torch(trained, tmp_path):
    run, state = trained
    export_dcp(run / NAMES[-1], tmp_path / "plain")
    dcp_to_torch_save(tmp_path / "plain", tmp_path / "plain.pt")
    exported = torch.load(tmp_path / "plain.pt")
    assert find_differences(exported, load_copy(run / NAMES[-1], state)) == []


def test_torch_has_the_nested_state_dict(trained, tmp_path):
    run, state = trained
    export_torch(run / NAMES[-1], tmp_path / "state.pt")
    exported = torch.load(tmp_path / "state.pt")
    expected = load_copy(run / NAMES[-1], state)
    assert find_differences(exported, expected) == []
    assert list(exported) == list(expected)
    assert isinstance(exported["extra"]["seen"], list)
    assert list(exported["model"]) == list(expected["model"])
    assert exported["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert hidden(tmp_path) == []


def test_torch_of_every_dtype(mixed, tmp_path):
    path, expected = mixed
    export_torch(path, tmp_path / "state.pt")
    assert find_differences(torch.load(tmp_path / "state.pt"), expected) == []


@pytest.mark.parametrize("refinement", ["auto", True, False])
def test_safetensors(trained, tmp_path, refinement):
    run, state = trained
    done = export_safetensors(run / NAMES[-1], tmp_path / "flat.safetensors", refinement=refinement)
    tensors = load_file(tmp_path / "flat.safetensors")
    expected = load_copy(run / NAMES[-1], state, refinement=refinement)
    assert find_differences(tensors, flat_tensors(expected)) == []
    assert done.left_out == sorted(set(flatten(expected)) - set(flat_tensors(expected)))
    with safe_open(tmp_path / "flat.safetensors", "pt") as file:
        assert json.loads(file.metadata()["left_out"]) == done.left_out
    assert hidden(tmp_path) == []


def test_safetensors_of_every_dtype(mixed, tmp_path):
    path, expected = mixed
    export_safetensors(path, tmp_path / "flat.safetensors")
    tensors = load_file(tmp_path / "flat.safetensors")
    assert tensors.keys() == flat_tensors(expected).keys()
    for fqn, tensor in flat_tensors(expected).items():
        assert is_equal(tensors[fqn], tensor), fqn


def test_safetensors_without_a_name_for_the_dtype(tmp_path):
    dsq_ckpt.save({"odd": torch.ones(3, dtype=torch.complex128)}, tmp_path / "checkpoint")
    with pytest.raises(ExportError, match=r"'odd' is complex128"):
        export_safetensors(tmp_path / "checkpoint", tmp_path / "flat.safetensors")
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.slow
def test_shards_of_two_ranks_become_whole_tensors(tmp_path):
    torchrun("fsdp", 2, tmp_path / "run", "save")
    newest = dsq_ckpt.latest(tmp_path / "run")
    assert Manifest.read(Path(newest)).ranks == 2
    export_torch(newest, tmp_path / "state.pt")
    exported = torch.load(tmp_path / "state.pt")
    assert find_differences(exported, load_copy(newest, exported)) == []
    export_dcp(newest, tmp_path / "plain")
    plain = make_blank(exported)
    dcp.load(plain, checkpoint_id=tmp_path / "plain", no_dist=True)
    assert find_differences(plain, exported) == []
    export_safetensors(newest, tmp_path / "flat.safetensors")
    assert find_differences(load_file(tmp_path / "flat.safetensors"), flat_tensors(exported)) == []


@pytest.mark.parametrize("form", EXPORTS)
def test_a_tensor_with_a_hole(tmp_path, monkeypatch, form):
    dsq_ckpt.save({"weight": torch.randn(40, 32)}, tmp_path / "checkpoint")
    original = Checkpoint._read_index

    def torn(self):
        index = original(self)
        index["tensors"]["weight"]["chunks"].clear()
        return index

    monkeypatch.setattr(Checkpoint, "_read_index", torn)
    with pytest.raises(CorruptCheckpoint, match="'weight': chunks hold 0 of 1280 elements"):
        EXPORTS[form](tmp_path / "checkpoint", tmp_path / "target")
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_nothing_is_unpickled_unasked(tmp_path):
    dsq_ckpt.save({"weight": torch.ones(3), "opaque": Opaque(7)}, tmp_path / "checkpoint")
    with pytest.raises(ExportError, match=r"object 'opaque' .*pass allow_pickle=True;"):
        export_torch(tmp_path / "checkpoint", tmp_path / "state.pt")
    assert os.listdir(tmp_path) == ["checkpoint"]
    export_torch(tmp_path / "checkpoint", tmp_path / "state.pt", allow_pickle=True)
    assert torch.load(tmp_path / "state.pt", weights_only=False)["opaque"] == Opaque(7)


def test_dcp_passes_objects_on_unread(tmp_path, monkeypatch):
    dsq_ckpt.save({"weight": torch.ones(3), "opaque": Opaque(7)}, tmp_path / "checkpoint")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("an object was unpickled"))
        export_dcp(tmp_path / "checkpoint", tmp_path / "plain")
    target = {"weight": torch.zeros(3), "opaque": None}
    dcp.load(target, checkpoint_id=tmp_path / "plain", no_dist=True)
    assert target["opaque"] == Opaque(7)


def test_a_missing_class_is_named(tmp_path, monkeypatch):
    dsq_ckpt.save({"opaque": Opaque(7)}, tmp_path / "checkpoint")
    monkeypatch.delattr(f"{__name__}.Opaque")
    with pytest.raises(ExportError, match=r"object 'opaque' needs code that is not here: .*Opaque"):
        export_torch(tmp_path / "checkpoint", tmp_path / "state.pt", allow_pickle=True)


@pytest.mark.parametrize("form", EXPORTS)
def test_targets_are_not_overwritten_unasked(trained, tmp_path, form):
    run, _ = trained
    target = tmp_path / "target"
    EXPORTS[form](run / NAMES[0], target)
    with pytest.raises(CheckpointExists, match=r"exists; .*overwrite it \(overwrite=True\)$"):
        EXPORTS[form](run / NAMES[-1], target)
    done = EXPORTS[form](run / NAMES[-1], target, overwrite=True)
    assert done.refined
    assert os.listdir(tmp_path) == ["target"]


def test_overwriting_a_directory_loses_only_a_dcp_checkpoint(trained, tmp_path):
    run, _ = trained
    export_dcp(run / NAMES[0], tmp_path / "plain")
    (tmp_path / "plain" / "notes.txt").write_text("keep me")
    for target in (tmp_path / "plain", tmp_path):
        with pytest.raises(ExportError, match="is not a plain DCP checkpoint"):
            export_dcp(run / NAMES[-1], target, overwrite=True)
    assert (tmp_path / "plain" / "notes.txt").read_text() == "keep me"


@pytest.mark.parametrize("form", EXPORTS)
def test_failures_leave_nothing(trained, tmp_path, form):
    run, _ = trained
    with pytest.raises(CheckpointNotFound, match="no refinement layer"):
        EXPORTS[form](run / NAMES[0], tmp_path / "target", refinement=True)
    with pytest.raises(CheckpointNotFound):
        EXPORTS[form](tmp_path / "nowhere", tmp_path / "target")

    class Stop(Exception):
        pass

    def stop(_: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        EXPORTS[form](run / NAMES[-1], tmp_path / "target", progress=stop)
    (tmp_path / "old").write_text("old")
    with pytest.raises((Stop, ExportError)):
        EXPORTS[form](run / NAMES[-1], tmp_path / "old", progress=stop, overwrite=True)
    assert os.listdir(tmp_path) == ["old"]
    assert (tmp_path / "old").read_text() == "old"


@pytest.mark.parametrize("form", EXPORTS)
def test_progress_counts_every_byte(trained, tmp_path, form):
    run, state = trained
    counted: list[int] = []
    EXPORTS[form](run / NAMES[-1], tmp_path / "target", progress=counted.append)
    assert sorted(counted) == sorted(tensor.nbytes for tensor in flat_tensors(state).values())
