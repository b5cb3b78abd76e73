"""`compress`: every kind of source, those that cannot be read, runs that notice nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt import CheckpointNotFound, ConfigError, CorruptCheckpoint, DSQConfig, LoadFailed
from dsq_ckpt.cli.inspect_command import list_tensors
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.source_files import plain_state, write_dcp, write_safetensors, write_sharded, write_torch
from tests.helpers.states import (
    find_differences,
    flat_tensors,
    flatten,
    load_copy,
    mixed_state,
    perturb,
    relative_error,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def training_state() -> dict[str, object]:
    g = torch.Generator().manual_seed(1)
    moment = torch.randn(96, 64, generator=g) * 1e-3
    state = {"0": {"exp_avg": moment, "exp_avg_sq": moment.square()}}
    return {"model": plain_state(), "optimizer": {"state": state}, "step": 7, "name": "x", "seen": [1, 2.5]}


def write_dsq(state, path: Path) -> Path:
    dsq_ckpt.save(state, path, config=DSQConfig.preset("exact"))
    return path


def without_index(state, path: Path) -> Path:
    write_sharded(state, path).unlink()
    return path


FLAT = {
    "safetensors": write_safetensors, "index": write_sharded, "shards": without_index,
    "indexed directory": lambda state, path: write_sharded(state, path).parent,
}
NESTED = {
    "torch": write_torch, "dcp": write_dcp, "dsq": write_dsq, "state dict": lambda state, path: state,
    "old torch": lambda state, path: write_torch(state, path, _use_new_zipfile_serialization=False),
}


def check(path: Path, expected: dict[str, object], result: dict[str, object]) -> None:
    """What is lossy is as far off as the manifest says, all else is the same bit for bit."""
    manifest = Manifest.read(path)
    stored = {tensor["name"]: tensor["stored"] for tensor in list_tensors(path)}
    base, names = load_copy(path, expected, refinement=False), flatten(expected).keys()
    assert set(stored) == set(names)
    assert set(find_differences(base, expected)) == {name for name in names if stored[name] != "exact"}
    for group, report in manifest.groups.items():
        both = [(flatten(expected)[name], flatten(base)[name]) for name in names if stored[name] == group]
        a, b = (torch.cat([pair[side].double().flatten() for pair in both]) for side in (0, 1))
        estimated = group.endswith(("/update", "/octaves"))  # from octaves; the first, in units of the second moments
        assert relative_error(a, b) == pytest.approx(report.relative_error, rel=0.5 if estimated else 0.02)
    assert manifest.depth == 0 and manifest.previous is None and manifest.parent is None
    assert result == {**dsq_ckpt.describe(path), "quality": manifest.quality}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", [*FLAT, *NESTED])
def test_sources(tmp_path, form):
    state = plain_state() if form in FLAT else training_state()
    source = {**FLAT, **NESTED}[form](state, tmp_path / "source")
    result = dsq_ckpt.compress(source, tmp_path / "out" / "small")
    check(tmp_path / "out" / "small", state, result)
    assert result["refinement"] == "kept" and result["quality"] is None
    assert result["by_kind"]["weights"]["bytes_base"] < result["by_kind"]["weights"]["bytes_logical"] / 6
    after = load_copy(tmp_path / "out" / "small", state)
    weights = {name: a for name, a in flat_tensors(state).items() if "exp_" not in name}
    assert all(relative_error(a, flatten(after)[name]) < 0.02 for name, a in weights.items())


def test_a_module_and_every_dtype(tmp_path):
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 80), nn.BatchNorm1d(80))
    result = dsq_ckpt.compress(model, tmp_path / "a")
    check(tmp_path / "a", model.state_dict(), result)
    assert set(Manifest.read(tmp_path / "a").groups) == {"weights/embedding", "weights/linear"}
    other = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 80), nn.BatchNorm1d(80))
    state = other.state_dict()
    dsq_ckpt.load(state, tmp_path / "a")
    other.load_state_dict(state)
    assert relative_error(model[1].weight.detach(), other[1].weight.detach()) < 0.02
    mixed = mixed_state()
    dsq_ckpt.compress(mixed, tmp_path / "b")
    assert {name.partition(".")[0] for name in find_differences(mixed, load_copy(tmp_path / "b", mixed))} == {"lossy"}


def test_our_own_checkpoint_as_it_was_loaded(tmp_path):
    """A delta whose refinement is kept is read with it, and its run goes on as if nobody had read it."""
    state = training_state()
    dsq_ckpt.save(state, tmp_path / "run" / "0")
    dsq_ckpt.save(perturb(state, 1), tmp_path / "run" / "1")
    given = load_copy(tmp_path / "run" / "1", state)
    result = dsq_ckpt.compress(tmp_path / "run" / "1", tmp_path / "run" / "exact", config={"system": "exact"})
    assert find_differences(load_copy(tmp_path / "run" / "exact", state), given) == []
    assert result["refinement"] == "none" and result["keyframe"]
    history = dsq_ckpt.SaveHistory()
    load_copy(tmp_path / "run" / "1", state, history=history)
    dsq_ckpt.compress(state, tmp_path / "run" / "snapshot")
    dsq_ckpt.save(perturb(state, 2), tmp_path / "run" / "2", history=history)
    manifest = Manifest.read(tmp_path / "run" / "2")
    assert (manifest.parent_name, manifest.previous_name, manifest.depth) == ("1", "1", 2)
    assert Manifest.read(tmp_path / "run" / "snapshot").refinement == "kept"
    with pytest.raises(dsq_ckpt.CheckpointExists, match="overwrite=True"):
        dsq_ckpt.compress(tmp_path / "nowhere", tmp_path / "run" / "snapshot")
    dsq_ckpt.compress(perturb(state, 3), tmp_path / "run" / "snapshot", overwrite=True)
    future = dsq_ckpt.async_save(perturb(state, 4), tmp_path / "run" / "3")
    dsq_ckpt.compress(perturb(state, 3), tmp_path / "run" / "snapshot", overwrite=True)
    future.result()
    assert Manifest.read(tmp_path / "run" / "3").refinement == "kept"
    assert Manifest.read(tmp_path / "run" / "snapshot").previous is None
    dsq_ckpt.save(perturb(state, 5), tmp_path / "run" / "4")
    assert Manifest.read(tmp_path / "run" / "4").previous_name == "3"


# Errors


class Trap:
    """Unpickling it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_nothing_is_unpickled(tmp_path, options):
    path = write_torch({"w": torch.ones(80, 80), "trap": Trap(tmp_path / "sprung")}, tmp_path / "source", **options)
    with pytest.raises(LoadFailed, match=r"more than plain data \('(posix|nt)\.mkdir'\).*weights_only=False"):
        dsq_ckpt.compress(path, tmp_path / "out")
    dsq_ckpt.save({"w": torch.ones(80, 80), "odd": Trap(tmp_path / "sprung")}, tmp_path / "run" / "a")
    with pytest.raises(LoadFailed, match=r"object 'odd' is more than plain data.*dsq_ckpt\.load"):
        dsq_ckpt.compress(tmp_path / "run" / "a", tmp_path / "out")
    assert not (tmp_path / "sprung").exists() and not (tmp_path / "out").exists()


