"""Configurations: every offending key named at once, presets that load, files in both formats."""

import json
from pathlib import Path

import pytest
import yaml

from dsq_ckpt import ConfigError, DSQConfig

CONFIGS = Path(__file__).parent.parent / "configs"


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
