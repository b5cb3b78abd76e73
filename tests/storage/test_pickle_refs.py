"""Pickled files of another format beside a checkpoint: they decode themselves, and nothing else."""

from __future__ import annotations

import io
import pickletools
import shutil
import warnings
import zipfile

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.errors import CheckpointNotFound, CorruptCheckpoint, DSQError, LoadFailed, UnsupportedFormat
from dsq_ckpt.storage import pickle_refs
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.pickle_refs import FlatRange, TensorPlaceholder
from tests.helpers.commands import find_file, flip_bit

SHAPE = (40, 25)


@pytest.fixture
def tag(tmp_path):
    """A checkpoint, the weight in it, and a file beside it that has parts of it in another order."""
    directory = tmp_path / "tag"
    torch.manual_seed(0)
    weight = torch.randn(SHAPE)
    config = {"quantize": {"min_elements": 1}}
    dsq_ckpt.save({"model": {"weight": weight, "bias": torch.arange(7.0)}}, directory, config=config)
    loaded = {"model": {"weight": torch.empty(SHAPE), "bias": torch.empty(7)}}
    dsq_ckpt.load(loaded, directory)
    pieces = [
        FlatRange("model.weight", 33, 500, 0), FlatRange("model.bias", 2, 4, 500),
        FlatRange("model.weight", 0, 33, 510),
    ]
    rest = [(504, torch.tensor([1.5, -2.5]))]
    save_id = Manifest.read(directory).save_id
    state = {
        "flat": TensorPlaceholder(save_id, torch.float32, (543,), pieces, rest), "step": 3,
        "half": TensorPlaceholder(save_id, torch.bfloat16, SHAPE, [FlatRange("model.weight", 0, 1000, 0)], []),
    }
    torch.save(state, directory / "x_states.pt")
    flat = torch.zeros(543)
    flat[:500], flat[500:504] = loaded["model"]["weight"].view(-1)[33:533], loaded["model"]["bias"][2:6]
    flat[504:506], flat[510:] = torch.tensor([1.5, -2.5]), loaded["model"]["weight"].view(-1)[:33]
    yield directory, flat, loaded["model"]["weight"]
    pickle_refs.close_last_checkpoint()


def load(path, **options):
    return torch.load(path, weights_only=False, **options)


def test_a_file_decodes_itself(tag):
    directory, flat, weight = tag
    state = load(directory / "x_states.pt")
    assert torch.equal(state["flat"], flat) and state["step"] == 3
    assert state["half"].dtype == torch.bfloat16 and torch.equal(state["half"], weight.bfloat16())
    assert torch.equal(load(str(directory / "x_states.pt"), map_location="cpu", mmap=True)["flat"], flat)
    with open(directory / "x_states.pt", "rb") as file:
        assert torch.equal(load(file)["flat"], flat)


def test_it_may_be_moved_with_its_checkpoint(tag, tmp_path):
    directory, flat, _ = tag
    shutil.move(directory, tmp_path / "moved")
    assert torch.equal(load(tmp_path / "moved" / "x_states.pt")["flat"], flat)


def test_the_decoder_is_all_that_it_calls(tag):
    """What a file names is the decoder, and what torch itself needs for tensors."""
    with zipfile.ZipFile(tag[0] / "x_states.pt") as archive:
        data = archive.read("x_states/data.pkl")
    named = {argument for opcode, argument, _ in pickletools.genops(data) if opcode.name == "GLOBAL"}
    assert named <= {"dsq_ckpt decode", "torch._utils _rebuild_tensor_v2", "torch FloatStorage",
                     "collections OrderedDict"}
    assert dsq_ckpt.decode.__module__ == "dsq_ckpt"


def test_weights_only_may_be_told_of_the_decoder(tag):
    with torch.serialization.safe_globals([dsq_ckpt.decode]):
        assert torch.equal(torch.load(tag[0] / "x_states.pt", weights_only=True)["flat"], tag[1])


