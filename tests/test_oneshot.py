"""`compress`: every kind of source, errors as reported, bounds as others measure them, runs that notice nothing."""

from __future__ import annotations

import functools
import json
import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import dsq_ckpt
from dsq_ckpt import CheckpointNotFound, ConfigError, CorruptCheckpoint, DSQConfig, LoadFailed, SaveFailed
from dsq_ckpt.cli.inspection import tensor_list
from dsq_ckpt.manifest import Manifest
from dsq_ckpt.oneshot import _bounded
from tests.states import differences, flat, loaded, mixed_state, moved, relative_error, tensors

pytestmark = pytest.mark.usefixtures("one_thread")


def plain_state() -> dict[str, torch.Tensor]:
    """A flat state dict as a hub has it."""
    g = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (128, 48), "layers.0.weight": (96, 64), "layers.1.weight": (64, 80), "norm.weight": (96,)}
    state = {name: torch.randn(shape, generator=g) * 0.02 for name, shape in shapes.items()}
    state["layers.1.weight"] = state["layers.1.weight"].bfloat16()
    return state | {"steps": torch.tensor(7)}


def training_state() -> dict[str, object]:
    g = torch.Generator().manual_seed(1)
    moment = torch.randn(96, 64, generator=g) * 1e-3
    state = {"0": {"exp_avg": moment, "exp_avg_sq": moment.square()}}
    return {"model": plain_state(), "optimizer": {"state": state}, "step": 7, "name": "x", "seen": [1, 2.5]}


