"""The one configuration tree, `DSQConfig`.

It is built from keyword arguments, a dict, JSON or YAML; every offending key is named at once. A setting that
nothing reads does not exist. The defaults are those measured in `benchmarks/results/` (see `docs/design.md`).
"""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import Field, StrictBool, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from dsq_ckpt.codebooks.kmeans import KMeans
from dsq_ckpt.codebooks.lattice import Lattice
from dsq_ckpt.codebooks.octaves import Octaves
from dsq_ckpt.codebooks.registry import CODEBOOKS, AnyCodebook
from dsq_ckpt.codebooks.update import Relative, Update
from dsq_ckpt.config.delta import DeltaConfig
from dsq_ckpt.config.renamed import RENAMED, current_keys
from dsq_ckpt.config.storage import StorageConfig
from dsq_ckpt.config.systems import SYSTEMS
from dsq_ckpt.core.arguments import expect
from dsq_ckpt.core.config_trees import load_preset, load_tree, merge_trees
from dsq_ckpt.core.hints import NOT_REGISTERED, explain_errors, group_hint
from dsq_ckpt.core.strict_model import StrictModel
from dsq_ckpt.errors import ConfigError

LAYERS = ("embedding", "linear", "conv", "other")
"""Groups of weights by layer type."""


class TensorConfig(StrictModel):
    """How the tensors of one kind (weights, first moments, ...) are stored."""

    method: Literal["quantize", "bf16", "exact"] = "quantize"
    codebook: AnyCodebook = Lattice()
    refinement_bits: int = Field(
        4, ge=0, le=8, description="bits per element for the place inside the cell, in the newest checkpoints"
    )


