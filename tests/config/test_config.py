"""Configurations: every offending key named at once, presets that load, files in both formats."""

import json
import re
import subprocess
import sys
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import torch
import yaml

import dsq_ckpt
from dsq_ckpt import ConfigError, DSQConfig, DSQStorageWriter
from dsq_ckpt.api.oneshot_config import _explicit_keys
from dsq_ckpt.api.saving import as_config
from dsq_ckpt.codebooks import CODEBOOKS
from dsq_ckpt.codebooks.kmeans import KMeans
from dsq_ckpt.config.schema import BY_SIZE, QuantizeConfig, TensorConfig
from dsq_ckpt.config.systems import SYSTEMS
from dsq_ckpt.core.config_trees import load_preset
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.adam_moments import error, moments, update

CONFIGS = Path(__file__).parents[2] / "configs"


def test_every_problem_is_named_at_once():
    tree = {
        "quantise": 1,
        "quantize": {
            "weights": {"codebook": {"fit": "lattice", "bins": 63, "foo": 1}},
            "exp_avg": {"codebook": {"fit": "kmeans", "bins": 255}},
            "rules": [{"pattern": "", "group": "x y"}],
        },
        "delta": {"max_chain": 0, "coder": "zip"},
    }
    with pytest.raises(ConfigError) as caught:
        DSQConfig.create(tree)
    text = str(caught.value)
    for key in (
        "quantise: unknown key; did you mean 'quantize'?", "quantize.weights.codebook.bins",
        "quantize.weights.codebook.foo: unknown key", "quantize.exp_avg.codebook.bins", "quantize.rules.0.pattern",
        "quantize.rules.0.group", "delta.max_chain", "delta.coder",
    ):
        assert key in text, text


@pytest.mark.parametrize("codebook, says", [
    ({"fit": "lattice", "bins": 7}, "even"),
    ({"fit": "kmeans", "domain": "log", "prune": 0.1}, "zeros are kept"),
    ({"fit": "median"}, "fit"),
])
def test_settings_that_contradict_each_other(codebook, says):
    with pytest.raises(ConfigError, match=says):
        DSQConfig.create({"quantize": {"weights": {"codebook": codebook}}})