def write_sharded(state, directory: Path) -> Path:
    directory.mkdir()
    names = sorted(state)
    files = {"model-1.safetensors": names[:2], "model-2.safetensors": names[2:]}
    for file, part in files.items():
        save_file({name: state[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def write_safetensors(state, path: Path) -> Path:
    save_file(state, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def write_torch(state, path: Path, **options) -> Path:
    torch.save(state, path.with_suffix(".pt"), **options)
    return path.with_suffix(".pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def write_dcp(state, path: Path) -> Path:
    dcp.save(dict(state), checkpoint_id=path, no_dist=True)
    return path


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
    stored = {tensor["name"]: tensor["stored"] for tensor in tensor_list(path)}
    base, names = loaded(path, expected, refinement=False), flat(expected).keys()
    assert set(stored) == set(names)
    assert set(differences(base, expected)) == {name for name in names if stored[name] != "exact"}
    for group, report in manifest.groups.items():
        both = [(flat(expected)[name], flat(base)[name]) for name in names if stored[name] == group]
        a, b = (torch.cat([pair[side].double().flatten() for pair in both]) for side in (0, 1))
        assert relative_error(a, b) == pytest.approx(report.relative_error, rel=0.02)
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
    after = loaded(tmp_path / "out" / "small", state)
    assert all(relative_error(a, flat(after)[name]) < 0.02 for name, a in tensors(state).items() if "exp_" not in name)


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
    assert {name.partition(".")[0] for name in differences(mixed, loaded(tmp_path / "b", mixed))} == {"lossy"}


def test_our_own_checkpoint_as_it_was_loaded(tmp_path):
    """A delta whose refinement is kept is read with it, and its run goes on as if nobody had read it."""
    state = training_state()
    dsq_ckpt.save(state, tmp_path / "run" / "0")
    dsq_ckpt.save(moved(state, 1), tmp_path / "run" / "1")
    given = loaded(tmp_path / "run" / "1", state)
    dsq_ckpt.forget()
    result = dsq_ckpt.compress(tmp_path / "run" / "1", tmp_path / "run" / "exact", config={"system": "exact"})
    assert differences(loaded(tmp_path / "run" / "exact", state), given) == []
    assert result["refinement"] == "none" and result["keyframe"]
    dsq_ckpt.forget()
    loaded(tmp_path / "run" / "1", state)
    dsq_ckpt.compress(state, tmp_path / "run" / "snapshot")
    dsq_ckpt.save(moved(state, 2), tmp_path / "run" / "2")
    manifest = Manifest.read(tmp_path / "run" / "2")
    assert (manifest.parent_name, manifest.previous_name, manifest.depth) == ("1", "1", 2)
    assert Manifest.read(tmp_path / "run" / "snapshot").refinement == "kept"
    with pytest.raises(dsq_ckpt.CheckpointExists, match="overwrite=True"):
        dsq_ckpt.compress(tmp_path / "nowhere", tmp_path / "run" / "snapshot")
    dsq_ckpt.compress(moved(state, 3), tmp_path / "run" / "snapshot", overwrite=True)
    future = dsq_ckpt.async_save(moved(state, 4), tmp_path / "run" / "3")
    dsq_ckpt.compress(moved(state, 3), tmp_path / "run" / "snapshot", overwrite=True)
    future.result()
    assert Manifest.read(tmp_path / "run" / "3").refinement == "kept"
    assert Manifest.read(tmp_path / "run" / "snapshot").previous is None
    dsq_ckpt.save(moved(state, 5), tmp_path / "run" / "4")
    assert Manifest.read(tmp_path / "run" / "4").previous_name == "3"


# A bound


class Net(nn.Module):
    """A regression of noise: its loss stays well above zero, so that a relative bound means something."""

    def __init__(self, seed: int = 0, tied: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first = nn.Linear(64, 64, bias=False)
            self.hidden = nn.Linear(64, 64)
            self.last = nn.Linear(64, 64, bias=False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.hidden(torch.relu(self.first(x)))))

    def loss(self) -> float:
        with torch.no_grad():
            return float(nn.functional.mse_loss(self(*data()[:1]), data()[1]))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(256, 64, generator=g), torch.randn(256, 64, generator=g)


@functools.cache
def trained_weights(tied: bool) -> dict[str, torch.Tensor]:
    model = Net(tied=tied)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        nn.functional.mse_loss(model(data()[0]), data()[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def trained(tied: bool = False) -> Net:
    model = Net(seed=1, tied=tied)
    model.load_state_dict(trained_weights(tied))
    return model


def measured(path: Path, exact: Net, *prefix: str, **options) -> float:
    """Degradation by a checkpoint, told by a model that knows nothing of the search."""
    other = Net(seed=9)
    state = inner = {}
    for name in prefix:
        inner[name] = {}
        inner = inner[name]
    inner.update(other.state_dict())
    dsq_ckpt.load(state, path, **options)
    other.load_state_dict(inner)
    return other.loss() / exact.loss() - 1


def test_a_bound_is_kept(tmp_path):
    model = trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sizes = []
    for bound in (0.01, 0.1):
        path = tmp_path / str(bound)
        result = dsq_ckpt.compress(model, path, evaluate=model.loss, max_degradation=bound)
        quality = result["quality"]
        assert quality["satisfied"] and quality["bound"] == "relative" and quality["chosen"]
        assert 0 < measured(path, model) <= bound
        assert measured(path, model) == pytest.approx(quality["degradation"], abs=1e-6)
        assert result["refinement"] == "none"
        sizes.append(result["by_kind"]["weights"]["bytes_base"])
    assert sizes[1] < sizes[0]
    assert differences(model.state_dict(), before) == []


@pytest.mark.parametrize("form", ["safetensors", "torch", "state dict", "tied"])
def test_a_bound_with_a_model_beside_the_source(tmp_path, form):
    exact = trained(tied=form == "tied")
    weights = dict(exact.state_dict())
    if form == "tied":
        del weights["last.weight"]  # as safetensors files leave out what is there under another name
    source, prefix = weights, []
    if form in ("safetensors", "tied"):
        source = write_safetensors(weights, tmp_path / "source")
    elif form == "torch":
        source, prefix = write_torch({"epoch": 3, "nets": {"best": weights}}, tmp_path / "source"), ["nets", "best"]
    model = Net(seed=5, tied=form == "tied")
    result = dsq_ckpt.compress(source, tmp_path / "a", evaluate=model.loss, max_degradation=0.05, model=model)
    assert differences(dict(model.state_dict()), dict(exact.state_dict())) == []
    if form == "tied":
        assert set(loaded(tmp_path / "a", weights)) == set(weights)
        assert result["quality"]["satisfied"]
    else:
        assert measured(tmp_path / "a", exact, *prefix) == pytest.approx(result["quality"]["degradation"], abs=1e-6)
        assert measured(tmp_path / "a", exact, *prefix) <= 0.05


def test_a_bound_that_nothing_keeps_means_exact(tmp_path):
    model = trained()
    exact = {name: value.clone() for name, value in model.state_dict().items()}

    def evaluate():
        return 1.0 + bool(differences(dict(model.state_dict()), exact))

    with pytest.warns(UserWarning, match="stored exactly"):
        dsq_ckpt.compress(model, tmp_path / "a", evaluate=evaluate, max_degradation=0.01)
    assert differences(loaded(tmp_path / "a", exact), exact) == []
    gentlest = {"search": {"otherwise": "gentlest"}}
    with pytest.warns(UserWarning, match="gentlest"):
        dsq_ckpt.compress(model, tmp_path / "b", config=gentlest, evaluate=evaluate, max_degradation=0.01)
    assert differences(loaded(tmp_path / "b", exact), exact) != []


def test_evaluate_alone_searches_as_configured(tmp_path):
    model = trained()
    config = {"search": {"epsilon": 0.2}, "system": "uniform", "storage": {"fsync": False}}
    result = dsq_ckpt.compress(model, tmp_path / "a", config=config, evaluate=model.loss)
    assert result["quality"]["bound"] == "progress" and result["quality"]["system"] == "uniform"
    assert 0.01 < measured(tmp_path / "a", model, refinement=False) <= 0.2


def test_what_a_configuration_says_goes_over_the_bound(tmp_path):
    def bits(config):
        quantize = _bounded(config, 0.02).quantize
        return [getattr(quantize, kind).refinement_bits for kind in ("weights", "exp_avg", "exp_avg_sq", "momentum")]

    (tmp_path / "c.yaml").write_text("quantize: {weights: {refinement_bits: 4}}")
    step = DSQConfig().with_values(**{"quantize.weights.codebook.step": 1.0})
    assert bits(None) == bits({"system": "uniform"}) == bits(step) == bits(DSQConfig()) == [0, 0, 0, 0]
    assert bits(tmp_path / "c.yaml") == [4, 0, 0, 0]
    assert bits({"quantize": {"exp_avg": {"refinement_bits": 2}}}) == [0, 2, 0, 0]
    assert bits(DSQConfig().with_values(**{"quantize.weights.refinement_bits": 6})) == [6, 0, 0, 0]
    bound = _bounded(step, 0.02)
    assert bound.quantize.weights.codebook.step == 1.0 and bound.quantize.exp_avg == DSQConfig().quantize.exp_avg \
        .model_copy(update={"refinement_bits": 0})
    assert (bound.search.epsilon, bound.search.bound, bound.search.otherwise) == (0.02, "relative", "exact")
    groups = DSQConfig.create({"quantize": {"groups": {"embedding": {"codebook": {"step": 0.3}}}}})
    for config in (groups, {"quantize": {"groups": {"embedding": {"codebook": {"step": 0.3}}}}}):
        group = _bounded(config, 0.02).quantize.groups["embedding"]
        assert (group.codebook.step, group.refinement_bits) == (0.3, 0)
    preset = _bounded(DSQConfig.preset("moments_exact"), 0.02)
    assert preset.quantize.exp_avg.method == "exact" and preset.quantize.weights.method == "quantize"
    with pytest.raises(ConfigError, match=r"c\.yaml: 1 problem"):
        (tmp_path / "c.yaml").write_text("quantise: {}")
        _bounded(tmp_path / "c.yaml", 0.02)


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
    write_dcp(state, where / "metadata")
    (where / "metadata" / ".metadata").write_bytes(b"no pickle")
    return {
        "no file": (where / "nowhere", CheckpointNotFound, "does not exist; name a .safetensors"),
        "a hub's name": ("hf://gpt2", ConfigError, "download it first"),
        "text": (where / "text.pt", CorruptCheckpoint, "not a torch.save file"),
        "empty": (where / "empty.bin", CorruptCheckpoint, "not a torch.save file"),
        "list": (where / "list.pt", LoadFailed, "holds list, expected a state dict"),
        "numbers": (where / "numbers.pt", ConfigError, "holds no tensors"),
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
        "dcp": (where / "dcp", CorruptCheckpoint, "cannot be read as a plain DCP checkpoint"),
        "metadata": (where / "metadata", CorruptCheckpoint, "cannot be read as a plain DCP checkpoint"),
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


def test_arguments_that_contradict_each_other(tmp_path):
    model, state, out = Net(), plain_state(), tmp_path / "out"
    with pytest.raises(ConfigError, match="max_degradation needs evaluate"):
        dsq_ckpt.compress(model, out, max_degradation=0.1)
    with pytest.raises(ConfigError, match="evaluate needs model"):
        dsq_ckpt.compress(state, out, evaluate=model.loss, max_degradation=0.1)
    with pytest.raises(ConfigError, match="leave model out"):
        dsq_ckpt.compress(model, out, evaluate=model.loss, model=Net())
    for bound in (0, -1, math.nan, 10):
        with pytest.raises(ConfigError, match=r"max_degradation is .*preset 'exact'"):
            dsq_ckpt.compress(model, out, evaluate=model.loss, max_degradation=bound)


def test_models_that_do_not_match(tmp_path):
    model, out = Net(), tmp_path / "out"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    own = {name: value + 1 for name, value in before.items()}
    for source, says in (
        (plain_state(), r"none of the model's keys \('first\.weight', .* and 1 more\); it has 'embed\.weight'"),
        ({"epoch": 1, "net": own | {"extra": torch.ones(3)}}, r"entry 'net' .*missing are none; not .* are 'extra'"),
        ({name: own[name] for name in list(own)[1:]}, r"the source has other keys .*missing are 'first\.weight'"),
        ({"net": own | {"first.weight": torch.ones(3)}}, r"'net\.first\.weight' of the source is float32 \(3,\), but"),
        (own | {"last.weight": own["last.weight"].half()}, r"float16 \(64, 64\), but float32 .*model\.to"),
    ):
        with pytest.raises(ConfigError, match=says):
            dsq_ckpt.compress(source, out, evaluate=model.loss, model=model)
    assert differences(dict(model.state_dict()), before) == [] and not out.exists()


@pytest.mark.parametrize("bad", ["raises", "raises later", "nan"])
def test_an_evaluation_that_fails(tmp_path, bad):
    model = trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def evaluate():
        if bad == "nan":
            return math.nan
        if bad == "raises" or differences(dict(model.state_dict()), before):
            raise RuntimeError("no data")
        return 1.0

    says = "gave nan for the model as it is" if bad == "nan" else "`evaluate` raised RuntimeError: no data"
    with pytest.warns(UserWarning), pytest.raises(SaveFailed, match=says):
        dsq_ckpt.compress(model, tmp_path / "out", evaluate=evaluate, max_degradation=0.1)
    assert differences(dict(model.state_dict()), before) == []
    assert not (tmp_path / "out" / "manifest.json").exists()
