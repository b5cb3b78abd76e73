"""The files in configs/deepspeed: DeepSpeed and we both accept them, and none is out of date."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from dsq_ckpt import ConfigError, DSQConfig
from dsq_ckpt.core.config_trees import load_preset
from dsq_ckpt.deepspeed import parse_block
from tests.helpers.processes import ROOT

CONFIGS = ROOT / "configs" / "deepspeed"
FILES = sorted(CONFIGS.glob("*.json"))
AUTO = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "enabled": True,
    "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "warmup_min_lr": 0.0, "warmup_max_lr": 1e-3,
    "warmup_num_steps": 2, "total_num_steps": 25,
}
"""What Hugging Face's Trainer puts in the place of `auto`."""


def filled(node: Any, key: str = "") -> Any:
    if isinstance(node, dict):  # in our block "auto" is a value of our own
        return {name: value if name == "dsq_checkpoint" else filled(value, name) for name, value in node.items()}
    return AUTO[key] if node == "auto" else node


def block(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())["dsq_checkpoint"]


def test_configuration_files_are_complete():
    stages = {"zero0", "zero1", "zero2", "zero3", "zero3_offload"}
    trainer = {"hf_trainer", "hf_trainer_zero1", "hf_trainer_zero3", "hf_trainer_zero3_offload"}
    assert {path.stem for path in FILES} == stages | trainer | {"all_keys"}


@pytest.mark.parametrize("path", [path for path in FILES if path.stem.startswith("hf")], ids=lambda path: path.stem)
def test_the_trainers_files_leave_to_it_what_its_arguments_say(path):
    """It refuses numbers that differ from its own."""
    def left(node: Any) -> set[str]:
        if not isinstance(node, dict):
            return set()
        return {key for key, value in node.items() if value == "auto"} | set().union(*map(left, node.values()))

    assert left(json.loads(path.read_text())) == set(AUTO)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_both_accept_it(path):
    deepspeed_config = pytest.importorskip("deepspeed.runtime.config")
    tree = filled(json.loads(path.read_text()))
    config = deepspeed_config.DeepSpeedConfig(tree)
    assert config.bfloat16_config.enabled
    assert config.zero_config.stage == int(path.stem.partition("zero")[2][:1] or 2)
    settings = dict(tree["dsq_checkpoint"])
    assert settings.pop("enabled") is True
    DSQConfig.create(settings)
    assert config._param_dict["dsq_checkpoint"] == tree["dsq_checkpoint"], "it reaches the engine"


def test_all_keys_are_those_of_the_schema():
    """To bring the file up to date, replace its block by this one."""
    assert block("all_keys") == {"enabled": True, **DSQConfig().model_dump(mode="json")}


def test_the_keys_are_explained_in_the_default_preset():
    """JSON has no comments; `configs/default.yaml` has one for every key, and the same keys and values."""
    settings = block("all_keys")
    del settings["enabled"]
    assert settings == yaml.safe_load((ROOT / "configs" / "default.yaml").read_text())


def test_configurations_are_packaged():
    """And are no presets, whose names are those of the YAML files."""
    assert '"**/*.json"' in (ROOT / "setup.py").read_text()
    assert not {path.stem for path in FILES} & {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    assert load_preset("default")


@pytest.mark.parametrize("key", ["enable", "Enabled", "is_enabled"])
def test_a_misspelled_enabled_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"dsq_checkpoint.{key}: unknown key; did you mean 'enabled'"):
        parse_block({"dsq_checkpoint": {key: True}})
