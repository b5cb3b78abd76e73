"""The one configuration tree, `DSQConfig`.

It is built from keyword arguments, a dict, JSON or YAML; every offending key is named at once. A setting that
nothing reads does not exist. The defaults are those measured in `benchmarks/results/` (see `docs/design.md`).
"""

from __future__ import annotations

import json
import os
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dsq_ckpt.errors import ConfigError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Lattice(_Strict):
    """Uniform lattice: code = round(x / step). The zero cell is pruned; beyond the alphabet is protected."""

    fit: Literal["lattice"] = "lattice"
    step: float = Field(0.5, gt=0, le=8, description="cell width in units of the group's root mean square")
    bins: int = Field(62, ge=2, le=62, description="levels besides zero, half of them negative (even number)")
    rate_distortion: float = Field(
        0.05, ge=0, le=2, description="lambda: squared steps of distortion that one bit is worth"
    )

    @model_validator(mode="after")
    def _even(self) -> Lattice:
        if self.bins % 2:
            raise ValueError(f"bins of a lattice must be even (half of the levels are negative), not {self.bins}")
        return self


class KMeans(_Strict):
    """Levels by exact weighted one-dimensional k-means on the sketch, or by Lloyd's iterations as in the papers."""

    fit: Literal["kmeans", "lloyd"] = "kmeans"
    bins: int = Field(16, ge=2, le=254, description="levels, not counting pruned and protected")
    prune: float = Field(0.0, ge=0, le=0.9, description="fraction of the smallest |x| stored as zero")
    protect: float = Field(0.005, ge=0, le=0.2, description="fraction of the largest |x| kept in bf16")
    sigma: float = Field(
        1.0, ge=0, le=1, description="sample weight sigma*frequency + (1-sigma)*|value|; the papers use 0.2"
    )
    rate_distortion: float = Field(
        0.05, ge=0, le=2, description="lambda, in units of 12 x the mean squared error of nearest-level coding"
    )
    domain: Literal["linear", "log"] = Field("linear", description="where distance is measured: x, or log2 |x|")
    seed: int = Field(0, ge=0, description="seed of k-means++ (fit='lloyd')")

    @model_validator(mode="after")
    def _log_has_no_pruning(self) -> KMeans:
        if self.domain == "log" and (self.prune > 0 or self.sigma < 1):
            raise ValueError("domain='log' has no pruning (zeros are kept exactly) and no magnitude weight: "
                             "set prune=0 and sigma=1")
        return self


AnyCodebook = Annotated[Lattice | KMeans, Field(discriminator="fit")]


class TensorConfig(_Strict):
    """How the tensors of one kind (weights, first moments, ...) are stored."""

    method: Literal["quantize", "bf16", "exact"] = "quantize"
    codebook: AnyCodebook = Lattice()
    refinement_bits: int = Field(
        4, ge=0, le=8, description="bits per element for the residual inside the cell, newest checkpoint only"
    )


class Rule(_Strict):
    """Tensors whose fully qualified name matches a shell pattern go to a group, or are stored exactly."""

    pattern: str = Field(min_length=1)
    group: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")


class QuantizeConfig(_Strict):
    """What is lossy, and how."""

    weights: TensorConfig = TensorConfig()
    exp_avg: TensorConfig = TensorConfig(
        codebook=KMeans(bins=2, protect=0.0005, rate_distortion=0.05), refinement_bits=4
    )
    exp_avg_sq: TensorConfig = TensorConfig(
        codebook=KMeans(bins=6, protect=0.0005, domain="log", rate_distortion=0.05), refinement_bits=3
    )
    momentum: TensorConfig = TensorConfig(
        codebook=KMeans(bins=8, protect=0.0005, rate_distortion=0.05), refinement_bits=4
    )
    groups: dict[str, TensorConfig] = Field(
        default_factory=dict, description="by group of weights (embedding, linear, conv, other, or a rule's)"
    )
    rules: tuple[Rule, ...] = Field(default=(), description="first match wins; group 'exact' means bit for bit")
    min_elements: int = Field(4096, ge=1, description="smaller tensors are exact")
    nonfinite: Literal["exact", "error"] = Field("exact", description="what to do with a tensor with NaN or Inf")
    outlier_octaves: int = Field(
        3, ge=0, le=64,
        description="a tensor this many powers of two away from its group is normalised (0: never)",
    )


    @model_validator(mode="before")
    @classmethod
    def _over_the_defaults(cls, tree: Any) -> Any:
        """A block that sets some keys of a kind keeps that kind's defaults for the others, not those of weights."""
        if not isinstance(tree, dict):
            return tree
        tree = dict(tree)
        for kind in ("weights", "exp_avg", "exp_avg_sq", "momentum"):
            if isinstance(tree.get(kind), dict):
                tree[kind] = _merged(cls.model_fields[kind].default.model_dump(), tree[kind])
        if isinstance(tree.get("groups"), dict):
            weights = tree.get("weights", cls.model_fields["weights"].default)
            base = weights.model_dump() if isinstance(weights, TensorConfig) else weights
            tree["groups"] = {
                name: _merged(base, block) if isinstance(block, dict) and isinstance(base, dict) else block
                for name, block in tree["groups"].items()
            }
        return tree

    @model_validator(mode="after")
    def _groups_exist(self) -> QuantizeConfig:
        known = {"embedding", "linear", "conv", "other", *(rule.group for rule in self.rules)}
        unknown = sorted(set(self.groups) - known)
        if unknown:
            raise ValueError(f"groups: there is no group '{unknown[0]}'; there are {', '.join(sorted(known))}")
        return self