def test_bytes_without_a_path(tag):
    directory, flat, _ = tag
    data = (directory / "x_states.pt").read_bytes()
    with pytest.raises(LoadFailed, match="not read by its path"):
        load(io.BytesIO(data))
    with pickle_refs.stored_in(directory):
        assert torch.equal(load(io.BytesIO(data))["flat"], flat)


def test_base_layer_alone(tag):
    directory, flat, _ = tag
    with pickle_refs.stored_in(directory, refined=False):
        base = load(directory / "x_states.pt")["flat"]
    weight = {"model": {"weight": torch.empty(SHAPE)}}
    dsq_ckpt.load(weight, directory, refinement=False)
    assert torch.equal(base[:500], weight["model"]["weight"].view(-1)[33:533]) and not torch.equal(base, flat)


def test_a_file_away_from_its_checkpoint(tag, tmp_path):
    shutil.copy(tag[0] / "x_states.pt", tmp_path)
    with pytest.raises(CheckpointNotFound, match=str(tmp_path)):
        load(tmp_path / "x_states.pt")


def test_a_file_of_another_save(tag):
    directory, *_ = tag
    dsq_ckpt.save({"model": {"weight": torch.randn(SHAPE)}}, directory, overwrite=True)
    with pytest.raises(CheckpointNotFound, match="belongs to save"):
        load(directory / "x_states.pt")


def test_an_altered_checkpoint(tag):
    flip_bit(find_file(tag[0]))
    with pytest.raises(CorruptCheckpoint):
        load(tag[0] / "x_states.pt")


@pytest.mark.parametrize("piece", [FlatRange("model.other", 0, 3, 0), FlatRange("model.weight", 998, 3, 0)])
def test_references_to_missing_entries_raise(tag, piece):
    directory = tag[0]
    wrong = TensorPlaceholder(Manifest.read(directory).save_id, torch.float32, (3,), [piece], [])
    torch.save(wrong, directory / "wrong.pt")
    with pytest.raises(CorruptCheckpoint, match=piece.fqn):
        load(directory / "wrong.pt")


def test_a_newer_layout(tag):
    with pytest.raises(UnsupportedFormat, match="layout 2"):
        dsq_ckpt.decode({"version": 2})


def test_copies_in_a_universal_checkpoint_have_no_values(tag, tmp_path):
    """Nobody reads them there; who tries is told so by torch, and gets no zeros."""
    (tmp_path / "universal" / "zero").mkdir(parents=True)
    shutil.copy(tag[0] / "x_states.pt", tmp_path / "universal")
    state = load(tmp_path / "universal" / "x_states.pt")
    assert state["flat"].is_meta and state["flat"].shape == (543,)
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.empty(543).copy_(state["flat"])


def test_errors_are_of_this_package(tag):
    (tag[0] / "manifest.json").unlink()
    with pytest.raises(DSQError, match="did not complete"):
        load(tag[0] / "x_states.pt")


def test_elements_that_are_stored_nowhere_are_zero(tag):
    """Memory that nothing was written to would hold NaN here."""
    directory, flat, _ = tag
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        assert torch.equal(load(directory / "x_states.pt")["flat"], flat)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_base_layer_is_reported_once(tag):
    """Whoever loads the whole checkpoint tells of it; a file that is read by itself does."""
    directory, *_ = tag
    config = {"quantize": {"min_elements": 1}, "refinement": {"keep_last": 1}}
    torch.manual_seed(0)
    dsq_ckpt.save({"model": {"weight": torch.randn(SHAPE), "bias": torch.arange(7.0)}}, directory.parent / "b",
                  config=config)
    assert Manifest.read(directory).refinement == "dropped"
    with pickle_refs.keep_codes(directory, lambda key: False), warnings.catch_warnings():
        warnings.simplefilter("error")
        load(directory / "x_states.pt")
    pickle_refs.close_last_checkpoint()
    with pytest.warns(UserWarning, match="has only its base layer"):
        load(directory / "x_states.pt")