class Rule(StrictModel):
    """Tensors whose fully qualified name matches a shell pattern are stored exactly, or go to a group of weights."""

    pattern: str = Field(min_length=1)
    exact: StrictBool = Field(False, description="bit for bit; then there is no group")
    group: str | None = Field(None, min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")

    @model_validator(mode="before")
    @classmethod
    def _exact_was_a_group(cls, tree: Any) -> Any:
        """Read rules of versions that had `group: exact` for `exact: true`."""
        if isinstance(tree, dict) and tree.get("group") == "exact" and tree.get("exact", True) is True:
            return {**tree, "exact": True, "group": None}
        return tree

    @model_validator(mode="after")
    def _one_of_both(self) -> Rule:
        if self.exact and self.group is not None:
            raise ValueError(f"exact: true needs no group, and has '{self.group}': give one of both")
        if not self.exact and self.group is None:
            raise ValueError("a rule needs exact: true (bit for bit), or the name of a group")
        return self


BY_SIZE = {
    "exp_avg": TensorConfig(codebook=KMeans(bins=2, protect=0.0005, rate_distortion=0.05), refinement_bits=2),
    "exp_avg_sq": TensorConfig(
        codebook=KMeans(bins=4, protect=0.0005, domain="log", rate_distortion=0.05), refinement_bits=1
    ),
    "momentum": TensorConfig(codebook=KMeans(bins=2, protect=0.0005, rate_distortion=0.05), refinement_bits=4),
}
"""Moments by their size alone: once the defaults, which blocks that give another codebook, or its numbers, go over."""


def _defaults_for(kind: str, default: TensorConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a kind that a block goes over."""
    codebook = settings.get("codebook")
    if kind in BY_SIZE and isinstance(codebook, dict):
        base = default.codebook
        if codebook.get("fit", base.fit) != base.fit or not set(codebook) <= set(type(base).model_fields):
            return BY_SIZE[kind].model_dump()
    return default.model_dump()


class QuantizeConfig(StrictModel):
    """What is lossy, and how."""

    weights: TensorConfig = TensorConfig()
    exp_avg: TensorConfig = TensorConfig(codebook=Update(), refinement_bits=8)
    exp_avg_sq: TensorConfig = TensorConfig(codebook=Octaves(), refinement_bits=0)
    momentum: TensorConfig = TensorConfig(codebook=Relative(), refinement_bits=8)
    groups: dict[str, TensorConfig] = Field(
        default_factory=dict, description="by group of weights (embedding, linear, conv, other, or a rule's)"
    )
    rules: tuple[Rule, ...] = Field(default=(), description="first match wins; exact: true means bit for bit")
    frozen: Literal["exact", "lossy"] = Field("exact", description="weights without a gradient, and buffers at rest")
    granularity: Literal["layer", "tensor"] = Field(
        "layer", description="which tensors share a codebook: those of a layer type, or each has its own"
    )
    min_elements: int = Field(4096, ge=1, description="smaller tensors are not quantized; weights are exact")
    small_moments: Literal["bf16", "exact"] = Field(
        "bf16", description="moments of tensors that are not quantized: small ones, norms and biases"
    )
    nonfinite: Literal["exact", "error"] = Field("exact", description="what to do with a tensor with NaN or Inf")
    outlier_octaves: int = Field(
        3, ge=0, le=64, description="a tensor this many powers of two away from its group is normalised (0: never)"
    )

    @model_validator(mode="before")
    @classmethod
    def _over_the_defaults(cls, tree: Any) -> Any:
        """Lay a block that sets some keys of a kind over that kind's defaults, not over those of weights."""
        if not isinstance(tree, dict):
            return tree
        tree = current_keys(tree, section="quantize")
        for kind in ("weights", "exp_avg", "exp_avg_sq", "momentum"):
            if isinstance(tree.get(kind), dict):
                tree[kind] = merge_trees(_defaults_for(kind, cls.model_fields[kind].default, tree[kind]), tree[kind])
        if isinstance(tree.get("groups"), dict):
            weights = tree.get("weights", cls.model_fields["weights"].default)
            base = weights.model_dump() if isinstance(weights, TensorConfig) else weights
            tree["groups"] = {
                name: merge_trees(base, block) if isinstance(block, dict) and isinstance(base, dict) else block
                for name, block in tree["groups"].items()
            }
        return tree

    @model_validator(mode="after")
    def _moments_alone(self) -> QuantizeConfig:
        blocks = {"weights": self.weights, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq,
                  "momentum": self.momentum, **{f"groups.{name}": group for name, group in self.groups.items()}}
        for name, block in blocks.items():
            misfit = block.codebook.explain_misfit(name, block.method == "quantize")
            if misfit is not None:
                raise ValueError(f"{name}: {misfit}")
        return self

    @model_validator(mode="after")
    def _groups_exist(self) -> QuantizeConfig:
        groups = {*LAYERS, *(rule.group for rule in self.rules if rule.group is not None)}
        unknown = sorted(set(self.groups) - groups)
        if unknown:
            raise ValueError(f"groups: there is no group '{unknown[0]}'; there are {', '.join(sorted(groups))}")
        for index, rule in enumerate(self.rules):
            # What has settings of its own is no slip.
            has_settings = rule.group is None or rule.group in self.groups
            if not has_settings and (hint := group_hint(str(rule.group), LAYERS)) is not None:
                raise ValueError(f"rules.{index}: {hint}")
        return self


class SearchConfig(StrictModel):
    """How a `Compressor` looks for the smallest configuration that keeps the model's quality."""

    bound: Literal["progress", "relative"] = Field(
        "progress", description="progress: a restore may lose at most `max_progress_loss` of what training "
        "gained since the parent, and the base layer at most `epsilon`; relative: `epsilon` alone, as in the papers"
    )
    epsilon: float = Field(
        0.05, gt=0, lt=1, description="relative degradation of the metric by the base layer, such as 0.05 for 5 %"
    )
    max_progress_loss: float = Field(
        0.1, gt=0, le=1, description="fraction of the metric's gain since the parent checkpoint that a restore may lose"
    )
    floor: float = Field(
        0.0002, ge=0, le=0.1, description="relative degradation that a restore may cost however little training gained"
    )
    max_run_loss: float | None = Field(
        None, gt=0, le=1, description="relative degradation that all restores of a run together may cost; each may "
        "cost an equal share of what is left. Where nothing lossy keeps to that, weights are stored exactly"
    )
    expected_restores: int = Field(10, ge=1, le=100_000, description="restores of a run that share `max_run_loss`")
    higher_is_better: StrictBool = Field(False, description="the metric is an accuracy, not a loss or a perplexity")
    trials: int | None = Field(
        2, ge=1, le=1000, description="of base layers per checkpoint, once a configuration is known; null: all within "
        "`radius`, as the papers"
    )
    radius: int = Field(1, ge=1, le=8, description="how far from the last configuration these look, in steps")
    monotone: StrictBool = Field(
        False, description="as the papers: never more aggressive than the checkpoint before"
    )
    parallel_trials: StrictBool = Field(
        False, description="each replica tries another configuration; only where `evaluate` does not communicate"
    )
    fallback: Literal["conservative", "exact"] = Field(
        "conservative", description="how weights are stored when nothing satisfies the bound"
    )
    window: int = Field(50, ge=1, le=100_000, description="batches before a checkpoint whose gradients are averaged")
    beta: float = Field(0.9, gt=0, le=1, description="weight of the newest gradient in that average")
    max_lossy_resumes: int | None = Field(
        None, ge=0, description="from so many lossy restores of a run on, checkpoints are stored exactly"
    )

    @model_validator(mode="before")
    @classmethod
    def _former_keys(cls, tree: Any) -> Any:
        """Read keys and values by their former names."""
        return current_keys(tree, section="search") if isinstance(tree, dict) else tree

    @model_validator(mode="after")
    def _restores_are_measured(self) -> SearchConfig:
        if self.max_run_loss is not None and self.bound != "progress":
            raise ValueError(
                f"search.max_run_loss bounds what restores cost, which search.bound '{self.bound}' does not measure; "
                "set search.bound to 'progress', or leave out max_run_loss"
            )
        return self


class RefinementConfig(StrictModel):
    """How long the refinement layer is kept."""

    keep_last: int = Field(3, ge=1, description="newest checkpoints of a run that keep their refinement")
    max_differences: int = Field(
        1, ge=0, le=100, description="refinement of weights: so many checkpoints in a row store the difference to the "
        "one before them that is stored in full; 0: all are stored in full, as on object stores"
    )

    @property
    def stores_differences(self) -> bool:
        """Whether refinement may be stored as a difference.

        Where one checkpoint alone keeps its refinement, the older layer beside it would take more than it saves.
        """
        return self.max_differences > 0 and self.keep_last > 1


class DSQConfig(StrictModel):
    """Configuration of saves. `DSQConfig()` is the measured default; presets are in `configs/`.

    Args:
        system: system whose defaults and search space are used: "dsq", or one that it is compared with.
        quantize: which tensors are lossy, and how they are stored, as a `QuantizeConfig` or a dict.
        search: how a `Compressor` searches a configuration for each checkpoint.
        delta: how checkpoints are coded against their parents.
        refinement: how many checkpoints keep their refinement layer.
        storage: settings of files and threads.

    Raises:
        ConfigError: names every unknown key and every value out of range.

    Example:
        >>> config = dsq_ckpt.DSQConfig(delta={"max_chain": 8})  # other keys have their defaults
        >>> config.with_values(**{"refinement.keep_last": 5}).refinement.keep_last
        5
        >>> dsq_ckpt.DSQConfig.preset("exact").quantize.weights.method
        'exact'
    """

    system: str = Field("dsq", description="whose defaults and search space: ours, or one it is compared with")
    quantize: QuantizeConfig = QuantizeConfig()
    search: SearchConfig = SearchConfig()
    delta: DeltaConfig = DeltaConfig()
    refinement: RefinementConfig = RefinementConfig()
    storage: StorageConfig = StorageConfig()

    @model_validator(mode="after")
    def _what_differences_serve(self) -> DSQConfig:
        quantize, values = self.quantize, self.delta.against == "values"
        kinds = {"weights": quantize.weights, "exp_avg": quantize.exp_avg, "exp_avg_sq": quantize.exp_avg_sq,
                 "momentum": quantize.momentum, **{f"groups.{name}": group for name, group in quantize.groups.items()}}
        for name, config in kinds.items():
            if config.method == "quantize" and config.codebook.turns and not values:
                raise ValueError(
                    f"quantize.{name} updates one part of a tensor at a time (fit: {config.codebook.fit}), which only "
                    "differences can: set delta.against to values"
                )
        if values and quantize.exp_avg_sq.method == "quantize":
            raise ValueError(
                "delta.against is values, and a lossy sum of differences can make second moments negative: set "
                "quantize.exp_avg_sq.method to exact or bf16"
            )
        return self

    @field_validator("system", mode="before")
    @classmethod
    def _is_registered(cls, name: Any) -> Any:
        if isinstance(name, str) and name in SYSTEMS:
            return name
        SYSTEMS.load()
        *others, last = map(repr, SYSTEMS)
        raise PydanticCustomError(NOT_REGISTERED, "{expected}", {"expected": f"{', '.join(others)} or {last}"})

    @model_validator(mode="before")
    @classmethod
    def _over_the_system(cls, tree: Any) -> Any:
        """Lay what the user gives over the defaults of the chosen system."""
        if not isinstance(tree, dict):
            return tree
        tree = current_keys(tree)
        system = SYSTEMS.get(str(tree.get("system", "dsq")))
        return tree if system is None else merge_trees(current_keys(dict(system.defaults)), tree)

    def __init__(self, **values: Any) -> None:
        """Build a configuration from keyword arguments.

        Raises:
            ConfigError: names every unknown key and every value out of range.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain_errors("configuration", error, DSQConfig, CODEBOOKS, RENAMED)) from None

    @classmethod
    def create(cls, source: DSQConfig | dict[str, Any] | str | os.PathLike[str] | None = None) -> DSQConfig:
        """Return a configuration from any of its forms.

        Args:
            source: a configuration, a dict, the path of a JSON or YAML file, or the name of a preset; None: the
                defaults.

        Raises:
            ConfigError: names every unknown key and every value out of range; there is no such file or preset.
        """
        if source is None:
            return cls()
        if isinstance(source, DSQConfig):
            return source
        expect(
            "config", source, (dict, str, os.PathLike),
            "a DSQConfig, a dict, the path of a JSON or YAML file, or the name of a preset",
        )
        source_name, tree = "configuration", source
        if not isinstance(tree, dict):
            source_name = os.fspath(tree)
            tree = load_tree(tree)
        try:
            return cls(**{str(key): value for key, value in tree.items()})
        except ConfigError as error:
            raise ConfigError(str(error).replace("configuration", source_name, 1)) from None

    @classmethod
    def preset(cls, name: str) -> DSQConfig:
        """Return a configuration that comes with the package.

        Args:
            name: default, smallest, moments_exact or exact.

        Raises:
            ConfigError: there is no such preset.
        """
        return cls.create(load_preset(name))

    def with_values(self, **dotted: Any) -> DSQConfig:
        """Return a copy with values replaced: `config.with_values(**{"delta.max_chain": 8})`.

        Args:
            dotted: new values by the dotted paths of their keys.

        Raises:
            ConfigError: a key does not exist, or a value is out of range.
        """
        tree = self.model_dump()
        for path, value in current_keys(dotted).items():
            node = tree
            *parents, leaf = path.split(".")
            for name in parents:
                if not isinstance(node.get(name), dict):
                    raise ConfigError(f"configuration key '{path}': there is no '{name}'")
                node = node[name]
            node[leaf] = value
        return DSQConfig.create(tree)
