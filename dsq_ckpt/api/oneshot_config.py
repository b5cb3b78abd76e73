"""The configuration of a single checkpoint outside of a run (`compress`), with or without a bound of degradation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat

from dsq_ckpt.api.saving import ConfigLike, as_config
from dsq_ckpt.codebooks.lattice import Lattice
from dsq_ckpt.config.renamed import current_keys
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.config_trees import Tree, diff_trees, load_tree, merge_trees
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.quantization.groups import EXACT, kind_of

_KINDS = ("weights", "exp_avg", "exp_avg_sq", "momentum")
_MIN_ELEMENTS = 1024
"""Number of elements from which a codebook of its own makes a tensor smaller."""


def oneshot_config(config: ConfigLike, max_degradation: float | None, evaluates: bool, probes: int) -> DSQConfig:
    """Return the configuration of a single checkpoint.

    Raises:
        ConfigError: the configuration is invalid, compresses differences to a parent, or contradicts the other
            arguments of `compress`.
    """
    if not isinstance(probes, int) or isinstance(probes, bool) or probes < 0:
        raise ConfigError(f"probes is {probes!r}; expected a number of evaluations, 0 for none")
    chosen = as_config(config) if max_degradation is None else _bounded_config(config, max_degradation, probes)
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


def is_valid_bound(value: Any) -> bool:
    """Return whether a value is a number that can bound the degradation of a search: above 0 and below 1."""
    return isinstance(value, SupportsFloat) and not isinstance(value, bool) and 0 < float(value) < 1


def quantize_small_weights(chosen: DSQConfig, config: ConfigLike, names: Iterable[str]) -> DSQConfig:
    """Return the configuration with a lower `min_elements`, unless `config` sets it or there are moments.

    Small moments stay bf16, since no metric measures their degradation.
    """
    own_steps = isinstance(chosen.quantize.weights.codebook, Lattice) and chosen.quantize.granularity == "tensor"
    if not own_steps or "min_elements" in _explicit_keys(config).get("quantize", {}):
        return chosen
    if not {kind_of(name) for name in names} <= {"weights", EXACT}:
        return chosen
    return chosen.with_values(**{"quantize.min_elements": _MIN_ELEMENTS})


def _bounded_config(config: ConfigLike, max_degradation: float, probes: int) -> DSQConfig:
    """Return the configuration with a bound for the base layer, and a refinement layer only if `config` sets one."""
    if not is_valid_bound(max_degradation):
        raise ConfigError(
            f"max_degradation is {max_degradation!r}; expected a number above 0 and below 1, such as 0.05 for 5 %; "
            "for no degradation at all take the preset 'exact'"
        )
    validated = as_config(config)  # raises errors with the keys that the user wrote
    snapshot: Tree = {
        "quantize": {kind: {"refinement_bits": 0} for kind in _KINDS}, "search": {"fallback": "exact"},
    }
    if probes and isinstance(validated.quantize.weights.codebook, Lattice):
        snapshot["quantize"]["granularity"] = "tensor"  # each tensor has its own step
    bound = {"system": validated.system, "search": {"bound": "relative", "epsilon": max_degradation}}
    return DSQConfig.create(merge_trees(merge_trees(snapshot, _explicit_keys(config)), bound))


def _explicit_keys(config: ConfigLike) -> Tree:
    """Return the keys that a configuration sets explicitly; for a `DSQConfig`, those that differ from the defaults."""
    if config is None:
        return {}
    if not isinstance(config, DSQConfig):  # silent: the check of `config` has warned of former keys
        tree = dict(config) if isinstance(config, Mapping) else load_tree(config)
        return current_keys({str(key): value for key, value in tree.items()}, silent=True)
    tree, defaults = config.model_dump(), DSQConfig(system=config.system).model_dump()
    explicit = diff_trees(tree, defaults)
    if "groups" in explicit.get("quantize", {}):  # the defaults of a group are the values of `weights`
        weights = tree["quantize"]["weights"]
        explicit["quantize"]["groups"] = {
            name: diff_trees(group, weights) for name, group in tree["quantize"]["groups"].items()
        }
    return explicit