class DeltaConfig(_Strict):
    """Coding against the parent checkpoint."""

    enabled: bool = True
    coder: Literal["rans", "huffman"] = "rans"
    max_chain: int = Field(32, ge=1, le=1000, description="a keyframe at the latest after this many deltas")


class RefinementConfig(_Strict):
    """How long the refinement layer is kept."""

    keep_last: int = Field(1, ge=1, description="newest checkpoints of a run that keep their refinement")


class StorageConfig(_Strict):
    """Files and threads."""

    threads: int = Field(0, ge=0, le=256, description="worker threads per rank; 0: cores / local ranks, at most 8")
    fsync: bool = Field(True, description="flush every file and directory to the device before the commit")
    zstd_level: int = Field(3, ge=1, le=19, description="for tensors stored exactly")
    block_elements: int = Field(1 << 20, ge=1 << 10, le=1 << 26, description="elements coded per block")

    def thread_count(self) -> int:
        """Worker threads of this rank."""
        if self.threads:
            return self.threads
        local_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return max(1, min(8, (os.cpu_count() or 1) // local_ranks))


class DSQConfig(_Strict):
    """Everything that can be set. `DSQConfig()` is the measured default; presets lie in `configs/`."""

    quantize: QuantizeConfig = QuantizeConfig()
    delta: DeltaConfig = DeltaConfig()
    refinement: RefinementConfig = RefinementConfig()
    storage: StorageConfig = StorageConfig()

    def __init__(self, **values: Any) -> None:
        """From keyword arguments.

        Raises:
            ConfigError: names every unknown key and every value out of range.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain("configuration", error)) from None

    @classmethod
    def create(cls, source: DSQConfig | dict[str, Any] | str | os.PathLike[str] | None = None) -> DSQConfig:
        """A configuration from nothing, a dict, a JSON or YAML file, or itself.

        Raises:
            ConfigError: names every unknown key and every value out of range.
        """
        if source is None:
            return cls()
        if isinstance(source, DSQConfig):
            return source
        where = "configuration"
        if not isinstance(source, dict):
            where = os.fspath(source)
            source = _read(Path(where))
        try:
            return cls.model_validate(source)
        except ValidationError as error:
            raise ConfigError(_explain(where, error)) from None

    @classmethod
    def preset(cls, name: str) -> DSQConfig:
        """A configuration that comes with the package: default, smallest, moments_exact or exact.

        Raises:
            ConfigError: there is no such preset.
        """
        presets = files("dsq_ckpt.configs")
        names = sorted(entry.name.removesuffix(".yaml") for entry in presets.iterdir() if entry.name.endswith(".yaml"))
        if name not in names:
            raise ConfigError(f"there is no preset '{name}'; choose from {', '.join(names)}")
        return cls.create(yaml.safe_load((presets / f"{name}.yaml").read_text()) or {})

    def with_values(self, **dotted: Any) -> DSQConfig:
        """A copy with values replaced: `config.with_values(**{"delta.max_chain": 8})`."""
        tree = self.model_dump()
        for path, value in dotted.items():
            node = tree
            *parents, leaf = path.split(".")
            for name in parents:
                if not isinstance(node.get(name), dict):
                    raise ConfigError(f"configuration key '{path}': there is no '{name}'")
                node = node[name]
            node[leaf] = value
        return DSQConfig.create(tree)


def _merged(defaults: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` over `defaults`; a codebook of another family takes none of the default one's keys."""
    merged = dict(defaults)
    for key, value in tree.items():
        known = defaults.get(key)
        if isinstance(value, dict) and isinstance(known, dict):
            same = (value.get("fit", known.get("fit")) == "lattice") == (known.get("fit") == "lattice")
            merged[key] = _merged(known, value) if key != "codebook" or same else value
        else:
            merged[key] = value
    return merged


def _read(path: Path) -> Any:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"configuration file '{path}' cannot be read: {error.strerror}") from error
    try:
        tree = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"configuration file '{path}' is not valid {path.suffix or 'YAML'}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"configuration file '{path}' holds {type(tree).__name__}, expected a mapping")
    return tree


def _explain(where: str, error: ValidationError) -> str:
    lines = []
    for issue in error.errors():
        key = ".".join(str(part) for part in issue["loc"] if part not in ("lattice", "kmeans", "lloyd"))
        found = issue.get("input")
        if issue["type"] == "extra_forbidden":
            lines.append(f"  {key}: unknown key{_suggestion(key)}")
        else:
            message = issue["msg"].removeprefix("Value error, ")
            lines.append(f"  {key or '(root)'}: {message} (found {_short(found)})")
    return f"{where}: {len(lines)} problem(s)\n" + "\n".join(lines)


def _suggestion(key: str) -> str:
    known = {name for model in _Strict.__subclasses__() for name in model.model_fields}
    close = get_close_matches(key.rpartition(".")[2], sorted(known), 1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
