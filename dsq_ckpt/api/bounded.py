"""The configuration of one checkpoint by itself, within a bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat

from dsq_ckpt.api.saving import ConfigLike, as_config
from dsq_ckpt.codebooks.lattice import Lattice
from dsq_ckpt.config.renamed import current_keys
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.trees import Tree, difference, merged, named_tree
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.quantization.groups import EXACT, kind_of

_KINDS = ("weights", "exp_avg", "exp_avg_sq", "momentum")
_SMALL = 1024
"""Elements from which on a tensor pays for a codebook of its own."""


def configuration(config: ConfigLike, max_degradation: float | None, evaluates: bool, probes: int) -> DSQConfig:
    """Return the configuration of one checkpoint by itself.

    Raises:
        ConfigError: it is wrong, or for differences, or contradicts the other arguments of `compress`.
    """
    if not isinstance(probes, int) or isinstance(probes, bool) or probes < 0:
        raise ConfigError(f"probes is {probes!r}; expected a number of evaluations, 0 for none")
    chosen = as_config(config) if max_degradation is None else _bounded(config, max_degradation, probes)
    if chosen.delta.against == "values":
        raise ConfigError(
            f"system '{chosen.system}' with delta.against 'values' compresses differences to a parent, and a "
            "checkpoint by itself has none: all of it would be stored exactly. Choose a system that compresses weights "
            "themselves (dsq, inshrinkerator, uniform, adaptive, kmeans), or exact where that is meant; differences "
            "are for dsq_ckpt.save in a run"
        )
    if max_degradation is not None and not evaluates:
        raise ConfigError("max_degradation needs evaluate: a function that gives the metric of the model as it is")
    return chosen


def is_bound(value: Any) -> bool:
    """Return whether a value is a degradation that a search can keep to: a number, not its text."""
    return isinstance(value, SupportsFloat) and not isinstance(value, bool) and 0 < float(value) < 1


def with_small_weights(chosen: DSQConfig, config: ConfigLike, names: Iterable[str]) -> DSQConfig:
    """Return the configuration that quantizes smaller tensors too, where `config` sets no limit and none is a moment.

    Small moments stay bf16: no metric tells what they cost.
    """
    own_steps = isinstance(chosen.quantize.weights.codebook, Lattice) and chosen.quantize.granularity == "tensor"
    if not own_steps or "min_elements" in _said(config).get("quantize", {}):
        return chosen
    if not {kind_of(name) for name in names} <= {"weights", EXACT}:
        return chosen
    return chosen.with_values(**{"quantize.min_elements": _SMALL})


def _bounded(config: ConfigLike, max_degradation: float, probes: int) -> DSQConfig:
    """Return the configuration with a bound on the base layer, and with a refinement layer only if it asks for one."""
    if not is_bound(max_degradation):
        raise ConfigError(
            f"max_degradation is {max_degradation!r}; expected a number above 0 and below 1, such as 0.05 for 5 %; "
            "for no degradation at all take the preset 'exact'"
        )
    whole = as_config(config)  # says what is wrong with it, and where
    snapshot: Tree = {
        "quantize": {kind: {"refinement_bits": 0} for kind in _KINDS}, "search": {"fallback": "exact"},
    }
    if probes and isinstance(whole.quantize.weights.codebook, Lattice):
        snapshot["quantize"]["granularity"] = "tensor"  # a step for each
    bound = {"system": whole.system, "search": {"bound": "relative", "epsilon": max_degradation}}
    return DSQConfig.create(merged(merged(snapshot, _said(config)), bound))


def _said(config: ConfigLike) -> Tree:
    """Return the keys that a configuration sets itself; for a `DSQConfig`, those that differ from the defaults."""
    if config is None:
        return {}
    if not isinstance(config, DSQConfig):  # whose former keys were warned of when it was checked
        tree = dict(config) if isinstance(config, Mapping) else named_tree(config)
        return current_keys({str(key): value for key, value in tree.items()}, silent=True)
    tree, usual = config.model_dump(), DSQConfig(system=config.system).model_dump()
    said = difference(tree, usual)
    if "groups" in said.get("quantize", {}):  # a group's defaults are what weights are set to
        weights = tree["quantize"]["weights"]
        said["quantize"]["groups"] = {
            name: difference(group, weights) for name, group in tree["quantize"]["groups"].items()
        }
    return said