def broken_sources(where: Path) -> dict[str, tuple[object, type[Exception], str]]:
    """By name: a source, the error it makes, and what that says."""
    state = plain_state()
    (where / "text.pt").write_text("hello")
    (where / "empty.bin").write_bytes(b"")
    torch.save([torch.ones(3)], where / "list.pt")
    torch.save({"step": 3}, where / "numbers.pt")
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), where / "script.pt")
    whole = write_torch(state, where / "whole").read_bytes()
    (where / "cut.pt").write_bytes(whole[: len(whole) // 2])
    whole = write_safetensors(state, where / "whole").read_bytes()
    (where / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (where / "variants").mkdir()
    for name in ("a", "b"):
        write_safetensors(state, where / "variants" / name)
    missing = write_sharded(state, where / "missing")
    (where / "missing" / "model-2.safetensors").unlink()
    escaping = write_sharded(state, where / "escaping")
    escaping.write_text(json.dumps({"weight_map": {"norm.weight": "../whole.safetensors"}}))
    lacking = write_sharded(state, where / "lacking")
    lacking.write_text(json.dumps({"weight_map": {"other": "model-1.safetensors"}}))
    (where / "none.json").write_text("[]")
    (where / "pickles").mkdir()
    torch.save(state, where / "pickles" / "pytorch_model.bin")
    dsq_ckpt.save(state, where / "run" / "first")
    write_dcp(state, where / "dcp")
    (where / "dcp" / "__0_0.distcp").unlink()
    for name in ("cut dcp", "altered dcp", "no metadata"):
        write_dcp(state, where / name)
    os.truncate(where / "cut dcp" / "__0_0.distcp", 5000)
    altered = where / "altered dcp" / "__0_0.distcp"
    altered.write_bytes(bytes(altered.stat().st_size))
    (where / "no metadata" / ".metadata").unlink()
    write_dcp(state, where / "metadata")
    (where / "metadata" / ".metadata").write_bytes(b"no pickle")
    return {
        "no file": (where / "nowhere", CheckpointNotFound, "does not exist; name a .safetensors"),
        "a hub's name": ("hf://gpt2", ConfigError, "download it first"),
        "text": (where / "text.pt", CorruptCheckpoint, "not a torch.save file"),
        "empty": (where / "empty.bin", CorruptCheckpoint, "not a torch.save file"),
        "list": (where / "list.pt", LoadFailed, "holds list, expected a state dict"),
        "numbers": (where / "numbers.pt", ConfigError, r"numbers\.pt' holds no tensors \(its keys: 'step'\)"),
        "script": (where / "script.pt", CorruptCheckpoint, "TorchScript"),
        "cut": (where / "cut.pt", CorruptCheckpoint, "damaged"),
        "cut safetensors": (where / "cut.safetensors", CorruptCheckpoint, "damaged"),
        "variants": (where / "variants", CorruptCheckpoint, r"both in 'a\.safetensors' and in 'b\.safetensors'"),
        "missing shard": (missing, CheckpointNotFound, r"model-2\.safetensors' is missing"),
        "escaping": (escaping, CorruptCheckpoint, "not a safetensors file beside it"),
        "lacking": (lacking, CorruptCheckpoint, "lacks 'other'"),
        "no index": (where / "none.json", CorruptCheckpoint, "no weight_map"),
        "pickles": (where / "pickles", CheckpointNotFound, r"holds pytorch_model\.bin: name the file"),
        "run": (where / "run", CheckpointNotFound, "newest checkpoint in it is 'first'"),
        "dcp": (where / "dcp", CorruptCheckpoint, r"as a plain DCP checkpoint: '__0_0\.distcp' is missing"),
        "cut dcp": (where / "cut dcp", CorruptCheckpoint, r"'__0_0\.distcp' was cut short: it has 5000 of \d+ bytes$"),
        "altered dcp": (where / "altered dcp", CorruptCheckpoint, r"plain DCP checkpoint: '__0_0\.distcp': .{,80}$"),
        "no metadata": (where / "no metadata", CheckpointNotFound, r"has \.distcp files .* but no \.metadata"),
        "metadata": (where / "metadata", CorruptCheckpoint, r"as a plain DCP checkpoint: '\.metadata': "),
        "no tensors": ({"epoch": 3}, ConfigError, r"^the state dict holds no tensors \(its keys: 'epoch'\)"),
        "itself": (where / "out", ConfigError, "is the source too"),
        "meta": (nn.Linear(80, 80, device="meta"), ConfigError, "'weight' is on the meta device"),
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*jit", "ignore::DeprecationWarning")
def test_sources_that_cannot_be_read(tmp_path):
    for name, (source, kind, says) in broken_sources(tmp_path).items():
        with pytest.raises(kind, match=says) as caught:
            dsq_ckpt.compress(source, tmp_path / "out")
        assert caught.type is kind, name
        assert "\n" not in str(caught.value), name
    assert not (tmp_path / "out").exists()


def test_safetensors_is_optional(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    dsq_ckpt.compress(write_torch(plain_state(), tmp_path / "a"), tmp_path / "out")
    (tmp_path / "a.safetensors").touch()
    with pytest.raises(LoadFailed, match="pip install safetensors"):
        dsq_ckpt.compress(tmp_path / "a.safetensors", tmp_path / "out2")
