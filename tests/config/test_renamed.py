"""Former names of configuration keys and values: read with one warning at the caller's line, silently in manifests."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import yaml

import dsq_ckpt
from dsq_ckpt import Compressor, ConfigError, DSQConfig, DSQStorageWriter
from dsq_ckpt.config.renamed import RENAMED, RENAMED_VALUES
from dsq_ckpt.config.schema import QuantizeConfig, SearchConfig
from dsq_ckpt.config.systems import SYSTEMS, System, register_system
from dsq_ckpt.deepspeed import BLOCK, parse_block
from dsq_ckpt.search.manager import ConfigManager
from dsq_ckpt.storage.manifest import Manifest

FIXTURES = Path(__file__).parents[1] / "fixtures"
VALUES = {
    "quantize.share": "tensor", "search.share": 0.5, "search.gentler_only": True, "search.spread": True,
    "search.otherwise": "exact",
}
FORMER = {
    "quantize": {"share": "tensor"},
    "search": {"share": 0.5, "gentler_only": True, "spread": True, "otherwise": "exact", "trials": 3},
}
PRESENT = {
    "quantize": {"granularity": "tensor"},
    "search": {"max_progress_loss": 0.5, "monotone": True, "parallel_trials": True, "fallback": "exact", "trials": 3},
}


def tree_of(path, value):
    section, key = path.split(".")
    return {section: {key: value}}


def warned(function):
    """Return what a function returns, and the texts of its warnings, which must be at a line of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    texts = [str(warning.message) for warning in caught if "former names" in str(warning.message)]
    assert all(warning.filename == __file__ for warning in caught if str(warning.message) in texts), caught
    return result, texts


@pytest.mark.parametrize("path", RENAMED)
def test_each_is_read(path):
    config, texts = warned(lambda: DSQConfig.create(tree_of(path, VALUES[path])))
    assert config == DSQConfig.create(tree_of(RENAMED[path], VALUES[path])) != DSQConfig()
    assert len(texts) == 1 and f"'{path}' is now '{RENAMED[path]}'" in texts[0]
    assert path.split(".")[1] not in config.model_dump()[path.split(".")[0]]


@pytest.mark.parametrize("path, former, present", [
    (path, former, present) for path, values in RENAMED_VALUES.items() for former, present in values.items()
])
def test_each_value_is_read(path, former, present):
    for create in (lambda: DSQConfig.create(tree_of(path, former)), lambda: DSQConfig().with_values(**{path: former})):
        config, texts = warned(create)
        assert config == DSQConfig.create(tree_of(path, present))
        assert len(texts) == 1 and f"'{path}: {former}' is now '{path}: {present}'" in texts[0]


def ways(tmp_path):
    """All ways in that take a configuration: functions that return it as it was understood."""
    state = {"w": torch.randn(80, 80)}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(FORMER))
    (tmp_path / "c.json").write_text(json.dumps(FORMER))

    def saved_config(name, save):
        save(tmp_path / name / "a")
        return Manifest.read(tmp_path / name / "a").config

    return {
        "keywords": lambda: DSQConfig(**FORMER),
        "yaml": lambda: DSQConfig.create(tmp_path / "c.yaml"),
        "json": lambda: DSQConfig.create(str(tmp_path / "c.json")),
        "sections": lambda: DSQConfig(quantize=QuantizeConfig(share="tensor"), search=PRESENT["search"]),
        "section": lambda: DSQConfig(search=SearchConfig(**FORMER["search"]), quantize=PRESENT["quantize"]),
        "values": lambda: DSQConfig(search={"trials": 3}).with_values(**VALUES),
        "writer": lambda: DSQStorageWriter(tmp_path / "w", FORMER).config,
        "compressor": lambda: Compressor(torch.nn.Linear(2, 2), config=FORMER).config,
        "save": lambda: saved_config("s", lambda path: dsq_ckpt.save(state, path, config=FORMER)),
        "async": lambda: saved_config("as", lambda path: dsq_ckpt.async_save(state, path, config=FORMER).result()),
        "one shot": lambda: saved_config("o", lambda path: dsq_ckpt.compress(state, path, config=tmp_path / "c.yaml")),
        "block": lambda: parse_block({BLOCK: {"enabled": True, **FORMER}}),
    }


