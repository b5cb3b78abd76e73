"""Errors are raised before the work is done, and slips without a visible effect lead to a warning."""

from __future__ import annotations

import warnings

import pytest
import torch

import dsq_ckpt
from dsq_ckpt import CheckpointExists, ConfigError, LoadFailed, SaveFailed
from dsq_ckpt.core.hints import pattern_hint
from dsq_ckpt.quantization.groups import find_unused_rules
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.commands import dsq_error
from tests.helpers.states import KEEP_ONE, is_equal, load_copy
from tests.helpers.training import Net, compute_loss

pytestmark = [
    pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def watched(model):
    """An evaluation, and how often it was asked for."""
    calls = []

    def evaluate():
        calls.append(1)
        return compute_loss(model)

    return evaluate, calls


# Targets


@pytest.mark.parametrize("background", [False, True])
def test_an_existing_checkpoint_is_noticed_before_the_search(tmp_path, background):
    model = Net()
    evaluate, calls = watched(model)
    compressor = dsq_ckpt.Compressor(model, None, evaluate=evaluate)
    compressor.save(tmp_path / "a")
    calls.clear()
    with pytest.raises(CheckpointExists, match=r"holds a complete checkpoint; .*overwrite=True"):
        compressor.save(tmp_path / "a", background=background)
    assert calls == []
    compressor.save(tmp_path / "b")
    assert calls and Manifest.read(tmp_path / "b").previous_name == "a"
    future = compressor.save(tmp_path / "a", overwrite=True, background=background)
    assert isinstance(future.result() if background else future, dsq_ckpt.SaveResult)


@pytest.mark.parametrize("kind", ["checkpoint", "file"])
def test_compress_looks_at_its_target_first(tmp_path, kind):
    model, out = Net(), tmp_path / "out"
    evaluate, calls = watched(model)
    if kind == "file":
        out.write_text("a file")
    else:
        dsq_ckpt.compress(model, out)
    expected = {"file": (SaveFailed, "is not a directory"), "checkpoint": (CheckpointExists, "overwrite=True")}[kind]
    with pytest.raises(expected[0], match=expected[1]):
        dsq_ckpt.compress(model, out, evaluate=evaluate, max_degradation=0.1)
    with pytest.raises(expected[0], match=expected[1]):
        dsq_ckpt.Compressor(model, evaluate=evaluate).save(out)
    assert calls == []


def test_a_checkpoint_that_appears_meanwhile_fails_in_the_background(tmp_path, monkeypatch):
    def late(*_, **__):
        raise CheckpointExists("another save was faster")

    monkeypatch.setattr("dsq_ckpt.engine.pipeline.commit", late)
    future = dsq_ckpt.async_save({"w": torch.randn(80, 80)}, tmp_path / "a")
    with pytest.raises(CheckpointExists, match="another save was faster"):
        future.result()


# Systems of differences


@pytest.mark.parametrize("system", ["lc", "topn", "scar"])
def test_a_system_of_differences_has_none_in_a_checkpoint_by_itself(tmp_path, system):
    torch.save({"weight": torch.randn(80, 80)}, tmp_path / "in.pt")
    says = f"system '{system}' with delta.against 'values' compresses differences to a parent"
    assert says in dsq_error("compress", tmp_path / "in.pt", tmp_path / "out", "--system", system)
    with pytest.raises(ConfigError, match=says):
        dsq_ckpt.compress(tmp_path / "in.pt", tmp_path / "out", config={"system": system})
    model = Net()
    with pytest.raises(ConfigError, match=says):
        dsq_ckpt.compress(model, tmp_path / "out", config={"system": system}, evaluate=lambda: 1.0, max_degradation=0.1)
    assert not (tmp_path / "out").exists()


# Rules


def rules(*patterns):
    return {"quantize": {"rules": [{"pattern": pattern, "exact": True} for pattern in patterns]}}


def test_a_rule_that_matches_nothing_is_reported_once(tmp_path):
    state = {"layers": [{"router.weight": torch.randn(80, 80)}, {"mlp.weight": torch.randn(80, 80)}]}
    config = rules("*.ruter.*", "*.mlp.*")
    with pytest.warns(UserWarning) as caught:
        dsq_ckpt.save(state, tmp_path / "run" / "0", config=config)
    texts = [str(warning.message) for warning in caught if "rules" in str(warning.message)]
    assert texts == [
        "quantize.rules: the pattern '*.ruter.*' matches no tensor; did you mean a pattern for "
        "'layers.0.router.weight'?"
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dsq_ckpt.save(state, tmp_path / "run" / "1", config=config)
        dsq_ckpt.save(state, tmp_path / "right" / "0", config=rules("*.router.*", "layers.1.*"))
    assert not [warning for warning in caught if "rules" in str(warning.message)]
    back = {"layers": [{"router.weight": torch.zeros(80, 80)}, {"mlp.weight": torch.zeros(80, 80)}]}
    dsq_ckpt.load(back, tmp_path / "run" / "1")
    assert is_equal(back["layers"][1]["mlp.weight"], state["layers"][1]["mlp.weight"])
    assert not is_equal(back["layers"][0]["router.weight"], state["layers"][0]["router.weight"])
    with pytest.warns(UserWarning, match=r"'\*\.ruter\.\*' matches no tensor"):  # another run is told, too
        dsq_ckpt.async_save(state, tmp_path / "other" / "0", config=config).result()


def test_a_rule_for_one_of_two_tied_tensors_matches(tmp_path):
    weight = torch.randn(80, 80)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, save in enumerate((dsq_ckpt.save, lambda *a, **k: dsq_ckpt.async_save(*a, **k).result())):
            save({"a": weight, "b": weight, "n": 3}, tmp_path / f"{number}" / "a", config=rules("a", "b"))
    assert not [warning for warning in caught if "rules" in str(warning.message)]


@pytest.mark.parametrize("background", [False, True])
def test_a_rule_that_matches_nothing_never_stops_a_save(tmp_path, caplog, background):
    """Also where warnings are errors: it is logged then, and what comes after the manifest is done."""
    state, path = {"w": torch.randn(80, 80)}, tmp_path / "run"
    config = {**rules("nowhere.*"), **KEEP_ONE}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        for step in range(2):
            if background:
                dsq_ckpt.async_save(state, path / str(step), config=config).result()
            else:
                dsq_ckpt.save(state, path / str(step), config=config)
    assert sum("'nowhere.*' matches no tensor" in text for text in caplog.messages) == 1
    assert Manifest.read(path / "1").previous_name == "0" and Manifest.read(path / "0").refinement == "dropped"


@pytest.mark.parametrize("errors", [False, True])
def test_a_refinement_that_cannot_be_dropped_never_fails_a_save(tmp_path, monkeypatch, caplog, errors):
    """The checkpoint is complete by then: it is said, and where warnings are errors, logged."""
    def stuck(*_, **__):
        raise OSError("read-only")

    monkeypatch.setattr("dsq_ckpt.engine.retention.drop_refinements", stuck)
    with warnings.catch_warnings(record=not errors) as caught:
        warnings.simplefilter("error" if errors else "always")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dsq_ckpt.save({"w": torch.randn(80, 80)}, tmp_path / "0")
    said = caplog.messages if errors else [str(warning.message) for warning in caught or ()]
    assert sum("were not dropped: read-only" in text for text in said) == 1
    assert Manifest.read(tmp_path / "0").refinement == "kept"


def test_a_save_that_fails_says_nothing_of_its_rules(tmp_path, monkeypatch):
    """It would not be said again when the save succeeds."""
    state, config = {"w": torch.randn(80, 80)}, rules("nowhere.*")

    def full(*_, **__):
        raise OSError("no space")

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr("dsq_ckpt.engine.commit.write_index", full)
        with pytest.raises(SaveFailed, match="no space"):
            dsq_ckpt.save(state, tmp_path / "run" / "0", config=config)
    assert not [warning for warning in caught if "rules" in str(warning.message)]
    with pytest.warns(UserWarning, match=r"'nowhere\.\*' matches no tensor"):
        dsq_ckpt.save(state, tmp_path / "run" / "0", config=config)


@pytest.mark.parametrize("pattern, says", [
    ("*.atention.*", "did you mean a pattern for 'model.h.0.attention.weight'?"),
    ("attention.weight", "did you mean a pattern for 'model.h.0.attention.weight'?"),  # a part of the name alone
    ("model.h.?.atention.weight", "did you mean a pattern for 'model.h.0.attention.weight'"),
    ("nothing like it", "names here are such as 'model.embed.weight', 'model.h.0.attention.weight'"),
])
def test_close_names(pattern, says):
    names = ["model.h.1.attention.weight", "model.h.0.attention.weight", "model.embed.weight"]
    assert says in pattern_hint(pattern, names)
    assert pattern_hint(pattern, []) == "; there are no tensors"


def test_rules_that_match_nothing_are_found():
    config = dsq_ckpt.DSQConfig.create(rules("a.*", "b", "*"))
    assert find_unused_rules(config.quantize.rules, ["b", "a"]) == {"a.*": None}


def test_a_rule_behind_one_that_takes_all_its_tensors_is_reported(tmp_path):
    """It would be lossy without a word."""
    state = {"router.weight": torch.randn(80, 80), "mlp.weight": torch.randn(80, 80)}
    config = rules("*", "*router*")
    config["quantize"]["rules"][0] = {"pattern": "*", "group": "late"}
    with pytest.warns(UserWarning, match=r"'\*router\*' matches no tensor that no earlier .*'\*'; .*move it up"):
        dsq_ckpt.save(state, tmp_path / "a" / "0", config=config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        # Hidden by one that stores it the same way, or for some tensors alone.
        dsq_ckpt.save(state, tmp_path / "b" / "0", config=rules("*", "*router*"))
        dsq_ckpt.save(state, tmp_path / "c" / "0", config={"quantize": {"rules": [
            {"pattern": "mlp.*", "group": "late"}, {"pattern": "*", "exact": True}]}})
    assert is_equal(state["router.weight"], load_copy(tmp_path / "c" / "0", state)["router.weight"])


def test_settings_of_a_group_without_tensors_are_reported_once(tmp_path):
    """By its name alone, `tokens` is a linear layer."""
    state = {"tokens.weight": torch.randn(80, 80)}
    config = {"quantize": {"groups": {"embedding": {"method": "exact"}}}}
    with pytest.warns(UserWarning, match=r"quantize\.groups: no tensor belongs to 'embedding', so"):
        dsq_ckpt.save(state, tmp_path / "a" / "0", config=config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dsq_ckpt.save(state, tmp_path / "a" / "1", config=config)
        for name in ("b", "c"):  # its settings are looked at, also if the tensor turns out to be exact
            state = {"embed.weight": torch.randn(80, 80) if name == "b" else torch.randn(4, 4)}
            dsq_ckpt.save(state, tmp_path / name / "0", config=config)


def test_a_guard_that_matches_nothing_is_an_error(tmp_path):
    state = {"router.weight": torch.randn(80, 80), "n": 3}
    dsq_ckpt.save(state, tmp_path / "a", config=rules("*router*"))
    with pytest.raises(LoadFailed, match=r"exact: the pattern '\*ruter\*' matches no tensor; .*'router.weight'"):
        dsq_ckpt.load(state, tmp_path / "a", exact=["*ruter*"])
    dsq_ckpt.load({"n": 0}, tmp_path / "a", exact=["*router*"])  # of the checkpoint, of which a part is loaded
    dsq_ckpt.load(state, tmp_path / "a", exact="*router*")  # one pattern, not its letters
    with pytest.raises(LoadFailed, match="the pattern 'outer' matches no tensor"):
        dsq_ckpt.load(state, tmp_path / "a", exact="outer")