@pytest.mark.parametrize("suffix, dump", [(".json", json.dumps), (".yaml", yaml.safe_dump)])
def test_files(tmp_path, suffix, dump):
    path = tmp_path / f"c{suffix}"
    path.write_text(dump({"delta": {"max_chain": 7}}))
    assert DSQConfig.create(path).delta.max_chain == 7
    path.write_text("{]")
    with pytest.raises(ConfigError, match="not valid"):
        DSQConfig.create(str(path))
    path.write_text("3")
    with pytest.raises(ConfigError, match="mapping"):
        DSQConfig.create(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        DSQConfig.create(tmp_path / "absent.yaml")


@pytest.mark.parametrize("name, text, twice", [
    ("a.yaml", "delta: {max_chain: 3}\nsystem: dsq\ndelta: {max_chain: 8}\n", "delta"),
    ("a.yaml", "delta:\n  max_chain: 3\n  'max_chain': 8\n", "max_chain"),
    ("a.json", '{"delta": {"max_chain": 3, "max_chain": 8}}', "max_chain"),
    ("a", "system: dsq\nsystem: dsq\n", "system"),
])
def test_a_key_that_is_there_twice_is_refused(tmp_path, name, text, twice):
    """The last one counted without a word; the error names the key and the file."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"{name}' is not valid .*: the key '{twice}' is there twice in one mapping"):
        DSQConfig.create(tmp_path / name)


@pytest.mark.parametrize(("name", "bracket"), [("deep.yaml", "[\n"), ("deep.json", "[")], ids=["yaml", "json"])
def test_a_file_that_is_nested_too_deep_is_named(tmp_path, name, bracket):
    (tmp_path / name).write_text(bracket * 100_000)  # in YAML a line each: any in the first line might be a key
    with pytest.raises(ConfigError, match=rf"{name}' is not valid .*recursion"):
        DSQConfig.create(tmp_path / name)


def test_a_key_may_be_given_besides_merged_ones(tmp_path):
    """Also where the mapping that is merged is itself made so, and is merged again."""
    (tmp_path / "a.yaml").write_text(
        "quantize:\n  weights: &weights {method: quantize, refinement_bits: 3}\n"
        "  momentum: &momentum {<<: *weights, refinement_bits: 5}\n"
        "  exp_avg: {<<: *momentum, refinement_bits: 6}\n"
    )
    config = DSQConfig.create(tmp_path / "a.yaml").quantize
    assert [group.refinement_bits for group in (config.weights, config.momentum, config.exp_avg)] == [3, 5, 6]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_presets(path):
    assert DSQConfig.preset(path.stem) == DSQConfig.create(path)
    assert DSQConfig.create(DSQConfig.create(path).model_dump()) == DSQConfig.create(path)


def test_the_default_preset_says_what_the_defaults_are():
    tree = yaml.safe_load((CONFIGS / "default.yaml").read_text())
    assert DSQConfig.create(tree) == DSQConfig()

    def keys(node, prefix=""):
        return {k for name, value in node.items() for k in
                ([f"{prefix}{name}"] if not isinstance(value, dict) or not value else keys(value, f"{prefix}{name}."))}

    assert keys(tree) == keys(DSQConfig().model_dump(mode="json")), "default.yaml documents every key"


def test_the_default_preset_has_the_keys_of_every_codebook():
    """Those that are not in use are there as comments, which say the unit or the range of each key."""
    text = (CONFIGS / "default.yaml").read_text()
    shown = {}
    for block in re.findall(r"^# codebook:.*\n((?:#   .*\n)+)", text, re.M):
        lines = [line[4:] for line in block.splitlines()]
        assert all("# " in line for line in lines if not line.startswith("fit:")), block
        tree = yaml.safe_load("\n".join(lines))
        shown[tree["fit"]] = tree
    for fit, model in CODEBOOKS.items():
        if fit not in ("lattice", "lloyd", "update", "relative", "octaves"):  # these are not comments
            assert shown.pop(fit) == model().model_dump(), fit
    assert shown == {}


def test_a_bound_in_percent_is_refused():
    """5 % is 0.05; 5 would be 500 %, which ruins a model."""
    with pytest.raises(ConfigError, match=r"search\.epsilon: expected less than 1 \(found 5\)"):
        DSQConfig.create({"search": {"epsilon": 5}})


@pytest.mark.parametrize("tree, says", [
    ({"max_chain": 3}, "max_chain: unknown key; it belongs elsewhere: 'delta.max_chain'"),
    ({"search": {"system": "lc"}}, "search.system: unknown key; 'system' belongs at the top level"),
    ({"weights": {}}, "weights: unknown key; it belongs elsewhere: 'quantize.weights'"),
    ({"search.fallback": 1}, "search.fallback: unknown key; write it as {'search': {'fallback': ...}}"),
    ({"quantize.share": 1}, "unknown key; write it as {'quantize': {'granularity': ...}}"),
    ({"quantize": {"exp_avg": {"bins": 4}}}, "it belongs elsewhere: 'quantize.exp_avg.codebook.bins'"),
    ({"quantize": {"groups": {"embedding": {"step": 1}}}}, "elsewhere: 'quantize.groups.embedding.codebook.step'"),
    ({"quantize": {"weights": {"codebook": {"prune": 0.1}}}}, "codebooks have it with fit: kmeans or lloyd"),
    ({"quantize": {"momentum": {"codebook": {"bin": 3}}}}, "codebook.bin: unknown key; did you mean 'bins'?"),
    ({"delta": {"max_chian": 3}}, "did you mean 'max_chain'?"),
    ({"epsilons": 0.1}, "did you mean 'search.epsilon'?"),
    ({"nothing_like_it": 0.1}, "nothing_like_it: unknown key\n"),
])
def test_errors_name_where_an_unknown_key_belongs(tree, says):
    with pytest.raises(ConfigError) as caught:
        DSQConfig.create(tree)
    assert says in f"{caught.value}\n"


def test_presets_by_name(tmp_path, monkeypatch):
    """As on the command line: a string without a suffix that names no file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smallest").mkdir()
    assert DSQConfig.create("smallest") == as_config("smallest") == DSQConfig.preset("smallest")
    assert DSQStorageWriter(tmp_path / "a", "exact").config == DSQConfig.preset("exact")
    state = {"w": torch.randn(80, 80)}
    dsq_ckpt.save(state, tmp_path / "run" / "a", config="exact")
    dsq_ckpt.compress(state, tmp_path / "b", config="exact")
    for path in (tmp_path / "run" / "a", tmp_path / "b"):
        assert Manifest.read(path).config == DSQConfig.preset("exact").model_dump(mode="json")
    assert _explicit_keys("moments_exact") == load_preset("moments_exact")
    (tmp_path / "exact").write_text("delta: {max_chain: 3}")  # a file goes before a preset, whatever its name
    assert DSQConfig.create("exact").delta.max_chain == 3
    for missing in ("tiny", ""):
        with pytest.raises(ConfigError, match=f"no preset '{missing}'; choose from default, .* YAML file"):
            DSQConfig.create(missing)
    with pytest.raises(ConfigError, match="cannot be read"):
        DSQConfig.create("presets/tiny")


def test_the_smallest_preset_restores_moments_by_their_size(tmp_path):
    """It is what was the default before: small, and a restart loses most of the next update."""
    preset = DSQConfig.preset("smallest")
    assert (preset.quantize.exp_avg, preset.quantize.exp_avg_sq) == (BY_SIZE["exp_avg"], BY_SIZE["exp_avg_sq"])
    assert preset.quantize.weights == DSQConfig().quantize.weights
    original = {"w": torch.randn(96, 96), "state": {"w": moments()}}
    for name in "ab":
        dsq_ckpt.save(original, tmp_path / "small" / name, config="smallest")
        dsq_ckpt.save(original, tmp_path / "usual" / name)
    small, usual = (Manifest.read(tmp_path / run / "a") for run in ("small", "usual"))
    assert (small.refinement, usual.refinement) == ("dropped", "kept")  # only the newest can be restarted from
    errors, sizes = {}, {}
    for run in ("small", "usual"):
        got = {"w": torch.zeros(96, 96), "state": {"w": {k: torch.zeros_like(v) for k, v in moments().items()}}}
        dsq_ckpt.load(got, tmp_path / run / "b")
        errors[run] = error(update(original["state"]["w"]), update(got["state"]["w"]))
        sizes[run] = sum(kind.base for kind in Manifest.read(tmp_path / run / "a").kinds.values())
        assert error(original["w"], got["w"]) < 0.05
    assert errors["usual"] < 0.3 < 0.5 < errors["small"] < 1.1 and sizes["small"] < sizes["usual"], (errors, sizes)


def test_unknown_preset():
    with pytest.raises(ConfigError, match="smallest"):
        DSQConfig.preset("tiny")


def test_with_values():
    codebook = {"fit": "kmeans", "bins": 5}
    config = DSQConfig().with_values(**{"delta.max_chain": 3, "quantize.weights.codebook": codebook})
    assert config.delta.max_chain == 3
    assert config.quantize.weights.codebook.bins == 5
    with pytest.raises(ConfigError, match="no 'nothing'"):
        DSQConfig().with_values(**{"nothing.at.all": 1})


@pytest.mark.parametrize("name", [*SYSTEMS])
def test_every_row_of_the_table_of_systems(name):
    """Its defaults are a configuration, and so is the whole search space over them."""
    row = SYSTEMS[name]
    config = DSQConfig(system=name)
    assert row.name == name and row.method and row.source and config == DSQConfig.create(config.model_dump())
    for variant in row.space.variants if row.space else ():
        for axis in row.space.axes:
            for value in axis.values:
                tried = config.with_values(**variant.values, **dict.fromkeys(axis.path, value))
                values = [reduce(getitem, path.split("."), tried.model_dump()) for path in axis.path]
                assert values == [value] * len(axis.path) and tried.system == name


def rule(**keys):
    return {"quantize": {"rules": [{"pattern": "*router*", **keys}]}}


def test_a_rule_says_exact_or_a_group():
    exact = DSQConfig.create(rule(exact=True))
    assert exact == DSQConfig.create(rule(group="exact")) == DSQConfig.create(rule(group="exact", exact=True))
    assert exact == DSQConfig.create(exact.model_dump()) == DSQConfig.create(exact.model_dump(mode="json"))
    assert exact.quantize.rules[0].exact and exact.quantize.rules[0].group is None
    for keys, says in (
        ({}, "a rule needs exact: true"), ({"exact": False}, "a rule needs exact: true"),
        ({"exact": True, "group": "gates"}, "exact: true needs no group, and has 'gates'"),
        ({"exact": False, "group": "exact"}, "say exact: true"),
    ):
        with pytest.raises(ConfigError, match=says):
            DSQConfig.create(rule(**keys))


@pytest.mark.parametrize("name", [
    "Exact", "EXACT", "exactly", "exakt", "exat", "bit-exact", "bit_exact", "exact1", "lossless", "Loss-less",
])
def test_a_group_that_was_to_mean_exact(name):
    """Its tensors would be lossy without a word."""
    says = f"rules.0: '{name}' is the name of a group, whose tensors are lossy; .*exact: true"
    with pytest.raises(ConfigError, match=says):
        DSQConfig.create(rule(group=name))


@pytest.mark.parametrize("name, says", [
    ("Embedding", "did you mean 'embedding'"), ("embeddings", "did you mean 'embedding'"),
    ("linaer", "did you mean 'linear'"), ("BF16", "did you mean groups: {NAME: {method: bf16}}"),
    ("bf16", "did you mean groups: {NAME: {method: bf16}}"),
])
def test_a_group_that_is_nearly_another(name, says):
    with pytest.raises(ConfigError) as caught:
        DSQConfig.create(rule(group=name))
    assert says in str(caught.value) and f"name it in groups: {{{name}: {{}}}}" in str(caught.value)
    tree = rule(group=name)
    tree["quantize"]["groups"] = {name: {}}  # what has settings of its own is meant
    assert DSQConfig.create(tree).quantize.rules[0].group == name


@pytest.mark.parametrize("name", ["linear", "linear2", "conv1", "other", "norms", "router", "late", "gates.all"])
def test_groups_of_other_names_are_free(name):
    assert DSQConfig.create(rule(group=name)).quantize.rules[0].group == name


def test_keys_of_the_codebooks_that_moments_had_by_default_are_read():
    """Configurations of earlier versions named no fit where they changed one of its numbers."""
    quantize = DSQConfig.create({"quantize": {
        "exp_avg": {"codebook": {"bins": 4}}, "exp_avg_sq": {"refinement_bits": 3, "codebook": {"bins": 6}},
    }}).quantize
    assert quantize.exp_avg.codebook == KMeans(bins=4, protect=0.0005, rate_distortion=0.05)
    assert quantize.exp_avg_sq.codebook == KMeans(bins=6, protect=0.0005, domain="log", rate_distortion=0.05)
    fitted = DSQConfig.create({"quantize": {"exp_avg_sq": {"codebook": {"fit": "kmeans", "domain": "log"}}}}).quantize
    assert (quantize.exp_avg.refinement_bits, fitted.exp_avg_sq.refinement_bits) == (2, 1), "those of that time"
    stepped = DSQConfig.create({"quantize": {"exp_avg": {"codebook": {"step": 0.5}}}})
    assert stepped.quantize.exp_avg.codebook.fit == "update"


@pytest.mark.parametrize(("tree", "says"), [
    ({"quantize": {"rules": {}}}, "quantize.rules: expected a list (found {})"),
    ({"quantize": {"rules": ["*norm*"]}}, "quantize.rules.0: expected keys and their values (found '*norm*')"),
    ({"quantize": {"rules": [{"pattern": "*", "exact": "yes"}]}},
     "quantize.rules.0.exact: expected true or false (found 'yes')"),
    ({"storage": {"fsync": "no"}}, "storage.fsync: expected true or false (found 'no')"),
    ({"storage": {"replicate_keyframes": "yes"}},
     "storage.replicate_keyframes: expected true or false, or expected a whole number (found 'yes')"),
    ({"refinement": {"keep_last": True}}, "keep_last is true, expected a number (found {'keep_last': True})"),
    ({"delta": {"max_chain": False}}, "delta: max_chain is false, expected a number (found {'max_chain': False})"),
    ({"quantize": {"weights": {"codebook": {"fit": "kmeans", "bins": True}}}},
     "quantize.weights.codebook: bins is true, expected a number (found {'fit': 'kmeans', 'bins': True})"),
    ({"storage": 3}, "storage: expected keys and their values (found 3)"),
    ({"delta": {"max_chain": 2.5}}, "delta.max_chain: expected a whole number, or expected 'auto' (found 2.5)"),
    ({"delta": {"max_chain": "atuo"}}, "or expected 'auto' (found 'atuo'); did you mean 'auto'?"),
    ({"delta": {"failure_interval": "1h"}},
     "delta.failure_interval: expected a number, or expected 'observed' (found '1h')"),
    ({"delta": {"failure_interval": "Observed"}}, "(found 'Observed'); did you mean 'observed'?"),
    ({"system": "inshrinkrator"}, "'scar' or 'exact' (found 'inshrinkrator'); did you mean 'inshrinkerator'?"),
    ({"quantize": {"weights": {"codebook": {"fit": "kmean"}}}},
     "'update' (found {'fit': 'kmean'}); did you mean 'kmeans'?"),
])
def test_values_of_another_kind(tree, says):
    with pytest.raises(ConfigError) as caught:
        DSQConfig.create(tree)
    first, *lines = str(caught.value).split("\n")
    assert first == "configuration: 1 problem(s)" and lines[0].endswith(says) and len(lines) == 1


@pytest.mark.parametrize("tree, says", [
    ({"delta": {"against": "values"}}, "second moments"),
    ({"quantize": {"weights": {"codebook": {"fit": "partition"}}}}, "delta.against"),
    ({"quantize": {"groups": {"linear": {"codebook": {"fit": "partition"}}}}}, r"groups\.linear"),
    ({"delta": {"against": "states"}}, "against"),
    ({"quantize": {"weights": {"codebook": {"fit": "partition", "parts": 0}}}}, "parts"),
])
def test_settings_that_value_deltas_refuse(tree, says):
    with pytest.raises(dsq_ckpt.ConfigError, match=says):
        dsq_ckpt.DSQConfig.create(tree)


@pytest.mark.parametrize(
    "codebook", ["lattice", "gobo", "exponent", "uniform", "adaptive", "largest", "partition", "kmeans", "lloyd"],
)
def test_second_moments_are_not_stored_on_a_linear_axis(codebook):
    """A small one would be restored as zero, by whose square root Adam divides."""
    says = rf"exp_avg_sq: fit '{codebook}' measures distance on a linear axis.* choose fit 'octaves', or 'kmeans'"
    settings = {"fit": codebook} | ({"domain": "linear"} if codebook in ("kmeans", "lloyd") else {})
    with pytest.raises(ConfigError, match=says):
        DSQConfig.create({"quantize": {"exp_avg_sq": {"codebook": settings}}})
    for method in ("exact", "bf16"):  # the codebook is not in use
        DSQConfig.create({"quantize": {"exp_avg_sq": {"method": method, "codebook": settings}}})
        QuantizeConfig(exp_avg_sq=TensorConfig(method=method))


def test_yaml_is_imported_for_files_alone(tmp_path):
    code = (
        "import sys, torch, dsq_ckpt; dsq_ckpt.save({'w': torch.ones(256, 256)}, sys.argv[1])\n"
        "assert 'yaml' not in sys.modules; dsq_ckpt.DSQConfig.create('smallest'); assert 'yaml' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "step-1")], check=True, timeout=120)