@pytest.mark.parametrize("way", [
    "keywords", "yaml", "json", "sections", "section", "values", "writer", "compressor", "save", "async", "one shot",
    "block",
])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_warning_by_all_ways_in(tmp_path, way):
    config, texts = warned(ways(tmp_path)[way])
    assert len(texts) == 1, texts
    assert DSQConfig.create(config) == DSQConfig.create(PRESENT)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_bound_lies_over_former_keys(tmp_path):
    """`compress` has a fallback of its own, which a former key overrides as the present one does."""
    model = torch.nn.Linear(80, 80)

    def compress():
        dsq_ckpt.compress(
            model, tmp_path / "a", config={"search": {"otherwise": "gentlest"}}, evaluate=lambda: 1.0 + float(
                (model.weight - weight).abs().sum()), max_degradation=0.5,
        )
        return Manifest.read(tmp_path / "a").config["search"]["fallback"]

    weight = model.weight.detach().clone()
    fallback, texts = warned(compress)
    assert fallback == "conservative" and len(texts) == 1, texts


@pytest.mark.parametrize("path", RENAMED)
def test_both_names_are_an_error(path):
    section, key = path.split(".")
    both = {section: {key: VALUES[path], RENAMED[path].split(".")[1]: VALUES[path]}}
    for create in (
        lambda: DSQConfig.create(both), lambda: DSQConfig(system="inshrinkerator", **both),
        lambda: parse_block({BLOCK: both}, silent=True),
        lambda: DSQConfig().with_values(**{path: VALUES[path], RENAMED[path]: VALUES[path]}),
    ):
        with pytest.raises(ConfigError, match=f"{path}: unknown key; .* former name of '{RENAMED[path]}', .* too: "):
            create()


@pytest.mark.parametrize("tree, says", [
    ({"share": "tensor"}, "share: unknown key; 'share' is the former name of 'quantize.granularity' or 'search.max_"),
    ({"quantize": {"otherwise": "exact"}}, "'otherwise' is the former name of 'search.fallback'"),
    ({"search": {"monoton": True}}, "did you mean 'monotone'?"),
    ({"granularity": "tensor"}, "it belongs elsewhere: 'quantize.granularity'"),
    ({"search": {"parallel_trial": True}}, "did you mean 'parallel_trials'?"),
])
def test_hints_know_the_present_names(tree, says):
    with pytest.raises(ConfigError) as caught:
        DSQConfig.create(tree)
    assert says in str(caught.value)


def test_systems_of_other_packages():
    """Defaults with former keys are laid below what a user gives by either name."""
    register_system(System("formerly", "-", "-", {"quantize": {"share": "tensor"}}, None))
    try:
        for user in ({"share": "layer"}, {"granularity": "layer"}):
            config, _ = warned(lambda user=user: DSQConfig(system="formerly", quantize=user))
            assert config.quantize.granularity == "layer"
        config, texts = warned(lambda: DSQConfig(system="formerly"))
        assert config.quantize.granularity == "tensor" and len(texts) == 1
    finally:
        del SYSTEMS["formerly"]


def test_manifests_are_read_silently(tmp_path):
    """A search goes on from a checkpoint of an earlier version."""
    written = json.loads((FIXTURES / "format_v2/codes-2/manifest.json").read_text())["config"]
    assert "otherwise" in written["search"] and "share" in written["quantize"]
    shutil.copytree(FIXTURES / "format_v2/codes-2", tmp_path / "a")
    manifest, texts = warned(lambda: Manifest.read(tmp_path / "a"))
    assert texts == [] and written["search"]["otherwise"] == "gentlest"
    assert manifest.config["search"]["fallback"] == "conservative"
    assert manifest.config["quantize"]["granularity"] == written["quantize"]["share"]
    assert not {"otherwise", "share", "spread", "gentler_only"} & {*manifest.config["search"]}

    def resumed(config):
        manager = ConfigManager(torch.nn.Linear(2, 2), lambda: 0.0)
        quality = {"chosen": {"variant": "default", "step": 1.0}, "metric": 1.5}
        manager.resume(manifest.model_copy(update={"config": config, "quality": quality}), refined=True)
        return manager._memory

    known, texts = warned(lambda: resumed(written))
    assert texts == [] and known == resumed(manifest.config) and known.point is not None


def test_a_written_configuration_has_present_keys(tmp_path):
    dsq_ckpt.save({"w": torch.randn(80, 80)}, tmp_path / "a", no_dist=True)
    assert json.loads((tmp_path / "a/manifest.json").read_text())["config"] == DSQConfig().model_dump(mode="json")
